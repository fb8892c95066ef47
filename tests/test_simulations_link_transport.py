"""A bad link around a transport, and in front of a TCP server."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from random import Random

from shared.errors import CapacityError, LinkError
from shared.transport import MAX_PENDING
from shared.transport.loopback import loopback_pair
from simulations.link import (
    Direction,
    EmulatedTransport,
    Impairments,
    Steady,
    TcpProxy,
    open_proxy,
)
from simulations.link.proxy import Tap
from tests.conformance.ends import Pair, run, until

NUMBERED = [b"%d" % n for n in range(500)]


def emulated(up: Direction, down: Direction | None = None) -> Pair:
    """Return a connection with a bad link at the device's end."""
    a, b = loopback_pair()
    return Pair(EmulatedTransport(a, up=up, down=down or Direction(Random(2))), b, started=True)


def sent_through(impairments: Impairments) -> list[bytes]:
    """Return what arrives of `NUMBERED`."""
    got: list[bytes] = []

    async def test() -> None:
        pair = emulated(Direction(Random(4), impairments))
        for frame in NUMBERED:
            pair.device.transport.send(frame)
        await asyncio.sleep(0.15)
        pair.device.transport.close()
        got.extend(pair.decoder.frames)

    run(test)
    return got


def test_a_session_sees_frames_lost_and_in_order() -> None:
    got = sent_through(Impairments(loss=0.2, delay=0.01))
    assert 300 < len(got) < 470
    assert got == [frame for frame in NUMBERED if frame in set(got)]


def test_a_session_sees_frames_twice() -> None:
    got = sent_through(Impairments(duplicate=0.2))
    assert 550 < len(got) < 680
    assert sorted(set(got)) == sorted(NUMBERED)


def test_a_session_sees_frames_overtake_each_other() -> None:
    got = sent_through(Impairments(reorder=0.2, reorder_delay=0.03))
    assert got != NUMBERED
    assert sorted(got) == sorted(NUMBERED)


def test_frames_are_late_by_the_delay_in_both_directions() -> None:
    async def test() -> None:
        slow = Impairments(delay=0.05)
        pair = emulated(Direction(Random(1), slow), Direction(Random(2), slow))
        loop = asyncio.get_running_loop()
        began = loop.time()
        pair.device.transport.send(b"ping")
        await pair.decoder.has(1)
        assert loop.time() - began >= 0.05
        pair.decoder.transport.send(b"pong")
        await pair.device.has(1)
        assert loop.time() - began >= 0.1
        pair.device.transport.close()

    run(test)


def test_the_end_of_a_connection_is_told_behind_the_frames_under_way() -> None:
    async def test() -> None:
        pair = emulated(Direction(Random(1)), Direction(Random(2), Impairments(delay=0.05)))
        pair.decoder.transport.send(b"last words")
        pair.decoder.transport.close()
        await asyncio.sleep(0.01)
        assert pair.device.ends == []
        assert isinstance(await pair.device.ended(), LinkError)
        assert pair.device.frames == [b"last words"]

    run(test)


def test_what_is_under_way_at_a_close_is_lost() -> None:
    async def test() -> None:
        slow = Impairments(delay=0.03)
        pair = emulated(Direction(Random(1), slow), Direction(Random(2), slow))
        pair.device.transport.send(b"up")
        pair.decoder.transport.send(b"down")
        await asyncio.sleep(0.01)
        pair.device.transport.close()
        await asyncio.sleep(0.05)
        assert pair.device.frames == pair.decoder.frames == []
        assert pair.device.ends == [None]

    run(test)


def test_what_waits_on_a_slow_link_is_bounded_and_provisional_frames_are_dropped_before() -> None:
    async def test() -> None:
        pair = emulated(Direction(Random(1), capacity=Steady(1000)))
        for _ in range(MAX_PENDING // 65_536):
            pair.device.transport.send(bytes(65_536), provisional=True)
        assert pair.device.ends == []
        for _ in range(MAX_PENDING // 65_536):
            pair.device.transport.send(bytes(65_536))
        error = await pair.device.ended()
        assert isinstance(error, CapacityError)
        assert "wait on the emulated link" in str(error)

    run(test)


# --- in front of a TCP server


async def echo(reader: StreamReader, writer: StreamWriter) -> None:
    with closing(writer):
        while data := await reader.read(65_536):
            writer.write(data)


@asynccontextmanager
async def echoing(
    up: Direction,
    down: Direction | None = None,
    tap: Tap = lambda *_: None,
) -> AsyncGenerator[TcpProxy, None]:
    """Run an echo server behind a proxy."""
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        open_proxy("127.0.0.1", port, up=up, down=down or Direction(Random(2)), tap=tap) as proxy,
    ):
        yield proxy


class Client:
    """A TCP client; counts what comes back."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, proxy: TcpProxy) -> "Client":
        return cls(*await asyncio.open_connection(proxy.host, proxy.port))

    async def ping(self, data: bytes) -> float:
        """Send `data` and return when it has come back, in the loop's clock."""
        self.writer.write(data)
        assert await self.reader.readexactly(len(data)) == data
        return asyncio.get_running_loop().time()


def now() -> float:
    return asyncio.get_running_loop().time()


def test_megabytes_pass_unchanged_in_both_directions() -> None:
    async def test() -> None:
        bad = Impairments(duplicate=0.1, reorder=0.2, reorder_delay=0.001)
        async with echoing(Direction(Random(1), bad), Direction(Random(2), bad)) as proxy:
            client = await Client.connect(proxy)
            with closing(client.writer):
                await client.ping(Random(3).randbytes(2_000_000))

    run(test)


def test_a_rate_makes_bytes_late() -> None:
    async def test() -> None:
        async with echoing(Direction(Random(1), capacity=Steady(100_000))) as proxy:
            began = now()
            client = await Client.connect(proxy)
            with closing(client.writer):
                assert await client.ping(bytes(30_000)) - began >= 0.3

    run(test)


def test_loss_is_delay_and_no_byte_is_missing() -> None:
    async def test() -> None:
        async with echoing(Direction(Random(1), Impairments(loss=1.0))) as proxy:
            began = now()
            asyncio.get_running_loop().call_later(0.3, lose_nothing, proxy)
            client = await Client.connect(proxy)
            with closing(client.writer):
                assert 0.3 <= await client.ping(b"late") - began < 3.0

    def lose_nothing(proxy: TcpProxy) -> None:
        proxy._up.impairments = Impairments()

    run(test)


def test_an_outage_stalls_bytes_and_the_connection_stays_open() -> None:
    async def test() -> None:
        begin, end = now() + 0.1, now() + 0.5
        outage = Direction(Random(1), capacity=Steady(outages=[(begin, end)]))
        async with echoing(outage) as proxy:
            client = await Client.connect(proxy)
            with closing(client.writer):
                assert await client.ping(b"before") < begin
                await asyncio.sleep(begin + 0.01 - now())
                assert await client.ping(b"inside") >= end

    run(test)


def test_who_connects_during_an_outage_gets_through_when_it_ends() -> None:
    async def test() -> None:
        end = now() + 0.4
        outage = Direction(Random(1), capacity=Steady(outages=[(now(), end)]))
        async with echoing(outage) as proxy:
            client = await Client.connect(proxy)
            with closing(client.writer):
                assert await client.ping(b"hello") >= end
            assert len(proxy.connected_at) == 1

    run(test)


def test_who_gives_up_during_an_outage_leaves_no_trace_at_the_server() -> None:
    async def test() -> None:
        heard: list[bytes] = []

        async def listen(reader: StreamReader, writer: StreamWriter) -> None:
            with closing(writer):
                heard.append(await reader.read(100))

        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        up = Direction(Random(1), capacity=Steady(outages=[(now(), now() + 0.3)]))
        async with server, open_proxy("127.0.0.1", port, up=up, down=Direction(Random(2))) as proxy:
            for words in (b"too early", b"patient"):
                client = await Client.connect(proxy)
                client.writer.write(words)
                await asyncio.sleep(0.05)
                if words == b"too early":
                    client.writer.close()
            await until(lambda: bool(heard))
            await asyncio.sleep(0.05)
            client.writer.close()
        assert heard == [b"patient"]

    run(test)


def test_the_end_of_a_connection_is_told_only_after_the_outage() -> None:
    async def test() -> None:
        ended: list[float] = []

        async def watch(reader: StreamReader, writer: StreamWriter) -> None:
            with closing(writer):
                while await reader.read(100):
                    pass
                ended.append(now())

        server = await asyncio.start_server(watch, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        begin, end = now() + 0.1, now() + 0.4
        up = Direction(Random(1), capacity=Steady(outages=[(begin, end)]))
        async with server, open_proxy("127.0.0.1", port, up=up, down=Direction(Random(2))) as proxy:
            client = await Client.connect(proxy)
            client.writer.write(b"x")
            await asyncio.sleep(begin + 0.01 - now())
            client.writer.close()
            await until(lambda: bool(ended))
            assert ended[0] >= end

    run(test)


def test_where_the_server_refuses_the_client_is_hung_up_on() -> None:
    async def test() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        rng = Random(1)
        async with open_proxy("127.0.0.1", port, up=Direction(rng), down=Direction(rng)) as proxy:
            client = await Client.connect(proxy)
            with closing(client.writer):
                assert await client.reader.read(10) == b""

    run(test)


def test_a_tap_sees_what_a_client_sends_and_what_comes_out_to_it() -> None:
    async def test() -> None:
        seen: dict[tuple[int, str], list[tuple[float, bytes]]] = {}

        def tap(number: int, way: str, data: bytes) -> None:
            seen.setdefault((number, way), []).append((now(), data))

        slow = Impairments(delay=0.05)
        async with echoing(Direction(Random(1), slow), Direction(Random(2), slow), tap) as proxy:
            for text in (b"one", b"two"):
                client = await Client.connect(proxy)
                with closing(client.writer):
                    await client.ping(text)
        for number, text in enumerate((b"one", b"two")):
            sent, came = seen[number, "up"][0], seen[number, "down"][0]
            assert sent[1] == came[1] == text
            assert came[0] - sent[0] >= 0.1

    run(test)


def test_closing_the_proxy_ends_its_connections_also_those_that_stall() -> None:
    async def test() -> None:
        outage = Direction(Random(1), capacity=Steady(outages=[(now() + 0.05, now() + 1e6)]))
        async with echoing(outage) as proxy:
            client = await Client.connect(proxy)
            await asyncio.sleep(0.1)
            client.writer.write(b"never")
            await asyncio.sleep(0.01)
        with closing(client.writer):
            assert await client.reader.read(10) == b""

    run(test)
