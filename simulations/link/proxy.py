"""A bad link in front of a TCP server, on the level of bytes: what a tunnel does to connections.

TCP hides what happens to packets, so loss is only delay here: a lost segment is sent again after
RTO, twice as late each time (RFC 6298), and what is behind it waits. Duplicates and overtaking do
not show at all. While nothing passes, connections stay open and stall, with what fits in their
buffers on the way; new ones get no answer from the server, and an end is told as late as the rest.
Of a connection that a client gave up before the server could know of it, the server never hears.
"""

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from socket import IPPROTO_TCP, TCP_INFO

from shared.errors import LinkError
from simulations.link.direction import Direction

SEGMENT = 1448
"""Payload of a packet of 1500 bytes, with timestamps."""
HEADERS = 52
RTO = 0.2
"""Seconds until a lost segment is sent again; Linux' lower bound."""
MAX_RTO = 120.0
CLOSE_WAIT = 8
"""State of a TCP socket whose peer has closed (Linux, include/net/tcp_states.h)."""
BUFFER = 64
"""Segments of one connection under way in one direction; further ones wait at the sender."""

Tap = Callable[[int, str, bytes], None]
"""Called with the number of a connection, "up" or "down", and bytes, at the client's end."""


def _ignore(*_: object) -> None:
    """Nobody looks."""


class TcpProxy:
    """Listens on loopback for a server; made by `open_proxy`.

    `up` and `down` are shared by all connections, as a modem is.
    """

    def __init__(self, host: str, port: int, up: Direction, down: Direction, tap: Tap) -> None:
        self._server = host, port
        self._up, self._down, self._tap = up, down, tap
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.host, self.port = "127.0.0.1", 0
        self.connected_at: list[float] = []
        """When clients connected, in the loop's clock."""

    def accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        """A client is there."""
        number = len(self.connected_at)
        self.connected_at.append(self._loop.time())
        task = asyncio.create_task(self._carry(number, reader, writer), name=f"proxy-{number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End every connection."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, number: int, reader: StreamReader, writer: StreamWriter) -> None:
        """Connect to the server and carry bytes both ways until both ends have closed."""
        with contextlib.closing(writer):
            await self._pass(self._up, 0)  # SYN
            if _has_hung_up(writer):
                return
            try:
                server = await asyncio.open_connection(*self._server)
            except OSError:  # refused: so is the client, when the answer is back
                await self._pass(self._down, 0)
                return
            with contextlib.closing(server[1]):
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._stream(number, "up", reader, server[1]))
                    group.create_task(self._stream(number, "down", server[0], writer))

    async def _stream(
        self, number: int, way: str, reader: StreamReader, writer: StreamWriter
    ) -> None:
        """Carry one direction of a connection, in order."""
        direction = self._up if way == "up" else self._down
        tap = partial(self._tap, number, way)
        taps = (tap, _ignore) if way == "up" else (_ignore, tap)
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(BUFFER)
        async with asyncio.TaskGroup() as group:
            group.create_task(_come_out(under_way, writer, taps[1]))
            while True:
                data = await _read(reader)
                taps[0](data)
                await under_way.put((await self._arrival(direction, len(data)), data))
                if not data:
                    return

    async def _pass(self, direction: Direction, size: int) -> None:
        await _sleep_until(await self._arrival(direction, size))

    async def _arrival(self, direction: Direction, size: int) -> float:
        """Send a segment, again and again while it is lost; return when it comes out."""
        rto = RTO
        while not (times := direction.send(size + HEADERS, self._loop.time())):
            await asyncio.sleep(rto)
            rto = min(2 * rto, MAX_RTO)
        return times[0]


def _has_hung_up(client: StreamWriter) -> bool:
    """Whether the client has closed its end, though what it sent before was not read."""
    end = client.get_extra_info("socket")
    return client.is_closing() or end.getsockopt(IPPROTO_TCP, TCP_INFO, 1)[0] == CLOSE_WAIT


async def _read(reader: StreamReader) -> bytes:
    """Return what a segment takes of what is there; nothing: the peer has closed or broken."""
    try:
        return await reader.read(SEGMENT)
    except OSError:
        return b""


async def _come_out(
    under_way: asyncio.Queue[tuple[float, bytes]],
    writer: StreamWriter,
    came_out: Callable[[bytes], None],
) -> None:
    """Write each segment when it comes out; an empty one is the end."""
    receiver_is_there = True
    while True:
        at, data = await under_way.get()
        await _sleep_until(at)
        came_out(data)
        try:
            if receiver_is_there and data:
                writer.write(data)
                await writer.drain()
            elif receiver_is_there:
                writer.write_eof()
        except OSError:  # which the other direction tells the sender
            receiver_is_there = False
        if not data:
            return


async def _sleep_until(at: float) -> None:
    delay = at - asyncio.get_running_loop().time()
    if delay > 0:
        await asyncio.sleep(delay)


@asynccontextmanager
async def open_proxy(
    host: str, port: int, *, up: Direction, down: Direction, tap: Tap = _ignore
) -> AsyncGenerator[TcpProxy, None]:
    """Listen on a free port of loopback for the server at `host:port`, until the block is left.

    Args:
        up, down: what happens to packets towards the server, and from it.
        tap: sees what a client sends, and what comes out to it.

    Raises:
        LinkError: there is no free port.
    """
    proxy = TcpProxy(host, port, up, down, tap)
    try:
        server = await asyncio.start_server(proxy.accept, proxy.host, 0, limit=2 * SEGMENT)
    except OSError as error:
        raise LinkError(f"cannot listen on {proxy.host}: {error}") from error
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
