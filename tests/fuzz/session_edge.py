"""The edge's session and a decoder that sends what it likes; an honest one takes over from it."""

from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

import msgspec

from shared import frames
from shared.errors import ContextLengthError, RemoteProtocolError
from shared.frames import Held, WelcomeBody
from shared.session import Disconnected, EdgeStream, Event, Finished, Refused, Replied
from shared.tokenlog import crc_of
from tests.fuzz.choices import Choices
from tests.fuzz.frame_choices import draw_frame
from tests.relay_world import SHA, VOCABULARY, World
from tests.test_shared_session import heal

DOWN: tuple[type[frames.Frame], ...] = (
    *(frames.Welcome, frames.Ack, frames.Ack, frames.Resync, frames.Tokens, frames.Tokens),
    *(frames.Tokens, frames.Finish, frames.Finish, frames.Notice, frames.Error, frames.Blob),
    frames.Commit,
)
MAX_STEPS, MAX_INPUT = 120, 4096


def seeds() -> list[bytes]:
    """Ordinary talk, by chance."""
    return [Random(number).randbytes(600) for number in range(6)]


def target(data: bytes) -> None:
    """One error ends a connection; the log stays the truth: an honest decoder gets all of it."""
    Victim(Choices(data[:MAX_INPUT])).play()


class Victim:
    """An honest edge whose application goes on talking, and its hostile decoder."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._world = World()
        self._edge = self._world.edge
        self._now = 100.0
        self._past: list[bytes] = []
        self._world.open()
        self._edge.connect(self._now)

    def play(self) -> None:
        """Do something, as long as there are bytes; then let an honest decoder in."""
        for _ in range(MAX_STEPS):
            if not self._choices.more:
                break
            try:
                self._step()
            except RemoteProtocolError:
                self._edge.disconnect()
            if not self._edge._asked:
                self._now += 0.001
                self._edge.connect(self._now)
            self._check_owed()
        self._edge.disconnect()
        alive = self._alive()
        self._world.streams = list(alive.values())
        self._world.finished = [done for done in self._world.finished if done[0] in alive]
        self._world.now = self._now + 10
        heal(self._world, 0)

    def _alive(self) -> dict[int, EdgeStream]:
        return self._edge._streams

    def _step(self) -> None:
        choices = self._choices
        match choices.byte() % 16:
            case 0:
                self._now += choices.pick((0.01, 0.1, 5.0))
                self._take(self._edge.poll(self._now))
            case 1 | 2 | 3 | 4:
                self._talk()
            case 5 if self._past:
                self._take(self._edge.receive(choices.pick(self._past[-16:]), self._now))
            case 6:
                self._take(self._edge.receive(choices.bytes(choices.below(40)), self._now))
            case 7 if not self._edge.live:
                welcome = self._bodies()[frames.Welcome][0]
                frame = frames.encode(frames.Welcome(0, welcome.epoch, welcome))
                self._take(self._edge.receive(frame, self._now))
            case _:
                frame = draw_frame(choices, DOWN, self._likely(), self._bodies())
                if frame is not None:
                    self._past.append(frame)
                    self._take(self._edge.receive(frame, self._now))

    def _talk(self) -> None:
        choices = self._choices
        if len(self._world.streams) < 4 and choices.byte() < 32:
            self._world.open()
        stream = choices.pick(self._world.streams)
        if stream.number not in self._alive():
            return
        act = choices.byte() % 8
        if not stream.ended and act < 5:
            with suppress(ContextLengthError):  # a decoder may say that it has no room
                keep = choices.below(len(stream.log) + 1)
                back = stream.revise(
                    keep, [choices.below(3)] * choices.below(4), [choices.below(3)]
                )
                self._edge.touch(stream, self._now, urgent=back)
        elif not stream.ended:
            stream.end()
        elif act == 5:
            stream.cancel(choices.below(len(stream.reply.ids) + 1))
        elif act == 6:
            stream.reopen()

    def _take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Finished(stream, turn):
                    self._world.finished.append((stream, turn))
                case Disconnected():
                    self._edge.disconnect()
                case Refused(stream):
                    assert stream not in self._alive()
                case Replied(stream, ids):
                    assert max(ids) < VOCABULARY
                case _:
                    pass

    def _bodies(self) -> dict[type[frames.Frame], Sequence[Any]]:
        held = [Held(**self._held())]
        held += [
            Held(1, 1 << 62, 0, 1 << 40, 7, True, 1 << 62, 1 << 62),
            Held(1, 0, 0, 0, 0, False, 0, 0),
        ]
        choices = self._choices
        welcome = WelcomeBody(
            *(
                "d",
                "b",
                self._edge._epoch + choices.pick((1, 1, 1, 0, 1 << 40)),
                SHA,
                SHA,
                "m",
                SHA,
            ),
            answers=self._edge._asked,
            vocabulary=VOCABULARY,
            context=choices.pick((4096, 4096, 0, 1, 1 << 62)),
            credit=choices.pick((4, 0, 1 << 62)),
            max_frame=choices.pick((frames.MAX_FRAME, 0, 1 << 62)),
            held=held[: choices.below(4)],
        )
        return {
            frames.Welcome: [welcome],
            frames.Resync: held,
            frames.Hello: (),
            frames.Open: (),
        }

    def _held(self) -> dict[str, Any]:
        number = self._choices.pick((1, 1, 2, 3))
        stream = self._alive().get(number)
        if stream is None:
            return msgspec.structs.asdict(Held(number, 0, 0, 0, 0, False, 0, 0))
        turn = self._choices.pick((stream.turn, stream.turn, max(0, stream.turn - 1)))
        length = self._choices.below(len(stream.log) + 1)
        return {
            "stream": number,
            "turn": turn,
            "history": stream.history(turn),
            "length": length,
            "crc": stream.log.crc(length),
            "ended": bool(self._choices.below(2)),
            "attempt": stream.attempt,
            "seq": self._choices.pick((stream._seq, stream._seq + 1, 1 << 20, 0)),
        }

    def _likely(self) -> dict[str, Any]:
        number = self._choices.pick((1, 1, 1, 2, 3))
        stream = self._alive().get(number)
        header = {"stream": number, "epoch": self._edge._epoch}
        if stream is None:
            return header
        have = len(stream.reply.ids)
        turn = {"turn": stream.turn, "attempt": stream.attempt, "index": have, "length": have}
        return header | turn | {"seq": stream._seq, "credit": 4, "load": 0, "code": 12}

    def _check_owed(self) -> None:
        """What is owed is at most what all conversations hold, and some headers."""
        owed = sum(len(data) for data, _ in self._edge.take_outgoing())
        held = 0
        for stream in self._alive().values():
            turns = sum(len(turn.user_ids) + len(turn.reply_ids) + 8 for turn in stream.turns)
            held += turns + len(stream.log.ids) * 2 + len(stream.reply.ids) + 200
            assert len(stream.reply.ids) <= stream.body.max_tokens
            assert stream.log.crc() == crc_of(stream.log.committed)
        assert owed <= 4096 + 10 * held, (owed, held)
