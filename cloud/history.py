"""What a conversation's prompt is made of: the opening, and the turns that are finished. No I/O."""

from collections.abc import Sequence as Ids

from cloud.template import ChatTemplate, ChatTurn
from cloud.voice import MIN_REPLY
from shared.errors import ContextLengthError

MAX_CHARACTERS = 16
"""Characters of a system text for each token of the context: more are not even encoded, which would
take long and keep everybody waiting. A token of ordinary text has about four."""


class History:
    """The turns of one conversation, as ids.

    Args:
        context: most tokens of the prompt and the reply together.
    """

    def __init__(self, template: ChatTemplate, context: int) -> None:
        self._template, self._context = template, context
        self._opening: list[int] = []
        self.turns: list[ChatTurn | None] = []
        """None: refused or dropped, no longer part of the prompt."""

    def begin(self, system: str) -> None:
        """Begin anew, with a system text or none.

        Raises:
            ContextLengthError: the system text leaves no room.
            ModelError: the model takes no system text.
        """
        most = MAX_CHARACTERS * self._context
        if len(system) > most:
            raise ContextLengthError(
                f"the system text has {len(system)} characters; a context of {self._context} "
                f"tokens takes {most} at most: shorten it"
            )
        opening = self._template.opening(system)
        if len(opening) + 2 * MIN_REPLY > self._context:
            raise ContextLengthError(
                f"the system text and its template take {len(opening)} tokens of a context of "
                f"{self._context}: shorten it"
            )
        self._opening = opening
        self.turns.clear()

    def prompt(self) -> list[int]:
        """Return the ids up to the open turn's first."""
        kept = [turn for turn in self.turns if turn is not None]
        return self._template.prompt(self._opening, kept)

    def asked(self, user: Ids[int]) -> tuple[list[int], int]:
        """Return the prompt for a reply to `user`, and how many tokens there is room for."""
        prompt = [*self.prompt(), *user, *self._template.reply_opening]
        return prompt, self._context - len(prompt)

    def make_room(self, user: int) -> int | None:
        """Forget whole oldest turns, once a turn of `user` ids does not fit, down to half.

        Returns:
            The last turn that was forgotten now; None: none was.
        """
        if self.has_room(user):
            return None
        last = None
        for number, turn in enumerate(self.turns):
            if turn is not None:
                if self._length(user) <= self._context // 2:
                    break
                self.turns[number] = None
                last = number
        return last

    def has_room(self, user: int) -> bool:
        """Tell whether a turn of `user` ids and a short reply fit."""
        return self._length(user) <= self._context

    def _length(self, user: int) -> int:
        return len(self.prompt()) + user + len(self._template.reply_opening) + MIN_REPLY
