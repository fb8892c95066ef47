"""The decoder's session and a device that sends what it likes."""

from collections.abc import Sequence
from random import Random
from typing import Any

from shared import frames
from shared.errors import RemoteProtocolError
from shared.frames import HelloBody, OpenBody, Reason
from shared.session import CloudSession, FetchAsked
from shared.session.cloud import MAX_STREAMS
from shared.session.conversation_log import MAX_TURN
from shared.tokenlog import crc_of
from tests.fuzz.choices import Choices
from tests.fuzz.frame_choices import draw_frame
from tests.relay_world import Decoder, World, check_ids

UP: tuple[type[frames.Frame], ...] = (
    *(frames.Hello, frames.Open, frames.Commit, frames.Commit, frames.Rewind, frames.EndTurn),
    *(frames.EndTurn, frames.Cancel, frames.Reopen, frames.History, frames.Bye, frames.Tail),
    *(frames.ReplyAck, frames.ReplyAck, frames.Fetch, frames.Ack),
)
OPENS = (OpenBody("c0"), OpenBody("c1"), OpenBody("c2", system="x", deadline=float("nan")))
MAX_STEPS, MAX_INPUT = 120, 4096
MOST_OUT = 2 * frames.MAX_FRAME
"""Bytes that one frame from a device may make the session owe."""


def seeds() -> list[bytes]:
    """Ordinary talk, by chance."""
    return [Random(number).randbytes(600) for number in range(6)]


def target(data: bytes) -> None:
    """One error ends a connection; what is held stays within bounds, and another can resume it."""
    Stranger(Choices(data[:MAX_INPUT])).play()


class Stranger:
    """A device that is connected to an honest decoder."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._decoder = Decoder("d", World(decoders=2))
        self._past: list[bytes] = []
        self._now, self._clock = 100.0, 0
        self._connect({})

    def play(self) -> None:
        """Do something, as long as there are bytes."""
        for _ in range(MAX_STEPS):
            if not self._choices.more:
                return
            try:
                self._step()
            except RemoteProtocolError:
                self._session.detach()
                held = self._session.streams.items()
                self._connect({n: s.body.conversation for n, s in held if n < 1 << 32})
            self._check()

    def _connect(self, conversations: dict[int, str]) -> None:
        self._session = CloudSession(check_ids)
        self._clock += 1
        hello = HelloBody("car", "b", conversations=conversations, clock_us=self._clock)
        self._receive(frames.encode(frames.Hello(0, 0, hello)))

    def _step(self) -> None:
        choices = self._choices
        match choices.byte() % 16:
            case 0:
                self._now += choices.pick((0.01, 0.1, 5.0))
                self._session.poll(self._now)
            case 1 | 2:
                for scribe in self._decoder.scribes.values():
                    scribe.draw(1 + choices.below(3))
            case 3:
                for scribe in self._decoder.scribes.values():
                    scribe.finish(choices.pick((Reason.STOP, Reason.ERROR)))
            case 4 if self._past:
                self._receive(choices.pick(self._past[-16:]))
            case 5 if self._past:
                damaged = bytearray(choices.pick(self._past[-16:]))
                damaged[choices.below(min(len(damaged), 64))] ^= 1 << choices.below(8)
                self._receive(bytes(damaged))
            case 6:
                self._receive(choices.bytes(choices.below(40)))
            case _:
                frame = draw_frame(choices, UP, self._likely(), self._bodies())
                if frame is not None:
                    self._past.append(frame)
                    self._receive(frame)

    def _bodies(self) -> dict[type[frames.Frame], Sequence[Any]]:
        self._clock += 1
        names = ({}, {1: "c0"}, {2: "c1", 1: "c0"}, {1: "c0", 2: "c0"}, {0: "c0", 9: "c2"})
        epoch = self._choices.pick((0, 0, 1, 1 << 61, 1 << 63))
        hello = [
            HelloBody("car", "b", 0, epoch, clock_us=self._clock, conversations=n) for n in names
        ]
        return {frames.Hello: hello, frames.Open: OPENS}

    def _likely(self) -> dict[str, Any]:
        number = self._choices.pick((1, 1, 1, 2, 3))
        stream = self._session.streams.get(number)
        header = {"stream": number, "epoch": self._decoder.epoch, "seq": 1}
        if stream is None:
            return header
        log, reply = stream.log, stream.reply
        told = {"index": len(reply), "crc": crc_of(reply), "heard": len(reply) // 2}
        turn = {"turn": stream.turn, "base": len(log), "to": len(log) // 2, "after": stream.seq}
        crcs = {"crc_of_ids": lambda ids: crc_of(ids, log.crc())}
        return header | told | turn | crcs | {"seq": stream.seq + 1, "attempt": stream.attempt}

    def _receive(self, data: bytes) -> None:
        for event in self._session.receive(data, self._now):
            if isinstance(event, FetchAsked):
                self._session.notice(0, "no-blob", f"blob {event.digest} is not held here")
                self._session.blob(event.digest, event.offset, bytes(100_000))
            else:
                self._decoder.take(self._session, event)
        owed = sum(len(frame) for frame, _ in self._session.take_outgoing())
        assert owed <= MOST_OUT, owed

    def _check(self) -> None:
        assert len(self._session.streams) <= MAX_STREAMS
        for number, stream in self._session.streams.items():
            assert number == stream.number
            assert len(stream.log) + len(stream.log.tail) <= MAX_TURN
            frames.encode(frames.Resync(number, stream.epoch, stream.held))
            assert stream.log.crc() == crc_of(stream.log.committed)
        for scribe in self._decoder.scribes.values():
            assert len(scribe.turns) <= scribe.stream.turn + 1
