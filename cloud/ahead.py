"""A reply drawn before its turn has ended.

When the words have been quiet for a moment, the turn may have ended: the template's suffix and the
first reply tokens are run behind the words as they stand. If the turn then ends unchanged they go
out at once; a word more, and they are forgotten.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from cloud.engine.sequence import Generation

MAX_TRIES = 3
"""Replies drawn ahead in a turn at once; each `REFILL` seconds of the turn allow one more."""
REFILL = 1.0


@dataclass(slots=True)
class AheadSettings:
    """When and how far to draw ahead; may be changed while serving."""

    tokens: int = 0
    """Reply tokens drawn while a turn may have ended; 0: none."""
    after: float = 0.2
    """Seconds without a new word after which it may."""


@dataclass(slots=True)
class AheadCounts:
    """What came of all drafts of a decoder."""

    tried: int = 0
    dropped: int = 0
    adopted: int = 0
    """Whose turn ended as assumed, with a token there already."""
    turns: int = 0
    """Turns that ended, with or without a draft."""
    seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=4096))
    """From the end of an adopted turn to its first tokens, for the latest ones."""


@dataclass(slots=True)
class Draft:
    """A reply to `user`, ids that may still change."""

    user: list[int]
    generation: Generation
    drawn: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Tokens so far, each with why the reply ends there (empty: it goes on)."""


class Ahead:
    """The drafts of one conversation. Lives in the event loop.

    Args:
        begin: asks the engine for a draft of the turn as it stands; None: there can be none now.
        cancel: stops a draft's generation.
    """

    def __init__(
        self,
        settings: AheadSettings,
        counts: AheadCounts,
        begin: Callable[[], Draft | None],
        cancel: Callable[[Generation], None],
    ) -> None:
        self._settings, self._counts = settings, counts
        self._begin, self._cancel = begin, cancel
        self._draft: Draft | None = None
        self._quiet: asyncio.TimerHandle | None = None
        self._tries = 0
        self._since = 0.0
        """When the turn's first words came, in the loop's clock."""

    def stands(self, user: Ids[int]) -> bool:
        """Tell whether there is a draft and `user` is what it replies to."""
        return self._draft is not None and self._draft.user == user

    def owns(self, generation: Generation) -> Draft | None:
        """Return the draft of a generation, if it is one that counts."""
        draft = self._draft
        return draft if draft is not None and draft.generation is generation else None

    def wait(self) -> None:
        """The words have changed: begin a draft when they have been quiet for a moment."""
        self.drop()
        if not self._settings.tokens:
            return
        loop = asyncio.get_running_loop()
        if self._tries == 0:
            self._since = loop.time()
        if self._tries < MAX_TRIES + (loop.time() - self._since) // REFILL:
            self._quiet = loop.call_later(self._settings.after, self._is_quiet)

    def take(self, user: Ids[int]) -> Draft | None:
        """The turn has ended with `user`: return the draft that replies to it, if there is one."""
        draft = self._draft if self.stands(user) else None
        if draft is not None:
            self._draft = None
        self.drop()
        self._tries = 0
        self._counts.turns += 1
        self._counts.adopted += draft is not None and bool(draft.drawn)
        return draft

    def drop(self) -> None:
        """Forget the draft, and do not begin one until the words change."""
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None
        draft, self._draft = self._draft, None
        if draft is not None:
            self._counts.dropped += 1
            self._cancel(draft.generation)

    def _is_quiet(self) -> None:
        self._quiet = None
        self._draft = self._begin()
        if self._draft is not None:
            self._tries += 1
            self._counts.tried += 1
