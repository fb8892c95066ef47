"""The decoder's copy of one conversation: the open turn and the reply under way. No I/O, no clock.

It outlives connections: a device that comes back finds it by conversation id, and WELCOME says what
it holds. A turn whose reply is complete stays the current one until the edge confirms that it has
all of it: until then the edge may cut the reply, or take the end of the turn back.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from shared import frames
from shared.errors import LocalProtocolError, RemoteProtocolError
from shared.frames import Held, OpenBody, Reason
from shared.session.conversation_log import MAX_TURN
from shared.session.events import (
    Cancelled,
    Closed,
    Ended,
    Event,
    HistorySet,
    Opened,
    Reopened,
    Revised,
)
from shared.tokenlog import TokenLog, crc_of, history_crc

MAX_RESYNCS = 8
"""Resyncs in a row without one frame applied, after which the peer counts as broken."""
RESYNC_JUMP = 1 << 20
"""How far a resync moves the sequence on: beyond every frame that can be under way, so that those
count as old, and so does a second copy of the resync."""


class IdCheck(Protocol):
    """Raise RemoteProtocolError for ids that a peer may not send."""

    def __call__(self, ids: Sequence[int], *, reply: bool = False) -> None: ...


class CloudStream:
    """One conversation; what it sends goes to the connection it is attached to, if any."""

    def __init__(self, body: OpenBody, check_ids: IdCheck) -> None:
        self.body = body
        self.turn = 0
        self.log = TokenLog()
        self.ended = False
        self.attempt = 0
        self.reply: list[int] = []
        """Ids of the current turn's reply; of the last one's until a next begins."""
        self.reason = ""
        """Why the current turn's reply ended; empty while it has not."""
        self.number = self.epoch = 0  # of the connection it belongs to
        self.seq = 0
        """Sequence number of the last frame applied."""
        self.acked = 0
        """Sequence number of the last acknowledgement sent."""
        self.delivered = 0
        """Reply ids the edge has confirmed."""
        self._check_ids = check_ids
        self._send: Callable[[frames.Frame], None] | None = None
        self._tick = 0
        self._unasked = False
        """Reply frames wait until the edge has said, on this connection, what it holds of it."""
        self._resyncs = 0
        self.history_crc = 0
        """CRC of the turns before the current one."""

    @property
    def held(self) -> Held:
        """What WELCOME and RESYNC say of this conversation."""
        return Held(
            stream=self.number,
            turn=self.turn,
            history=self.history_crc,
            length=len(self.log),
            crc=self.log.crc(),
            ended=self.ended,
            attempt=self.attempt,
            seq=self.seq,
        )

    def attach(self, number: int, epoch: int, send: Callable[[frames.Frame], None]) -> None:
        """The device is there, under a new epoch and maybe another stream number."""
        self.number, self.epoch, self._send = number, epoch, send
        self._resyncs = self._tick = 0
        self._unasked = self.ended
        self.acked = self.seq
        self.log.tail = ()

    def detach(self, epoch: int) -> None:
        """The connection with `epoch` is gone; replies are kept for the device's return."""
        if epoch == self.epoch:
            self._send = None
            self.log.tail = ()

    # --- what the owner does

    def extend_reply(self, ids: Sequence[int]) -> None:
        """Send new reply ids."""
        self._check_replying()
        index = len(self.reply)
        self.reply.extend(ids)
        self._emit_tokens(index)

    def finish(self, reason: str) -> None:
        """The reply is complete; the turn stays the current one until the edge confirms."""
        self._check_replying()
        self.reason = reason
        self._emit_finish()

    # --- what the session does

    def apply(self, frame: frames.Reliable) -> list[Event]:
        """Apply a reliable frame in its order; duplicates change nothing, gaps ask for a resync.

        Raises:
            RemoteProtocolError: an id is out of range, or the peer cannot find its way back.
        """
        if frame.seq <= self.seq:
            return []
        events = self._apply(frame) if frame.seq == self.seq + 1 else None
        if events is None:
            return self._resync()
        self.seq = frame.seq
        self._resyncs = 0
        return events

    def apply_tail(self, frame: frames.Tail) -> list[Event]:
        """Apply a provisional tail if it belongs exactly here and is the newest."""
        here = self._open_turn(frame.turn) and frame.after == self.seq
        if not here or frame.tick <= self._tick:
            return []
        self._check_turn(frame.ids, len(self.log))
        self._tick = frame.tick
        if frame.ids == self.log.tail:
            return []
        self.log.tail = frame.ids
        return [Revised(self.number)]

    def acknowledge_reply(self, frame: frames.ReplyAck) -> list[Event]:
        """The edge holds the first `index` reply ids, and asks for the rest or has it all.

        If its ids are not ours (another decoder went on with the reply), ours are void and the edge
        is asked for what it has.

        Raises:
            RemoteProtocolError: the peer cannot find its way back.
        """
        if frame.turn != self.turn or not self.ended:
            return []
        if frame.index > len(self.reply) or crc_of(self.reply[: frame.index]) != frame.crc:
            self._reopen(self.attempt)
            return [Reopened(self.number, self.turn), *self._resync()]
        self._unasked = False
        self.delivered = max(self.delivered, frame.index)
        if frame.again:
            self._emit_tokens(frame.index)
            if self.reason:
                self._emit_finish()
        elif self.reason and frame.index == len(self.reply):
            self._next_turn()
        return []

    # --- inside

    def _apply(self, frame: frames.Reliable) -> list[Event] | None:
        """Return the events of `frame`, or None if it does not fit what is held."""
        match frame:
            case frames.Open():
                self._restart(frame.body)
                return [Opened(self.number, frame.body)]
            case frames.Commit():
                return self._commit(frame)
            case frames.Rewind():
                if not self._open_turn(frame.turn) or frame.to > len(self.log):
                    return None
                self.log.rewind(frame.to)
                return [Revised(self.number)]
            case frames.EndTurn():
                return self._end(frame)
            case frames.Cancel():
                return self._cancel(frame)
            case frames.Reopen():
                if frame.turn != self.turn:
                    return None
                was_ended = self.ended
                self._reopen(frame.attempt)
                return [Reopened(self.number, self.turn)] if was_ended else []
            case frames.History():
                return self._history(frame)
            case frames.Bye():
                return [Closed(self.number, self.body.conversation)]
            case _:
                raise RemoteProtocolError(f"{type(frame).__name__} is not an upward frame")

    def _open_turn(self, turn: int) -> bool:
        return turn == self.turn and not self.ended

    def _check_turn(self, ids: Sequence[int], before: int) -> None:
        """Check ids of the open turn that stand behind `before` others."""
        self._check_ids(ids)
        if before + len(ids) > MAX_TURN:
            raise RemoteProtocolError(
                f"turn {self.turn} of stream {self.number} has {before + len(ids)} ids; at most "
                f"{MAX_TURN} are allowed: end it and go on in the next one"
            )

    def _commit(self, frame: frames.Commit) -> list[Event] | None:
        self._check_turn(frame.ids, frame.base)
        fits = self._open_turn(frame.turn) and frame.base == len(self.log)
        if not fits or not self._extend(frame.ids, frame.crc):
            return None
        return [Revised(self.number)]

    def _end(self, frame: frames.EndTurn) -> list[Event] | None:
        self._check_turn(frame.ids, frame.length - len(frame.ids))
        fits = self._open_turn(frame.turn) and frame.length == len(self.log) + len(frame.ids)
        if not fits or not self._extend(frame.ids, frame.crc):
            return None
        self.ended, self.attempt = True, frame.attempt
        self._begin_reply(())
        return [Ended(self.number)]

    def _extend(self, ids: Sequence[int], crc: int) -> bool:
        """Commit `ids` if the edge and we agree on all that stands then."""
        before = len(self.log)
        self.log.commit(ids)
        self.log.tail = ()
        if self.log.crc() == crc:
            return True
        self.log.rewind(before)
        return False

    def _cancel(self, frame: frames.Cancel) -> list[Event] | None:
        if frame.turn != self.turn or not self.ended or frame.heard > len(self.reply):
            return None
        events: list[Event] = []
        if self.reason == Reason.ERROR:  # which the edge does not know: the turn counts after all
            events.append(Reopened(self.number, frame.turn))
            self.reason = ""
        user_ids = None if self.reason else tuple(self.log.committed)
        self.reason = Reason.CANCELLED
        del self.reply[frame.heard :]
        self._next_turn()
        return [*events, Cancelled(self.number, frame.turn, frame.heard, user_ids)]

    def _history(self, frame: frames.History) -> list[Event] | None:
        self._check_turn(frame.user_ids, 0)
        self._check_ids(frame.reply_ids, reply=True)
        if frame.turn != self.turn:
            return None
        self.log = TokenLog(frame.user_ids)
        self.ended, self.attempt = True, frame.attempt
        self._begin_reply(frame.reply_ids)
        event = HistorySet(self.number, frame.turn, frame.user_ids, frame.reply_ids, frame.done)
        if not frame.done:
            return [event, Ended(self.number)]
        self._next_turn()
        return [event]

    def _begin_reply(self, ids: Sequence[int]) -> None:
        self.reply, self.reason, self.delivered = list(ids), "", len(ids)
        self._unasked = False

    def _reopen(self, attempt: int) -> None:
        self.ended, self.attempt = False, attempt
        self._begin_reply(())

    def _next_turn(self) -> None:
        failed = self.reason == Reason.ERROR  # then nothing of it is in the prompt
        user, reply = ((), ()) if failed else (self.log.committed, self.reply)
        self.history_crc = history_crc(user, reply, self.history_crc)
        self.turn += 1
        self.log, self.reason = TokenLog(), ""
        self.ended, self.attempt = False, 0

    def _restart(self, body: OpenBody) -> None:
        self.body = body
        self.turn, self.log, self.history_crc = 0, TokenLog(), 0
        self._reopen(0)

    def _check_replying(self) -> None:
        if not self.ended or self.reason:
            state = f"complete ({self.reason})" if self.reason else "not asked for"
            raise LocalProtocolError(f"the reply of turn {self.turn} is {state}")

    def _resync(self) -> list[Event]:
        self._resyncs += 1
        if self._resyncs > MAX_RESYNCS:
            raise RemoteProtocolError(
                f"stream {self.number}: {MAX_RESYNCS} resyncs without progress at seq {self.seq}"
            )
        self.seq += RESYNC_JUMP
        self.acked = self.seq
        self.log.tail = ()
        self._put(frames.Resync, held=self.held)
        return []

    def _emit_tokens(self, index: int) -> None:
        if index < len(self.reply) and not self._unasked:
            ids = tuple(self.reply[index:])
            self._put(frames.Tokens, turn=self.turn, attempt=self.attempt, index=index, ids=ids)

    def _emit_finish(self) -> None:
        if not self._unasked:
            reply = {"length": len(self.reply), "reason": self.reason}
            self._put(frames.Finish, turn=self.turn, attempt=self.attempt, **reply)

    def _put(self, kind: Callable[..., frames.Frame], **fields: object) -> None:
        if self._send is not None:
            self._send(kind(stream=self.number, epoch=self.epoch, **fields))
