"""A conversation as the edge knows it: finished turns, the open one, the reply so far. Pure.

This is the truth. What of it a decoder has been told is `edge_stream`'s business.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.errors import ContextLengthError, LocalProtocolError
from shared.frames import MAX_FRAME, Reason
from shared.tokenlog import TokenLog, check_ids, history_crc

MAX_TURN = MAX_FRAME // 8
"""Most tokens of a turn: HISTORY has room for the ids of a turn and those of its reply."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A finished turn."""

    user_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    reason: str

    @property
    def kept(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """User and reply ids in the prompt of later turns: none, if it ended in an error."""
        return ((), ()) if self.reason == Reason.ERROR else (self.user_ids, self.reply_ids)


@dataclass(slots=True)
class Reply:
    """What has arrived of the current reply."""

    ids: list[int] = field(default_factory=list[int])
    asked_again_at: int = -1
    """Length at which a gap was reported; not again before it grows."""


class ConversationLog:
    """One conversation; turns are numbered from 0."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.log = TokenLog()
        """Ids of the open turn."""
        self.ended = False
        """The open turn awaits its reply."""
        self.attempt = 0
        """How often its end was taken back."""
        self.reply = Reply()
        self.closed = False
        self.context = MAX_TURN
        """Longest turn the decoder takes, in tokens."""

    @property
    def turn(self) -> int:
        """Index of the open turn."""
        return len(self.turns)

    @property
    def has_words(self) -> bool:
        """Something is being said, or awaits its reply."""
        return self.ended or bool(self.log.ids)

    def revise(self, keep: int, ids: Iterable[int], tail: Iterable[int]) -> bool:
        """Keep `keep` committed ids of the open turn, commit `ids` behind them, set the tail.

        Returns whether a decoder that has all of them is to be told at once.

        Raises:
            LocalProtocolError: the turn has ended, `keep` is out of range, or an id is none.
            ContextLengthError: the turn is longer than the decoder's context.
            After either nothing has changed.
        """
        if self.ended or self.closed:
            state = "closed" if self.closed else "awaiting its reply: reopen() or cancel() first"
            raise LocalProtocolError(f"turn {self.turn} cannot be revised: it is {state}")
        if not 0 <= keep <= len(self.log):
            raise LocalProtocolError(f"keep {keep}: committed are 0..{len(self.log)}")
        ids, tail = check_ids(ids), check_ids(tail)
        length = keep + len(ids) + len(tail)
        if length > self.context:
            raise ContextLengthError(
                f"this turn has {length} tokens; the decoder's context takes {self.context}: "
                "shorten the turn, or end it and go on in the next one"
            )
        takes_back = keep < len(self.log)
        self.log.rewind(keep)
        self.log.commit(ids)
        self.log.tail = tail
        return takes_back

    def end(self) -> None:
        """End the open turn: its tail is committed and a reply is due."""
        if self.closed:
            raise LocalProtocolError("the conversation is closed; open another one")
        if self.ended:
            raise LocalProtocolError(f"turn {self.turn} has ended already")
        self.log.commit(self.log.tail)
        self.log.tail = ()
        self.ended = True

    def restore(
        self,
        turns: Iterable[Turn],
        ids: Iterable[int],
        reply_ids: Iterable[int],
        *,
        ended: bool,
        attempt: int,
    ) -> None:
        """Go on from where an earlier process was: finished turns, the open one, its reply."""
        self.turns = list(turns)
        self.log, self.reply = TokenLog(ids), Reply(list(reply_ids))
        self.ended, self.attempt = ended, attempt

    def cancel(self, heard: int, reason: str = Reason.CANCELLED) -> Turn:
        """End the reply of the current turn; history keeps its first `heard` ids.

        Args:
            reason: a barge-in, or that nobody replied in time.
        """
        if not self.ended or self.closed:
            raise LocalProtocolError(f"turn {self.turn} has no reply to cancel")
        if not 0 <= heard <= len(self.reply.ids):
            raise LocalProtocolError(f"heard {heard}: 0..{len(self.reply.ids)} ids have arrived")
        del self.reply.ids[heard:]
        return self.finish(reason)

    def reopen(self) -> None:
        """Take the end of the current turn back; what arrived of its reply is void.

        Whether anybody has seen that is for the owner to know: then it is `cancel` that is meant.
        """
        if not self.ended or self.closed:
            raise LocalProtocolError(f"turn {self.turn} has not ended, or its reply is complete")
        self.reply = Reply()
        self.ended = False
        self.attempt += 1

    def close(self) -> None:
        """Say goodbye: the decoder forgets the conversation."""
        self.closed = True

    def finish(self, reason: str) -> Turn:
        """Move the current turn, with the reply as it is, to the finished ones."""
        turn = Turn(tuple(self.log.committed), tuple(self.reply.ids), reason)
        self.turns.append(turn)
        self.log, self.reply = TokenLog(), Reply()
        self.ended, self.attempt = False, 0
        return turn

    def history(self, turns: int) -> int:
        """Return the CRC of the first `turns` turns, for `Held.history`."""
        crc = 0
        for turn in self.turns[:turns]:
            crc = history_crc(*turn.kept, crc)
        return crc
