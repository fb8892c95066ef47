"""The edge's end of a connection: greeting, pacing, liveness, its streams. No I/O, no clock."""

from collections.abc import Callable, Sequence
from itertools import count

from msgspec.structs import replace

from shared import frames
from shared.errors import (
    LinkError,
    LocalProtocolError,
    RemoteProtocolError,
)
from shared.frames import HelloBody, Load, OpenBody, WelcomeBody
from shared.session.agreement import REFUSALS, ending, mismatch
from shared.session.edge_stream import EdgeStream
from shared.session.events import (
    BlobArrived,
    Connected,
    Disconnected,
    Event,
    Finished,
    Noticed,
    Outgoing,
    Refused,
    Replied,
)
from shared.session.pacing import PACE, Pacing
from shared.session.waits import Waits

PATIENCE = 3.0
"""Seconds without an answer, with work pending, after which the decoder counts as gone."""
GREET_EVERY = 1.0
"""Seconds without an answer after which the same HELLO is sent again."""
SILENCE = 2.0
"""Seconds without a word of a reply after which it is asked for: a frame of it, its end, or the
answer to an earlier question may be lost. Twice as long each time."""
REPEAT = 1.25
"""Seconds without an acknowledgement after which a stream's last frame is sent again; twice as long
each time. It makes up for frames that were lost with nothing behind them to show it."""


class EdgeSession:
    """One device's relation to its decoder, over any number of connections in turn.

    Args:
        durable: the owner confirms finished replies (`EdgeStream.confirm`).
    """

    def __init__(
        self,
        hello: HelloBody,
        *,
        pace: float = PACE,
        patience: float = PATIENCE,
        durable: bool = False,
    ) -> None:
        self._hello, self._durable = hello, durable
        self._pacing, self._patience = Pacing(pace), patience
        self._epoch = hello.epoch
        self._asked = ""
        """Tag of the HELLO whose WELCOME counts; empty without a connection."""
        self._greeting: frames.Hello | None = None
        """The HELLO that waits for its answer."""
        self._greet_at = 0.0
        self._live = False
        self._pending_since: float | None = None
        self._streams: dict[int, EdgeStream] = {}
        self._numbers = count(1)
        self._out: list[Outgoing] = []
        self._blocked: set[int] = set()
        """Streams out of credit: the next ACK flushes them."""
        self._replies, self._acknowledgements = Waits(SILENCE), Waits(REPEAT)
        self.welcome: WelcomeBody | None = None

    # --- the connection

    @property
    def live(self) -> bool:
        """WELCOME has arrived and the connection stands."""
        return self._live

    @property
    def awaits_reply(self) -> bool:
        """A turn has ended whose reply is not complete."""
        return any(stream.ended for stream in self._streams.values())

    @property
    def load(self) -> Load:
        """What the decoder said last of how busy it is."""
        return self._pacing.load

    @property
    def epoch(self) -> int:
        """The epoch that was granted last."""
        return self._epoch

    def use_tokenizer(self, digest: str, golden: str) -> None:
        """Name the tokenizer whose ids this edge sends; the next HELLO states it."""
        self._hello = replace(self._hello, tokenizer=digest, golden=golden)

    def connect(self, now: float) -> None:
        """A transport is there: greet. What was queued for an earlier one is void."""
        self._out.clear()
        self._detach()
        self._pending_since = now
        conversations = {s.number: s.body.conversation for s in self._streams.values()}
        body = replace(
            self._hello,
            epoch=self._epoch,
            conversations=conversations,
            clock_us=int(now * 1e6),
        )
        self._asked = body.tag
        self._greeting = frames.Hello(frames.CONNECTION, self._epoch, body)
        self._greet(now)

    def disconnect(self) -> None:
        """The transport is gone."""
        self._out.clear()
        self._detach()
        self._asked = ""
        self._greeting = self._pending_since = None

    # --- the streams

    def open(
        self, body: OpenBody, restore: Callable[[EdgeStream], None] | None = None
    ) -> EdgeStream:
        """Begin a conversation, or go on with one that `restore` brings back."""
        stream = EdgeStream(next(self._numbers), body, self._send, durable=self._durable)
        if restore is not None:
            restore(stream)
        self._streams[stream.number] = stream
        if self._live and self.welcome is not None:
            stream.attach(self.welcome, None)
        return stream

    def touch(self, stream: EdgeStream, now: float, *, urgent: bool = False) -> None:
        """`stream` was revised: flush it at once if `urgent` or it was quiet, else at its pace."""
        if stream.number in self._streams:
            self._pacing.touch(stream.number, now, urgent=urgent)

    def forget(self, stream: EdgeStream) -> None:
        """Drop a closed stream."""
        self._streams.pop(stream.number, None)
        self._blocked.discard(stream.number)
        for timers in (self._pacing, self._replies, self._acknowledgements):
            timers.forget(stream.number)

    def fetch(self, digest: str, offset: int = 0) -> None:
        """Ask for a blob from `offset` on."""
        if not self._live:
            raise LocalProtocolError("fetch before the decoder has answered")
        self._send(frames.Fetch(frames.CONNECTION, self._epoch, digest=digest, offset=offset))

    # --- time and bytes

    def timer(self) -> float | None:
        """When `poll` wants to run next, in the caller's clock; None: after something happened."""
        times: list[float] = []
        if self._live:
            for timers in (self._pacing, self._replies, self._acknowledgements):
                times += timers.times
        if self._greeting is not None:
            times.append(self._greet_at)
        if self._pending_since is not None:
            times.append(self._pending_since + self._patience)
        return min(times, default=None)

    def poll(self, now: float) -> list[Event]:
        """Run what is due at `now`; afterwards `take_outgoing` has what is owed to the wire."""
        if self._live:
            with_tail = self._pacing.load_at(now) < Load.RED
            for number in self._pacing.take_due(now):
                if self._streams[number].flush(with_tail=with_tail):
                    self._blocked.add(number)
            self._watch(now)
            self._break_silences(now)
        if self._pending_since is not None and now >= self._pending_since + self._patience:
            self.disconnect()
            what = "no acknowledgement" if self.welcome else "no answer to HELLO"
            error = LinkError(f"{what} for {self._patience:g} s: the decoder is gone or frozen")
            return [Disconnected(error, retry=True)]
        if self._greeting is not None and now >= self._greet_at:
            self._greet(now)
        return []

    def take_outgoing(self) -> list[Outgoing]:
        """Return the frames owed to the wire, in order, and forget them."""
        out, self._out = self._out, []
        return out

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Take one frame from the decoder.

        Raises:
            RemoteProtocolError: the bytes break the protocol; drop the connection.
        """
        frame = frames.decode(data)
        match frame:
            case None:
                return []
            case frames.Welcome():
                return self._on_welcome(frame.body, now)
            case frames.Error(stream=frames.CONNECTION):
                answers = self._live or frame.code in REFUSALS
                if frame.epoch == 0 or (answers and frame.epoch == self._epoch):
                    self.disconnect()
                    return [ending(frame)]
                return []
            case _:
                pass
        if not self._live or frame.epoch != self._epoch:
            return []  # the remains of an earlier connection
        match frame:
            case frames.Blob():
                return [BlobArrived(frame.digest, frame.offset, frame.size, frame.data)]
            case frames.Notice(stream=frames.CONNECTION):
                return [Noticed(frames.CONNECTION, frame.topic, frame.text)]
            case _:
                pass
        stream = self._streams.get(frame.stream)
        if stream is None:
            return []  # closed here while the frame was under way
        return self._on_stream(stream, frame, now)

    # --- inside

    def _send(self, frame: frames.Frame) -> None:
        minor = self.welcome.minor if self.welcome else frames.MINOR
        self._out.append(
            Outgoing(frames.encode(frame, min(minor, frames.MINOR)), frame.provisional)
        )

    def _greet(self, now: float) -> None:
        assert self._greeting is not None
        self._greet_at = now + GREET_EVERY
        self._send(self._greeting)

    def _detach(self) -> None:
        self._live = False
        self._pacing.forget_load()
        self._blocked.clear()
        self._replies.clear()
        self._acknowledgements.clear()
        for stream in self._streams.values():
            stream.detach()

    def _watch(self, now: float) -> None:
        """Start or stop the clock of patience."""
        waiting = any(s.unacknowledged for s in self._streams.values())
        if not waiting:
            self._pending_since = None
        elif self._pending_since is None:
            self._pending_since = now

    def _break_silences(self, now: float) -> None:
        """Ask for replies, and repeat frames, of which nothing was heard for a while."""
        for number, stream in self._streams.items():
            if self._replies.is_over(number, stream.awaited, now):
                stream.ask_again()
            if self._acknowledgements.is_over(number, stream.unconfirmed_frames, now):
                stream.repeat_last()

    def _on_welcome(self, body: WelcomeBody, now: float) -> list[Event]:
        if body.answers != self._asked or not self._asked or body.epoch <= self._epoch:
            return []  # to an earlier HELLO, to another agent of this name, or a second copy
        error = mismatch(self._hello, body)
        if error is not None:
            self.disconnect()
            return [Disconnected(error, retry=False)]
        self._live, self._greeting, self._pending_since = True, None, None
        self._epoch, self.welcome = body.epoch, body
        held = {h.stream: h for h in body.held}
        idle_last = sorted(self._streams.values(), key=lambda stream: not stream.has_words)
        for stream in idle_last:
            stream.attach(body, held.get(stream.number))
            self._pacing.touch(stream.number, now, urgent=True)
            self._forget_if_over(stream)
        return [Connected(body)]

    def _forget_if_over(self, stream: EdgeStream) -> None:
        if stream.closed and not stream.unacknowledged:
            self.forget(stream)

    def _on_stream(self, stream: EdgeStream, frame: frames.Frame, now: float) -> list[Event]:
        match frame:
            case frames.Ack():
                stream.acknowledge(frame)
                self._pacing.hear(frame.load, now)
                self._pending_since = None
                if stream.number in self._blocked:
                    self._blocked.discard(stream.number)
                    self.touch(stream, now)
                self._forget_if_over(stream)
            case frames.Tokens():
                self._check_ids(frame.ids)
                if fresh := stream.take_tokens(frame):
                    return [Replied(stream.number, fresh)]
            case frames.Finish():
                turn = stream.turn
                if stream.take_finish(frame) is not None:
                    return [Finished(stream.number, turn, frame.reason)]
            case frames.Resync():
                stream.resync(frame)
                self.touch(stream, now, urgent=True)
            case frames.Notice():
                return [Noticed(stream.number, frame.topic, frame.text)]
            case frames.Error():
                stream.detach()
                self.forget(stream)
                return [Refused(stream.number, frame.code, frame.text)]
            case _:
                raise RemoteProtocolError(f"{type(frame).__name__} goes up, not down")
        return []

    def _check_ids(self, ids: Sequence[int]) -> None:
        vocabulary = self.welcome.vocabulary if self.welcome else 0
        if ids and max(ids) >= vocabulary:
            raise RemoteProtocolError(f"reply id {max(ids)}: the vocabulary has {vocabulary}")
