"""One conversation as an application sees it: revise, finish, read the reply, interrupt."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from edge.tokenizer import StreamingEncoder
from shared.errors import DeltarelayError, LocalProtocolError, TurnError
from shared.frames import RATE_LIMITED, Reason
from shared.session import EdgeStream
from shared.tokenizer import TextDecoder, Tokenizer


class Reply:
    """A reply as it arrives."""

    def __init__(self, turn: int, tokenizer: Tokenizer) -> None:
        self.turn = turn
        self.asked_at = time.monotonic()
        """When the turn ended, in `time.monotonic`."""
        self.first_at: float | None = None
        """When the first token arrived."""
        self.ids: list[int] = []
        self.shown = 0
        """Ids whose text the reader has taken."""
        self.reason = ""
        """Why it ended; empty while it has not."""
        self.waits = ""
        """Why and how long the decoder makes it wait, if it has said so and nothing has come."""
        self.text = ""
        self._decoder = TextDecoder(tokenizer)
        self._decoded = 0
        self._changed = asyncio.Event()
        self._error: DeltarelayError | None = None

    def extend(self, ids: tuple[int, ...]) -> None:
        """Reply ids arrived."""
        if self.first_at is None:
            self.first_at = time.monotonic()
            self.waits = ""
        self.ids.extend(ids)
        self._changed.set()

    def end(self, reason: str, error: DeltarelayError | None = None) -> None:
        """The reply is over."""
        if not self.reason:
            self.reason, self._error = reason, error
            self._changed.set()

    async def wait(self) -> None:
        """Wait until ids arrive that were not decoded, or the end."""
        while not self.reason and self._decoded == len(self.ids):
            self._changed.clear()
            await self._changed.wait()

    def take(self) -> str:
        """Return the text that arrived since the last call.

        Raises:
            DeltarelayError: the reply ended with an error and there is no text left.
        """
        fresh = self.ids[self._decoded :]
        self._decoded = len(self.ids)
        piece = self._decoder.feed(fresh)
        if self.reason and self._decoded == len(self.ids):
            piece += self._decoder.flush()
        if not piece and self._error is not None:
            raise self._error
        self.text += piece
        return piece

    @property
    def exhausted(self) -> bool:
        """Nothing more will come."""
        return bool(self.reason) and self._decoded == len(self.ids) and self._error is None


class Talk:
    """A conversation. Made by `Agent.conversation`; all methods run in the agent's event loop.

    Args:
        touch: tells the session that the stream changed; True: flush at once.
    """

    def __init__(
        self, stream: EdgeStream, tokenizer: Tokenizer, touch: Callable[[bool], None]
    ) -> None:
        self.stream = stream
        self._tokenizer, self._touch = tokenizer, touch
        self._encoder = StreamingEncoder(tokenizer)
        self._ended = self._encoder
        """The encoder of the last turn that ended, should its end be taken back."""
        self._notice = ""
        self._failure: DeltarelayError | None = None
        self.reply: Reply | None = None
        """The reply of the last turn that ended."""
        self.tokens_committed = self.tokens_taken_back = 0

    @property
    def text(self) -> str:
        """The open turn's text so far."""
        return self._encoder.text

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
        if text is not None and text != self._encoder.text:
            self._revise(text, None)
        reply = self.reply = Reply(self.stream.turn, self._tokenizer)
        self.stream.end()
        self.tokens_committed += len(self.stream.log) - self._encoder.committed
        self._ended, self._encoder = self._encoder, StreamingEncoder(self._tokenizer)
        self._touch(True)
        return self._read(reply)

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
        reply.end("reopened")
        self.stream.reopen()
        self._encoder = self._ended
        self._touch(True)

    # --- what the agent reports

    def replied(self, ids: tuple[int, ...]) -> None:
        """Reply ids arrived."""
        if self.reply is not None:
            self.reply.extend(ids)

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
        self._failure = error
        if self.reply is not None:
            self.reply.end(Reason.ERROR, error)

    # --- inside

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _revise(self, text: str, stable: int | None) -> None:
        before = self._encoder.committed
        plan = self._encoder.plan(text, stable)
        revision = plan.revision
        back = self.stream.revise(revision.keep, revision.ids, revision.tail)
        self._encoder.adopt(plan)
        self.tokens_taken_back += before - revision.keep
        self.tokens_committed += len(revision.ids)
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
                if reply.reason in (Reason.CANCELLED, "reopened"):
                    return
                piece = reply.take()
                reply.shown = len(reply.ids)
                if piece:
                    yield piece
        except GeneratorExit:
            if reply is self.reply:
                self._interrupt()
            raise
