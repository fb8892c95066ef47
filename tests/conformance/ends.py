"""Two ends of a connection over any transport, and what each of them saw."""

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from random import Random

from shared.errors import DeltarelayError
from shared.transport import Listener, Transport
from shared.transport.loopback import loopback_pair
from shared.transport.mqtt_address import Broker
from shared.transport.mqtt_door import connect_mqtt
from shared.transport.mqtt_listener import MqttListener
from shared.transport.segment import Segment, create_memory
from shared.transport.shm import ShmTransport, connect_shm
from shared.transport.shm_listener import ShmListener
from simulations.link import Direction, EmulatedTransport

HELLO = b"\x10hello"


class End:
    """One end, started or not, with what arrived in order."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.frames: list[bytes] = []
        self.ends: list[DeltarelayError | None] = []
        self.on_frame: Callable[[bytes], None] = self.frames.append

    def start(self) -> "End":
        self.transport.start(self._take, self.ends.append)
        return self

    def _take(self, frame: bytes) -> None:
        self.on_frame(frame)

    async def has(self, count: int, seconds: float = 20.0) -> list[bytes]:
        """Wait for `count` frames in all."""
        await until(lambda: len(self.frames) >= count or bool(self.ends), seconds)
        assert len(self.frames) >= count, (len(self.frames), count, self.ends)
        return self.frames

    async def ended(self, seconds: float = 10.0) -> DeltarelayError | None:
        """Wait for the end of the connection, and return why."""
        await until(lambda: bool(self.ends), seconds)
        assert len(self.ends) == 1, "told once that it is over"
        return self.ends[0]


class Pair:
    """A device's end and the decoder's end for it."""

    def __init__(self, device: Transport, decoder: Transport, *, started: bool) -> None:
        self.device, self.decoder = End(device), End(decoder)
        if started:
            self.device.start()
            self.decoder.start()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for `condition`; only tests look, what they test is told."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def run(test: Callable[[], Awaitable[None]], seconds: float = 30.0) -> None:
    """Run an async test; what it leaves open shows as a warning, and so as a failure."""

    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await test()

    asyncio.run(bounded())


def open_fds() -> set[str]:
    """Return this process's open descriptors, as what they point at."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # the listing itself
            continue
    return found


class Waiting:
    """Collects the transports that a listener makes."""

    def __init__(self, *, start: bool = True) -> None:
        self._start = start
        self.ends: list[End] = []

    def __call__(self, transport: Transport) -> None:
        end = End(transport)
        self.ends.append(end)
        if self._start:
            end.start()

    async def next(self, count: int = 1) -> End:
        """Wait for connection number `count`."""
        await until(lambda: len(self.ends) >= count)
        return self.ends[count - 1]


@asynccontextmanager
async def listening(listener: Listener) -> AsyncGenerator[Waiting, None]:
    """Run a listener."""
    waiting = Waiting()
    await listener.start(waiting)
    try:
        yield waiting
    finally:
        await listener.close()


def sealed_pair() -> tuple[ShmTransport, ShmTransport]:
    """Make the two ends of a sealed memfd by hand, as for a peer of another user."""
    server = create_memory(sealed=True)
    client = os.dup(server)
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a.setblocking(False)
    b.setblocking(False)
    device = ShmTransport("shm:device", a, Segment(client, server=False, sealed=True))
    return device, ShmTransport("shm:decoder", b, Segment(server, server=True, sealed=True))


def emulated_pair() -> tuple[EmulatedTransport, EmulatedTransport]:
    """Make the two ends of a connection whose emulated link does nothing to frames."""
    rng = Random(1)
    a, b = (
        EmulatedTransport(end, up=Direction(rng), down=Direction(rng)) for end in loopback_pair()
    )
    return a, b


MADE_BY_HAND: dict[str, Callable[[], tuple[Transport, Transport]]] = {
    "loopback": loopback_pair,
    "sealed": sealed_pair,
    "emulated": emulated_pair,
}
"""Kinds that have no listener."""


async def greet(device: Transport, waiting: Waiting) -> Transport:
    """Let a device's first frame make the decoder's end, and take the frame away."""
    device.send(HELLO)
    end = await waiting.next()
    await end.has(1)
    assert end.frames.pop() == HELLO
    return end.transport


class Wire:
    """A kind of transport, and what it needs."""

    def __init__(self, kind: str, folder: Path, broker: Broker | None) -> None:
        self.kind, self._folder, self._broker = kind, folder, broker

    @asynccontextmanager
    async def pair(self, *, started: bool = True) -> AsyncGenerator[Pair, None]:
        """Open a connection; not `started`: the device's end only takes what is sent."""
        if self.kind in MADE_BY_HAND:
            ends = MADE_BY_HAND[self.kind]()
            with closing(ends[0]), closing(ends[1]):
                yield Pair(*ends, started=started)
            await asyncio.sleep(0)
            return
        listener, connect = self._parts()
        async with listening(listener) as waiting:
            device = End(await connect())
            if started:
                device.start()
            with closing(device.transport):
                if self.kind != "shm":
                    await greet(device.transport, waiting)
                pair = Pair.__new__(Pair)
                pair.device, pair.decoder = device, await waiting.next()
                yield pair

    def _parts(self) -> tuple[Listener, Callable[[], Awaitable[Transport]]]:
        if self.kind == "shm":
            path = self._folder / "decoder.sock"
            return ShmListener(path), lambda: connect_shm(path)
        assert self._broker is not None
        broker, fleet = self._broker, f"f{secrets.token_hex(4)}"
        listener = MqttListener(broker, fleet=fleet, decoder="d1", boot="b", rng=Random(1))
        return listener, lambda: connect_mqtt(broker, fleet=fleet, device="car")
