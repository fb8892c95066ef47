"""One conversation as an application sees it: revise, finish, read the reply, interrupt."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import NoReturn

from edge.reply import REOPENED, Reply
from edge.tokenizer import StreamingEncoder
from shared.errors import DeltarelayError, LocalProtocolError, TurnError
from shared.frames import RATE_LIMITED, Reason
from shared.session import EdgeStream
from shared.tokenizer import TextDecoder, Tokenizer, decode
from shared.tokenlog import common_prefix

OWN_DEADLINE = 1.0
"""Seconds that the decoder's word on a deadline may take, before the edge has its own."""


class Talk:
    """A conversation. Made by `Agent.conversation`; all methods run in the agent's event loop.

    It may go on where an earlier block or process left it: with words in the open turn, or with a
    turn that has ended and whose reply nobody has read to its end (`pending`).

    Args:
        touch: tells the session that the stream changed; True: flush at once.
        waited: seconds since that turn ended.
        unread: the last turn's reply was complete when nobody had the conversation.
    """

    def __init__(
        self,
        stream: EdgeStream,
        tokenizer: Tokenizer,
        touch: Callable[[bool], None],
        *,
        waited: float = 0.0,
        unread: bool = False,
    ) -> None:
        self.stream = stream
        self._tokenizer, self._touch = tokenizer, touch
        self._encoder = StreamingEncoder(tokenizer)
        self._found = TextDecoder(tokenizer).feed(stream.log.committed)
        """The open turn's text as it was found, until it is revised."""
        self._ended = self._encoder
        """The encoder of the last turn that ended, should its end be taken back."""
        self._notice = ""
        self._failure: DeltarelayError | None = None
        self._failed = asyncio.Event()
        self.reply: Reply | None = None
        """The reply of the last turn that ended."""
        self._patience: asyncio.TimerHandle | None = None
        self._left = False
        self.tokens_committed = self.tokens_taken_back = 0
        if stream.ended:
            self.reply = Reply(stream.turn, tokenizer)
            self.reply.extend(tuple(stream.reply.ids))
            self._found = ""
            self._await(self.reply, waited)
        elif unread and stream.turns:
            last = stream.turns[-1]
            self.reply = Reply(stream.turn - 1, tokenizer)
            self.reply.extend(last.reply_ids)
            self.reply.end(last.reason)

    @property
    def text(self) -> str:
        """The open turn's text so far."""
        return self._encoder.text or self._found

    @property
    def pending(self) -> bool:
        """A turn has ended, and its reply is still to come or to be read: `resume` does."""
        reply = self.reply
        return reply is not None and not reply.exhausted and not reply.withdrawn

    @property
    def exchanges(self) -> list[tuple[str, str]]:
        """What was said and replied in the turns that are finished."""
        text = partial(decode, self._tokenizer)
        return [(text(turn.user_ids), text(turn.reply_ids)) for turn in self.stream.turns]

    async def revise(self, text: str, stable: int | None = None) -> None:
        """Take the whole text of the turn so far; it may have shrunk or changed.

        During a reply this is a barge-in: the reply is cancelled, history keeps what was read of
        it.

        Args:
            stable: leading characters that the source will not change; those alone may be
                committed. None: the source makes no promise, and what it changes later is taken
                back.

        Raises:
            ContextLengthError: the turn outgrows the decoder's context; nothing was changed.
            InputError: the text is not valid Unicode.
        """
        self._check()
        self._interrupt()
        self._revise(text, stable)

    def finish(self, text: str | None = None) -> AsyncGenerator[str, None]:
        """End the turn, with `text` as its final version, and return the reply's text as it comes.

        The turn ends when this is called, not when the reply is read. A reader that goes away
        cancels the reply.

        Raises:
            LocalProtocolError: the turn has ended already.
            TurnError: (while reading) the reply could not be given; the message says why.
        """
        self._check()
        if self.stream.ended:
            raise LocalProtocolError(
                "the turn has ended and its reply is under way: revise() begins the next turn"
            )
        if text is not None and text != self.text:
            self._revise(text, None)
        reply = self.reply = Reply(self.stream.turn, self._tokenizer)
        self.stream.end()
        self.tokens_committed += len(self.stream.log) - self._encoder.committed
        self._ended, self._encoder = self._encoder, StreamingEncoder(self._tokenizer)
        self._found = ""
        self._touch(True)
        self._await(reply)
        return self._read(reply)

    def resume(self) -> AsyncGenerator[str, None]:
        """Return the text of a pending reply, from its beginning, as `finish` does.

        Raises:
            LocalProtocolError: there is none.
        """
        self._check()
        if self.reply is None or not self.pending:
            raise LocalProtocolError("no reply is pending: finish() ends a turn")
        return self._read(self.reply)

    def reopen(self) -> None:
        """Take the end of the turn back, while no token of the reply has been read.

        Raises:
            LocalProtocolError: it has not ended, or it has been answered.
        """
        self._check()
        reply = self.reply
        if reply is None or reply.reason or not self.stream.ended:
            raise LocalProtocolError("there is no turn whose end could be taken back")
        if reply.shown:
            raise LocalProtocolError("the reply is being read: revise() interrupts it instead")
        reply.end(REOPENED)
        self.stream.reopen()
        self._encoder = self._ended
        self._touch(True)

    async def watch(self) -> NoReturn:
        """Wait until the conversation cannot go on, which may be for ever.

        Raises:
            DeltarelayError: it cannot; the message says why.
        """
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    # --- what the agent reports

    def replied(self, reply: Reply | None, ids: tuple[int, ...]) -> None:
        """Reply ids arrived, when `reply` was the current one."""
        if reply is not None:
            reply.extend(ids)

    def finished(self, turn: int, reason: str) -> None:
        """The reply is complete."""
        if self.reply is None or self.reply.turn != turn:
            return
        error = None
        if reason in (Reason.ERROR, Reason.DEADLINE):
            error = TurnError(self._notice or f"the decoder ended the reply: {reason}")
        self._notice = ""
        self.reply.end(reason, error)

    def noticed(self, topic: str, text: str) -> None:
        """The decoder tells something about this conversation."""
        if topic in ("turn-refused", "deadline"):
            self._notice = text
        elif topic == RATE_LIMITED and self.reply is not None:
            self.reply.waits = text

    def failed(self, error: DeltarelayError) -> None:
        """The conversation cannot go on."""
        self._stop_waiting()
        self._failure = error
        self._failed.set()
        if self.reply is not None:
            self.reply.end(Reason.ERROR, error)

    def close(self) -> None:
        """The application has left: readers that go away interrupt nothing any more."""
        self._left = True
        self._stop_waiting()

    # --- inside

    def _await(self, reply: Reply, waited: float = 0.0) -> None:
        """See to it that the deadline counts without a decoder, too: it may be out of reach."""
        self._stop_waiting()
        deadline = self.stream.body.deadline
        if deadline > 0:
            left = max(0.0, deadline + OWN_DEADLINE - waited)
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(left, self._give_up, reply)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()

    def _give_up(self, reply: Reply) -> None:
        if reply is not self.reply or reply.reason or not self.stream.ended:
            return
        deadline = self.stream.body.deadline
        error = TurnError(f"no complete reply within {deadline:g} s, and no decoder in reach")
        self.stream.cancel(len(self.stream.reply.ids), Reason.DEADLINE)
        reply.end(Reason.DEADLINE, error)
        self._touch(True)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _revise(self, text: str, stable: int | None) -> None:
        committed = self.stream.log.committed
        plan = self._encoder.plan(text, stable)
        keep, ids = plan.revision.keep, plan.revision.ids
        if self._found:  # the encoder begins anew, the log does not
            keep = common_prefix(committed, ids)
            ids = ids[keep:]
        taken_back = len(committed) - keep
        back = self.stream.revise(keep, ids, plan.revision.tail)
        self._encoder.adopt(plan)
        self._found = ""
        self.tokens_taken_back += taken_back
        self.tokens_committed += len(ids)
        self._touch(back)

    def _interrupt(self) -> None:
        """End a reply under way: somebody speaks."""
        reply = self.reply
        if reply is not None and not reply.reason and self.stream.ended:
            shown = min(reply.shown, len(self.stream.reply.ids))
            reply.end(Reason.CANCELLED)
            self.stream.cancel(shown)
            self._touch(True)

    async def _read(self, reply: Reply) -> AsyncGenerator[str, None]:
        try:
            while not reply.exhausted:
                await reply.wait()
                if reply.withdrawn:
                    return
                piece = reply.take()
                reply.shown = len(reply.ids)
                if piece:
                    yield piece
        except GeneratorExit:
            if reply is self.reply and not self._left:
                self._interrupt()
            raise
