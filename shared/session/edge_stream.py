"""The difference between the edge's conversation and what its decoder was told. No I/O, no clock.

`_told` committed ids of the open turn are on the wire, of which the first `_synced` still stand. A
flush sends the difference: REWIND if the wire is ahead of what stands, COMMIT for what is new, TAIL
for the rest.

A finished reply is confirmed once it is safe here: until then the decoder keeps it, and hears
nothing of the next turn.
"""

from collections.abc import Callable, Iterable

from shared import frames
from shared.errors import RemoteProtocolError
from shared.frames import Held, OpenBody, Reason, WelcomeBody
from shared.session.conversation_log import MAX_TURN, ConversationLog, Turn
from shared.tokenlog import crc_of


class EdgeStream(ConversationLog):
    """One conversation; `send(frame)` puts a frame on the wire, and is only called while `live`.

    Args:
        durable: the owner calls `confirm` when a finished reply is on disk; otherwise it is
            confirmed at once.
    """

    def __init__(
        self,
        number: int,
        body: OpenBody,
        send: Callable[[frames.Frame], None],
        *,
        durable: bool = False,
    ) -> None:
        super().__init__()
        self.number = number
        self.body = body
        self._send = send
        self._durable = durable
        self._attached = False
        self._unconfirmed: int | None = None
        """The finished turn that is still the decoder's current one."""
        self._missed: tuple[Held | None] | None = None
        """What a decoder said it holds while a turn was unconfirmed."""
        self._epoch = 0
        self._seq = self._acked = 0
        self._last: frames.Frame | None = None
        """The reliable frame sent last."""
        self._credit = 0
        self._told = self._synced = 0
        self._tick = 0
        self._tail_told: tuple[int, tuple[int, ...]] = (0, ())
        """Sequence number and ids of the last TAIL."""

    # --- what the owner does

    def revise(self, keep: int, ids: Iterable[int], tail: Iterable[int]) -> bool:
        """Revise the open turn; return whether ids already told are taken back: flush at once."""
        super().revise(keep, ids, tail)
        self._synced = min(self._synced, keep)
        return self._told > self._synced

    def end(self) -> None:
        """End the open turn, past pacing and credit."""
        super().end()
        if self._live:
            self._send_end()

    def cancel(self, heard: int, reason: str = Reason.CANCELLED) -> Turn:
        """End the reply of the current turn; history keeps its first `heard` ids."""
        turn = super().cancel(heard, reason)
        if self._live:
            self._emit(frames.Cancel, turn=self.turn - 1, heard=heard)
        return turn

    def reopen(self) -> None:
        """Take the end of the current turn back; what arrived of its reply is void."""
        super().reopen()
        if self._live:
            self._emit(frames.Reopen, turn=self.turn, attempt=self.attempt)

    def close(self) -> None:
        """Say goodbye: the decoder forgets the conversation."""
        if not self.closed:
            super().close()
            if self._live:
                self._emit(frames.Bye)

    # --- what the session does

    @property
    def unacknowledged(self) -> int:
        """Reliable frames the decoder has not confirmed."""
        return self._seq - self._acked if self._attached else 0

    @property
    def awaited(self) -> tuple[int, int, int] | None:
        """Turn, attempt and length so far of the reply that the decoder is known to owe, if any."""
        if not self._live or not self.ended or self.closed or self.unacknowledged:
            return None
        return self.turn, self.attempt, len(self.reply.ids)

    @property
    def unconfirmed_frames(self) -> tuple[int, int] | None:
        """Numbers of the last reliable frame and of the last one confirmed, if they differ."""
        return (self._seq, self._acked) if self._live and self.unacknowledged else None

    @property
    def _live(self) -> bool:
        """Changes are told. Otherwise they touch the log only; the difference is told later."""
        return self._attached and self._unconfirmed is None

    def detach(self) -> None:
        """The connection is gone."""
        self._attached, self._missed = False, None

    def attach(self, welcome: WelcomeBody, held: Held | None) -> None:
        """A connection is there and the decoder holds `held`: send what it lacks."""
        self._attached, self._epoch, self._credit = True, welcome.epoch, max(1, welcome.credit)
        most = max(1, min(MAX_TURN, welcome.max_frame // 8))
        self.context = min(welcome.context or most, most)
        self._learn(held)

    def confirm(self) -> None:
        """The finished reply is safe here: the decoder may let go of it, and hears what followed.

        `touch` the stream afterwards: what is new of the open turn waits for a flush.
        """
        number, self._unconfirmed = self._unconfirmed, None
        missed, self._missed = self._missed, None
        if number is None or not self._attached:
            return
        if missed is not None:
            self._catch_up(missed[0])
            return
        reply = self.turns[number].reply_ids
        self._put(frames.ReplyAck, turn=number, index=len(reply), crc=crc_of(reply), again=False)
        following = number + 1
        history = self.history(following)
        self._catch_up(
            Held(self.number, following, history, 0, 0, ended=False, attempt=0, seq=self._seq)
        )

    def repeat_last(self) -> None:
        """Send the last reliable frame again: it is applied, or confirmed, or shows a gap."""
        if self._live and self._last is not None:
            self._send(self._last)

    def flush(self, *, with_tail: bool = True) -> bool:
        """Send what is new of the open turn; return whether something still waits for credit."""
        if not self._live or self.ended or self.closed:
            return False
        self._send_rewind()
        fresh = tuple(self.log.committed[self._told :])
        if fresh:
            if self.unacknowledged >= self._credit:
                return True
            base, self._told = self._told, len(self.log)
            self._synced = self._told
            self._emit(frames.Commit, turn=self.turn, base=base, ids=fresh, crc=self.log.crc())
        if with_tail:
            self._send_tail()
        return False

    def acknowledge(self, ack: frames.Ack) -> None:
        """Everything up to `ack.seq` is applied."""
        self._acked = max(self._acked, min(ack.seq, self._seq))
        self._credit = max(1, ack.credit)

    def resync(self, frame: frames.Resync) -> None:
        """The decoder missed something: go back to what it holds (once, if told twice)."""
        if frame.held.seq >= self._seq:
            self._learn(frame.held)

    def ask_again(self) -> None:
        """Ask for what there is of the reply beyond what has arrived."""
        self.reply.asked_again_at = -1
        self._ask_again()

    def take_tokens(self, frame: frames.Tokens) -> tuple[int, ...]:
        """Return the reply ids of `frame` that are new here; a gap is asked for once.

        Raises:
            RemoteProtocolError: the reply is longer than was asked for.
        """
        if not self._expects(frame.turn, frame.attempt):
            return ()
        have = len(self.reply.ids)
        if frame.index > have:
            self._ask_again()
            return ()
        fresh = frame.ids[have - frame.index :]
        if have + len(fresh) > self.body.max_tokens:
            raise RemoteProtocolError(
                f"the reply of turn {frame.turn} has {have + len(fresh)} ids; "
                f"{self.body.max_tokens} were asked for"
            )
        self.reply.ids.extend(fresh)
        return fresh

    def take_finish(self, frame: frames.Finish) -> Turn | None:
        """Return the finished turn if `frame` completes the current reply; a gap is asked for.

        Raises:
            RemoteProtocolError: the reply is shorter than what has arrived of it.
        """
        if not self._expects(frame.turn, frame.attempt):
            return None
        have = len(self.reply.ids)
        if frame.length > have:
            self._ask_again()
            return None
        if frame.length < have:
            raise RemoteProtocolError(
                f"the reply of turn {frame.turn} ends after {frame.length} ids: {have} have arrived"
            )
        self._unconfirmed = self.turn
        turn = self.finish(frame.reason)
        if not self._durable:
            self.confirm()
        return turn

    def finish(self, reason: str) -> Turn:
        """Move the current turn to the finished ones: nothing of the next is told yet."""
        self._told = self._synced = 0
        self._tail_told = (0, ())
        return super().finish(reason)

    # --- inside

    def _expects(self, turn: int, attempt: int) -> bool:
        awaited = self.ended and not self.closed
        return awaited and turn == self.turn and attempt == self.attempt

    def _put(self, kind: Callable[..., frames.Frame], **fields: object) -> frames.Frame:
        frame = kind(stream=self.number, epoch=self._epoch, **fields)
        self._send(frame)
        return frame

    def _emit(self, kind: type[frames.Reliable], **fields: object) -> None:
        self._seq += 1
        self._last = self._put(kind, seq=self._seq, **fields)

    def _send_rewind(self) -> None:
        if self._told > self._synced:
            self._told = self._synced
            self._emit(frames.Rewind, turn=self.turn, to=self._synced)

    def _send_tail(self) -> None:
        seq, seen = self._tail_told
        tail = self.log.tail
        if tail == (seen if seq == self._seq else ()):  # any newer frame cleared it over there
            return
        self._tick += 1
        self._tail_told = (self._seq, tail)
        self._put(frames.Tail, turn=self.turn, after=self._seq, tick=self._tick, ids=tail)

    def _send_end(self) -> None:
        self._send_rewind()
        rest = tuple(self.log.committed[self._told :])
        self._told = self._synced = len(self.log)
        self._emit(
            frames.EndTurn,
            turn=self.turn,
            attempt=self.attempt,
            ids=rest,
            length=len(self.log),
            crc=self.log.crc(),
        )

    def _send_history(self, first: int) -> None:
        """Send finished turns from `first` on, then whatever the current turn is."""
        for number in range(first, self.turn):
            user_ids, reply_ids = self.turns[number].kept
            self._emit(
                frames.History,
                turn=number,
                attempt=0,
                user_ids=user_ids,
                reply_ids=reply_ids,
                done=True,
            )
        if self.ended and self.reply.ids:
            self._told = self._synced = len(self.log)
            self._emit(
                frames.History,
                turn=self.turn,
                attempt=self.attempt,
                user_ids=tuple(self.log.committed),
                reply_ids=tuple(self.reply.ids),
                done=False,
            )
        elif self.ended:
            self._send_end()

    def _learn(self, held: Held | None) -> None:
        """A decoder says what it holds."""
        if self._unconfirmed is None:
            self._catch_up(held)
        else:
            self._missed = (held,)

    def _catch_up(self, held: Held | None) -> None:
        """The decoder holds this much of the conversation: send the rest."""
        self._seq = self._acked = held.seq if held else 0
        self._last = None
        self._told = self._synced = 0
        self._tail_told = (0, ())
        self.reply.asked_again_at = -1
        if self.closed:
            if held is not None:
                self._emit(frames.Bye)
        elif held is None or held.turn > self.turn or held.history != self.history(held.turn):
            self._emit(frames.Open, body=self.body)
            self._send_history(0)
        elif held.turn < self.turn:
            self._send_history(held.turn)
        else:
            self._catch_up_turn(held)

    def _catch_up_turn(self, held: Held) -> None:
        """The decoder is in the same turn, maybe at another point of it."""
        same_words = self.log.matches(held.length, held.crc)
        same_end = self.ended and held.ended and held.attempt == self.attempt
        if same_end and same_words and held.length == len(self.log):
            self._told = self._synced = len(self.log)
            self._ask_again()
            return
        if held.ended:
            self._emit(frames.Reopen, turn=self.turn, attempt=self.attempt)
        self._told, self._synced = held.length, held.length if same_words else 0
        if self.ended:
            self._send_history(self.turn)

    def _ask_again(self) -> None:
        if self.reply.asked_again_at != len(self.reply.ids):
            self.reply.asked_again_at = len(self.reply.ids)
            have = self.reply.ids
            crc = crc_of(have)
            self._put(frames.ReplyAck, turn=self.turn, index=len(have), crc=crc, again=True)
