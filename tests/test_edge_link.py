"""The edge's connection: what it makes of doors that fail."""

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from edge.link import Link
from shared import frames
from shared.errors import DeltarelayError, LinkError
from shared.frames import HelloBody, WelcomeBody
from shared.session import EdgeSession
from shared.transport import OnClosed, OnFrame, Transport
from tests.conformance.ends import run, until


class Answering:
    """A connection whose decoder answers HELLO; a short one breaks in the same moment."""

    def __init__(self, *, short: bool) -> None:
        self.name = "test:short" if short else "test:long"
        self._short = short

    def start(self, on_frame: OnFrame, on_closed: OnClosed) -> None:
        self._on_frame, self.breaks = on_frame, on_closed

    def send(self, frame: bytes, *, provisional: bool = False) -> None:
        del provisional
        hello = frames.decode(frame)
        if isinstance(hello, frames.Hello):
            asyncio.get_running_loop().call_soon(self._answer, hello.body)

    def close(self) -> None:
        pass

    def _answer(self, hello: HelloBody) -> None:
        body = WelcomeBody("d", "b", hello.epoch + 1, "t", "g", "m", "md", answers=hello.tag)
        self._on_frame(frames.encode(frames.Welcome(0, body.epoch, body)))
        if self._short:
            self.breaks(LinkError("the broker was restarted"))


class Doors:
    """Opens the given connections, one after the other."""

    def __init__(self, *transports: Answering) -> None:
        self._transports = iter(transports)

    async def open(self) -> Transport:
        return next(self._transports)

    def avoid(self) -> None:
        pass


def linked(doors: Doors, on_lost: Callable[[DeltarelayError], None]) -> tuple[EdgeSession, Link]:
    session = EdgeSession(HelloBody("car", "b"))
    return session, Link(session, doors, on_events=lambda _: None, on_lost=on_lost, rng=Random(1))


def test_a_connection_that_breaks_with_its_first_answer_is_no_connection() -> None:
    async def test() -> None:
        _, link = linked(Doors(Answering(short=True)), lambda _: None)
        with pytest.raises(LinkError, match="test:short: lost right behind the answer"):
            await link.start()
        await link.close()

    run(test)


def test_after_one_that_breaks_with_its_first_answer_the_next_one_is_tried() -> None:
    async def test() -> None:
        lost: list[DeltarelayError] = []
        first = Answering(short=False)
        doors = Doors(first, Answering(short=True), Answering(short=False))
        session, link = linked(doors, lost.append)
        await link.start()
        first.breaks(LinkError("the broker was stopped"))
        assert not session.live
        await until(lambda: link.num_reconnects == 1)
        assert session.live
        assert lost == []
        await link.close()

    run(test)
