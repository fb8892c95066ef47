"""The decoder's end of a connection: epochs, acknowledgements, its streams. No I/O, no clock."""

from collections.abc import Mapping

import msgspec

from shared import frames
from shared.errors import (
    CapacityError,
    DeltarelayError,
    RemoteProtocolError,
    SupersededError,
)
from shared.frames import HelloBody, Load, WelcomeBody
from shared.session.cloud_stream import CloudStream, IdCheck
from shared.session.events import Closed, Event, FetchAsked, Greeted, Outgoing

ACK_EVERY = 8
"""Reliable frames after which an acknowledgement goes out at once."""
ACK_WITHIN = 0.1
"""Seconds within which any reliable frame is acknowledged."""
CREDIT = 64
"""Reliable frames an edge may have on the wire beyond the last acknowledgement."""
MAX_STREAMS = 256
"""Open conversations of one device."""
MAX_OVER = 1024
"""Closed streams that a connection remembers: no copy of a frame is under way for longer."""
MAX_TEXT = 4096
"""Characters of a message: one that repeats what a device sent cannot outgrow a frame."""
MAX_BLOB_DATA = 64 * 1024
"""Bytes of a blob in one frame."""


class CloudSession:
    """One device's connection. The owner answers `Greeted` with `welcome` or `refuse`."""

    def __init__(self, check_ids: IdCheck, *, credit: int = CREDIT) -> None:
        self._check_ids = check_ids
        self.credit = credit
        """What acknowledgements grant; the owner lowers it for a device that is to slow down."""
        self._epoch = 0
        self._minor = frames.MINOR
        self._live = False
        self._out: list[Outgoing] = []
        self._ack_at: float | None = None
        self._hello: HelloBody | None = None
        """The HELLO that WELCOME answers."""
        self._over: dict[int, None] = {}
        """Streams that were closed or refused on this connection, the last `MAX_OVER` of them:
        another OPEN of one is a copy."""
        self._early: set[int] = set()
        """Streams of which frames came before their OPEN, and were dropped."""
        self._welcome: frames.Welcome | None = None
        self.streams: dict[int, CloudStream] = {}
        self.load = Load.GREEN

    # --- what the owner does

    def welcome(self, body: WelcomeBody, streams: Mapping[int, CloudStream]) -> None:
        """Accept the device under `body.epoch`, with the conversations held, by stream number."""
        self.detach()  # of an earlier greeting on the same connection
        self._epoch, self._live = body.epoch, True
        self._over.clear()
        self._early.clear()
        self._minor = min(body.minor, frames.MINOR)
        self.streams = dict(streams)
        for number, stream in self.streams.items():
            stream.attach(number, self._epoch, self._send)
        held = [stream.held for stream in self.streams.values()]
        tag = self._hello.tag if self._hello else ""
        body = msgspec.structs.replace(body, held=held, credit=self.credit, answers=tag)
        self._welcome = frames.Welcome(frames.CONNECTION, self._epoch, body)
        self._send(self._welcome)

    def refuse(self, error: DeltarelayError, epoch: int = 0) -> None:
        """Tell the device why its connection ends (`epoch` 0: whatever its epoch is)."""
        self._send(frames.Error(frames.CONNECTION, epoch, error.code, str(error)[:MAX_TEXT]))

    def refuse_stream(self, number: int, error: DeltarelayError) -> None:
        """Tell the device that this conversation cannot go on; the others do."""
        self._note_over(number)
        stream = self.streams.pop(number, None)
        if stream is not None:
            stream.detach(self._epoch)
        self._send(frames.Error(number, self._epoch, error.code, str(error)[:MAX_TEXT]))

    def supersede(self, epoch: int) -> None:
        """The device is connected elsewhere, under `epoch`: tell this agent, and let go."""
        self._refuse_epoch(self._epoch, epoch)
        self.detach()

    def notice(self, number: int, topic: str, text: str) -> None:
        """Tell the device something (stream 0: about the connection)."""
        if self._live:
            self._send(frames.Notice(number, self._epoch, topic, text[:MAX_TEXT]))

    def blob(self, digest: str, offset: int, content: bytes) -> None:
        """Answer a FETCH with the next piece of `content`."""
        data = content[offset : offset + MAX_BLOB_DATA]
        self._send(frames.Blob(frames.CONNECTION, self._epoch, digest, offset, len(content), data))

    def detach(self) -> None:
        """The connection is gone; its streams wait for the device."""
        self._live, self._ack_at = False, None
        for stream in self.streams.values():
            stream.detach(self._epoch)

    # --- time and bytes

    def timer(self) -> float | None:
        """When `poll` wants to run next."""
        return self._ack_at

    def poll(self, now: float) -> list[Event]:
        """Send the acknowledgements that are due."""
        if self._ack_at is not None and now >= self._ack_at:
            for stream in self.streams.values():
                if stream.acked < stream.seq:
                    self._acknowledge(stream)
            self._ack_at = None
        return []

    def take_outgoing(self) -> list[Outgoing]:
        """Return the frames owed to the wire, in order, and forget them."""
        out, self._out = self._out, []
        return out

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Take one frame from the edge.

        Raises:
            RemoteProtocolError: the bytes break the protocol, or an id is out of range; this
                device's connection ends, and no other.
        """
        frame = frames.decode(data)
        if frame is None:
            return []
        if isinstance(frame, frames.Hello):
            last, hello = self._hello, frame.body
            if last is not None and hello.boot == last.boot and hello.clock_us <= last.clock_us:
                self._welcome_again(hello)
                return []  # a second copy
            _check_conversations(hello)
            self._hello = hello
            return [Greeted(hello)]
        if not self._live:
            return []  # the remains of an earlier connection, or a frame before HELLO
        if frame.epoch != self._epoch:
            if frame.epoch < self._epoch:
                self._refuse_epoch(frame.epoch, self._epoch)
            return []
        return self._on_frame(frame, now)

    # --- inside

    def _send(self, frame: frames.Frame) -> None:
        self._out.append(Outgoing(frames.encode(frame, self._minor), frame.provisional))

    def _welcome_again(self, hello: HelloBody) -> None:
        """A HELLO came twice: the edge may not have our answer, and takes only one."""
        if self._live and self._welcome is not None and self._welcome.body.answers == hello.tag:
            self._send(self._welcome)

    def _refuse_epoch(self, old: int, new: int) -> None:
        error = SupersededError(
            f"epoch {old} of this device was superseded by {new}: "
            "another agent uses the same identity"
        )
        self.refuse(error, old)

    def _on_frame(self, frame: frames.Frame, now: float) -> list[Event]:
        if isinstance(frame, frames.Fetch):
            return [FetchAsked(frame.digest, frame.offset)]
        if isinstance(frame, frames.Open):
            self._check_open(frame)
        stream = self.streams.get(frame.stream) or self._new_stream(frame)
        if stream is None:  # of a conversation that is over, or not open yet
            if frame.stream not in self._over and len(self._early) < MAX_STREAMS:
                self._early.add(frame.stream)
            return []
        if stream.epoch != self._epoch:
            self.supersede(stream.epoch)
            return []
        match frame:
            case frames.Tail():
                return stream.apply_tail(frame)
            case frames.ReplyAck():
                return stream.acknowledge_reply(frame)
            case frames.Reliable():
                events = stream.apply(frame)
                if frame.stream in self._early:
                    self._early.discard(frame.stream)
                    stream.say_what_is_held()
            case _:
                raise RemoteProtocolError(f"{type(frame).__name__} goes down, not up")
        self._owe_acknowledgement(stream, now)
        if any(isinstance(event, Closed) for event in events):
            self._acknowledge(stream)
            del self.streams[frame.stream]
            self._note_over(frame.stream)
            stream.detach(self._epoch)
        return events

    def _check_open(self, frame: frames.Open) -> None:
        """Check that a stream is one conversation, and a conversation one stream."""
        if frame.stream == frames.CONNECTION:
            raise RemoteProtocolError("OPEN of stream 0: that is the connection itself")
        if frame.stream in self._over:
            return  # a copy
        name = frame.body.conversation
        for number, stream in self.streams.items():
            if (number == frame.stream) != (stream.body.conversation == name):
                raise RemoteProtocolError(
                    f"OPEN of stream {frame.stream} names conversation {name!r}; stream {number} "
                    f"is {stream.body.conversation!r}: a conversation has one stream"
                )

    def _new_stream(self, frame: frames.Frame) -> CloudStream | None:
        if not isinstance(frame, frames.Open):
            return None
        if frame.stream in self._over:
            return None
        if len(self.streams) >= MAX_STREAMS:
            error = f"a device has at most {MAX_STREAMS} open conversations: close one first"
            self.refuse_stream(frame.stream, CapacityError(error))
            return None
        stream = CloudStream(frame.body, self._check_ids)
        stream.seq = frame.seq - 1
        stream.attach(frame.stream, self._epoch, self._send)
        self.streams[frame.stream] = stream
        return stream

    def _note_over(self, number: int) -> None:
        self._over[number] = None
        if len(self._over) > MAX_OVER:
            del self._over[next(iter(self._over))]

    def _owe_acknowledgement(self, stream: CloudStream, now: float) -> None:
        if stream.seq - stream.acked >= ACK_EVERY:
            self._acknowledge(stream)
        elif self._ack_at is None:
            self._ack_at = now + ACK_WITHIN

    def _acknowledge(self, stream: CloudStream) -> None:
        stream.acked = stream.seq
        number, held = stream.number, stream.answer()
        if held is not None:
            self._send(frames.Resync(number, self._epoch, held))
        else:
            load = int(self.load)
            self._send(frames.Ack(number, self._epoch, stream.seq, self.credit, load))


def _check_conversations(hello: HelloBody) -> None:
    names = hello.conversations
    if frames.CONNECTION in names or len(set(names.values())) < len(names):
        raise RemoteProtocolError(
            f"HELLO names {len(names)} conversations, one of them twice or as stream 0: "
            "a conversation has one stream, numbered from 1"
        )


def greeting(hello: HelloBody, body: WelcomeBody, known_epoch: int) -> WelcomeBody:
    """Return `body` for the device of `hello`: the next epoch and the protocol both ends speak."""
    return msgspec.structs.replace(
        body,
        epoch=max(hello.epoch, known_epoch) + 1,
        minor=min(hello.minor, frames.MINOR),
        max_frame=min(hello.max_frame, body.max_frame),
    )
