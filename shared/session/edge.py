"""The edge's end of a connection: greeting, pacing, liveness, its streams. No I/O, no clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from msgspec.structs import replace

from shared import frames
from shared.errors import (
    AccessError,
    LinkError,
    LocalProtocolError,
    ModelError,
    RemoteProtocolError,
    SupersededError,
    TokenizerMismatchError,
)
from shared.frames import HelloBody, Load, OpenBody, WelcomeBody
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

PACE = 0.030
"""Seconds between two flushes of one stream."""
SLOWER = {Load.GREEN: 1, Load.YELLOW: 4, Load.RED: 16}
"""How much longer between two flushes; under red no tails at all: the end of the turn has them."""
LOAD_LASTS = 2.0
"""Seconds a load counts unless an acknowledgement repeats it."""
_REFUSALS = (AccessError.code, ModelError.code, TokenizerMismatchError.code)
"""Errors that answer a HELLO, and so its epoch: they are no remains of an earlier connection."""
PATIENCE = 3.0
"""Seconds without an answer, with work pending, after which the decoder counts as gone."""
SILENCE = 2.0
"""Seconds without a word of a reply after which it is asked for: a frame of it, its end, or the
answer to an earlier question may be lost. Twice as long each time."""
MAX_SILENCE = 16.0


@dataclass(slots=True)
class _Silence:
    """A reply of which nothing comes."""

    awaited: tuple[int, int, int]
    until: float
    wait: float = SILENCE


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
        self._pace, self._patience = pace, patience
        self._epoch = hello.epoch
        self._asked = ""
        """Tag of the HELLO whose WELCOME counts; empty without a connection."""
        self._live = False
        self._pending_since: float | None = None
        self._streams: dict[int, EdgeStream] = {}
        self._numbers = count(1)
        self._out: list[Outgoing] = []
        self._flush_at: dict[int, float] = {}
        self._flushed: dict[int, float] = {}
        self._blocked: set[int] = set()
        """Streams out of credit: the next ACK flushes them."""
        self._silences: dict[int, _Silence] = {}
        self.welcome: WelcomeBody | None = None
        self.load = Load.GREEN
        self._load_until = 0.0

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
        self._send(frames.Hello(frames.CONNECTION, self._epoch, body))

    def disconnect(self) -> None:
        """The transport is gone."""
        self._out.clear()
        self._detach()
        self._asked = ""
        self._pending_since = None

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
        if stream.number not in self._streams:
            return
        pace = self._pace * SLOWER[self._load_at(now)]
        due = self._flushed.get(stream.number, -pace) + pace
        self._flush_at[stream.number] = now if urgent else max(now, due)

    def forget(self, stream: EdgeStream) -> None:
        """Drop a closed stream."""
        self._streams.pop(stream.number, None)
        self._flush_at.pop(stream.number, None)
        self._flushed.pop(stream.number, None)
        self._blocked.discard(stream.number)
        self._silences.pop(stream.number, None)

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
            times += self._flush_at.values()
            times += (silence.until for silence in self._silences.values())
        if self._pending_since is not None:
            times.append(self._pending_since + self._patience)
        return min(times, default=None)

    def poll(self, now: float) -> list[Event]:
        """Run what is due at `now`; afterwards `take_outgoing` has what is owed to the wire."""
        if self._live:
            for number in [n for n, at in self._flush_at.items() if at <= now]:
                del self._flush_at[number]
                self._flushed[number] = now
                if self._streams[number].flush(with_tail=self._load_at(now) < Load.RED):
                    self._blocked.add(number)
            self._watch(now)
            self._break_silences(now)
        if self._pending_since is not None and now >= self._pending_since + self._patience:
            self.disconnect()
            what = "no acknowledgement" if self.welcome else "no answer to HELLO"
            error = LinkError(f"{what} for {self._patience:g} s: the decoder is gone or frozen")
            return [Disconnected(error, retry=True)]
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
                answers = self._live or frame.code in _REFUSALS
                if frame.epoch == 0 or (answers and frame.epoch == self._epoch):
                    return self._on_error(frame)
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

    def _detach(self) -> None:
        self._live, self._load_until = False, 0.0
        self._blocked.clear()
        self._silences.clear()
        for stream in self._streams.values():
            stream.detach()

    def _load_at(self, now: float) -> Load:
        return self.load if now < self._load_until else Load.GREEN

    def _watch(self, now: float) -> None:
        """Start or stop the clock of patience."""
        waiting = any(s.unacknowledged for s in self._streams.values())
        if not waiting:
            self._pending_since = None
        elif self._pending_since is None:
            self._pending_since = now

    def _break_silences(self, now: float) -> None:
        """Ask again for replies of which nothing has come for a while."""
        for number, stream in self._streams.items():
            awaited, silence = stream.awaited, self._silences.get(number)
            if awaited is None:
                self._silences.pop(number, None)
            elif silence is None or silence.awaited != awaited:
                self._silences[number] = _Silence(awaited, now + SILENCE)
            elif now >= silence.until:
                stream.ask_again()
                silence.wait = min(2 * silence.wait, MAX_SILENCE)
                silence.until = now + silence.wait

    def _on_welcome(self, body: WelcomeBody, now: float) -> list[Event]:
        if body.answers != self._asked or not self._asked or body.epoch <= self._epoch:
            return []  # to an earlier HELLO, to another agent of this name, or a second copy
        error = self._mismatch(body)
        if error is not None:
            self.disconnect()
            return [Disconnected(error, retry=False)]
        self._live, self._pending_since = True, None
        self._epoch, self.welcome = body.epoch, body
        held = {h.stream: h for h in body.held}
        idle_last = sorted(self._streams.values(), key=lambda stream: not stream.has_words)
        for stream in idle_last:
            stream.attach(body, held.get(stream.number))
            self._flush_at[stream.number] = now
            self._forget_if_over(stream)
        return [Connected(body)]

    def _forget_if_over(self, stream: EdgeStream) -> None:
        if stream.closed and not stream.unacknowledged:
            self.forget(stream)

    def _mismatch(self, body: WelcomeBody) -> TokenizerMismatchError | ModelError | None:
        mine = self._hello
        if mine.tokenizer and mine.tokenizer != body.tokenizer:
            return TokenizerMismatchError(
                f"tokenizer here {mine.tokenizer}, at decoder {body.decoder} {body.tokenizer}: "
                "connect with the decoder's (leave `tokenizer` unset to fetch it)"
            )
        if mine.golden and mine.golden != body.golden:
            return TokenizerMismatchError(
                f"tokenizer {body.tokenizer} splits the golden texts differently here "
                f"({mine.golden}) and at decoder {body.decoder} ({body.golden}): "
                "install the same tokenizer library versions"
            )
        if mine.model and mine.model != body.model:
            return ModelError(
                f"model {mine.model!r} was asked for; decoder {body.decoder} serves {body.model!r}"
            )
        return None

    def _on_error(self, frame: frames.Error) -> list[Event]:
        self.disconnect()
        if frame.code == SupersededError.code:
            return [Disconnected(SupersededError(frame.text), retry=False)]
        if frame.code == AccessError.code:
            return [Disconnected(AccessError(frame.text), retry=False)]
        if frame.code == TokenizerMismatchError.code:
            return [Disconnected(TokenizerMismatchError(frame.text), retry=False)]
        if frame.code == ModelError.code:
            return [Disconnected(ModelError(frame.text), retry=False)]
        if frame.code == RemoteProtocolError.code:
            return [Disconnected(LocalProtocolError(f"the decoder refused: {frame.text}"), False)]
        return [Disconnected(LinkError(f"the decoder ended the connection: {frame.text}"), True)]

    def _on_stream(self, stream: EdgeStream, frame: frames.Frame, now: float) -> list[Event]:
        match frame:
            case frames.Ack():
                stream.acknowledge(frame)
                self.load = Load(min(frame.load, Load.RED))
                self._load_until = now + LOAD_LASTS
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
