"""What every transport promises, asked of each of them."""

import asyncio

from shared.errors import CapacityError, LinkError
from shared.frames import MAX_FRAME
from shared.transport import MAX_PENDING
from tests.conformance.ends import MADE_BY_HAND, End, Wire, open_fds, run, until

SIZES = (1, 2, 63, 1007, 1008, 1009, 2016, 65_536, MAX_FRAME - 1, MAX_FRAME)


def numbered(count: int, prefix: bytes = b"") -> list[bytes]:
    return [prefix + n.to_bytes(4, "big") + bytes(n % 50) for n in range(count)]


def test_frames_of_every_size_arrive_whole_and_in_order(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair() as pair:
            sent = [bytes([n + 1]) * size for n, size in enumerate(SIZES)]
            for frame in sent:
                pair.device.transport.send(frame)
            assert await pair.decoder.has(len(sent)) == sent
            for frame in reversed(sent):
                pair.decoder.transport.send(frame)
            assert await pair.device.has(len(sent)) == sent[::-1]

    run(test)


def test_thousands_of_frames_pass_each_other(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair() as pair:
            up, down = numbered(2000, b"up"), numbered(2000, b"down")
            for n in range(0, len(up), 100):
                for a, b in zip(up[n : n + 100], down[n : n + 100], strict=True):
                    pair.device.transport.send(a)
                    pair.decoder.transport.send(b)
                await asyncio.sleep(0)
            assert await pair.decoder.has(len(up)) == up
            assert await pair.device.has(len(down)) == down

    run(test)


def test_provisional_frames_may_be_lost_but_reliable_ones_never(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair() as pair:
            reliable, provisional = numbered(600, b"r"), numbered(600, b"p")
            for a, b in zip(reliable, provisional, strict=True):
                pair.device.transport.send(b, provisional=True)
                pair.device.transport.send(a)
            pair.device.transport.send(b"last")
            await until(lambda: b"last" in pair.decoder.frames or bool(pair.decoder.ends), 20)
            got = pair.decoder.frames
            assert [frame for frame in got if frame[:1] != b"p"] == [*reliable, b"last"]
            assert {frame for frame in got if frame[:1] == b"p"} <= set(provisional)

    run(test)


def test_a_provisional_frame_alone_arrives(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair() as pair:
            pair.device.transport.send(b"tail", provisional=True)
            assert await pair.decoder.has(1) == [b"tail"]
            pair.decoder.transport.send(b"news", provisional=True)
            assert await pair.device.has(1) == [b"news"]

    run(test)


def test_what_waits_for_a_slow_reader_is_bounded(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair() as pair:
            sent = 0
            while not pair.device.ends and sent < 3 * MAX_PENDING:
                pair.device.transport.send(bytes(65_536))  # and nobody reads meanwhile
                sent += 65_536
            assert isinstance(await pair.device.ended(), CapacityError)
            assert MAX_PENDING < sent < 2 * MAX_PENDING
            pair.device.transport.send(b"into nothing")
            assert isinstance(await pair.decoder.ended(), LinkError)

    run(test)


def test_provisional_frames_do_not_pile_up_before_a_slow_reader(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair() as pair:
            for _ in range(3 * MAX_PENDING // 65_536):
                pair.device.transport.send(bytes(65_536), provisional=True)
            pair.device.transport.send(b"still here")
            await until(lambda: b"still here" in pair.decoder.frames)
            assert pair.device.ends == []

    run(test)


def test_a_close_by_the_device_is_seen_by_the_decoder_after_the_last_frame(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair() as pair:
            pair.device.transport.send(b"last words")
            await pair.decoder.has(1)
            pair.device.transport.close()
            assert await pair.device.ended() is None
            assert isinstance(await pair.decoder.ended(), LinkError)
            assert pair.decoder.frames == [b"last words"]

    run(test)


def test_a_close_by_the_decoder_is_seen_by_the_device_after_the_last_frame(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair() as pair:
            pair.decoder.transport.send(b"error: you know why")
            pair.decoder.transport.close()
            assert await pair.decoder.ended() is None
            assert isinstance(await pair.device.ended(), LinkError)
            assert pair.device.frames == [b"error: you know why"]

    run(test)


def test_closing_twice_is_closing_once_and_nothing_is_sent_afterwards(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair() as pair:
            for end in (pair.device, pair.decoder):
                for _ in range(2):
                    end.transport.close()
                    end.transport.send(b"late")
                    end.transport.send(b"late", provisional=True)
            await asyncio.sleep(0.05)
            assert len(pair.device.ends) == len(pair.decoder.ends) == 1
            assert pair.device.frames == pair.decoder.frames == []

    run(test)


def test_frames_sent_to_an_end_that_has_not_started_wait_for_it(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair(started=False) as pair:
            for frame in numbered(100):
                pair.decoder.transport.send(frame)
                pair.device.transport.send(frame)
            if not pair.decoder.frames and wire.kind in MADE_BY_HAND:
                pair.decoder.start()
            await pair.decoder.has(100)
            await asyncio.sleep(0.05)
            assert pair.device.frames == []
            pair.device.start()
            assert await pair.device.has(100) == numbered(100)

    run(test)


def test_an_end_that_starts_late_is_told_that_it_is_over(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair(started=False) as pair:
            pair.decoder.transport.send(b"too late")
            pair.decoder.transport.close()
            await asyncio.sleep(0.1)
            pair.device.start()
            assert isinstance(await pair.device.ended(), LinkError)

    run(test)


def test_after_closing_in_the_middle_of_a_burst_nothing_more_arrives(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair() as pair:
            decoder = pair.decoder

            def take(frame: bytes) -> None:
                decoder.frames.append(frame)
                if len(decoder.frames) == 3:
                    decoder.transport.close()

            decoder.on_frame = take
            for frame in numbered(20):
                pair.device.transport.send(frame)
            assert await decoder.ended() is None
            await asyncio.sleep(0.05)
            assert decoder.frames == numbered(3)

    run(test)


def test_an_answer_may_be_sent_from_within_the_callback(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair() as pair:

            def echo(end: End) -> None:
                def take(frame: bytes) -> None:
                    end.frames.append(frame)
                    if len(end.frames) < 200:
                        end.transport.send(frame)

                end.on_frame = take

            echo(pair.device)
            echo(pair.decoder)
            pair.device.transport.send(b"ping")
            await asyncio.gather(pair.device.has(199), pair.decoder.has(200))

    run(test)


def test_no_descriptor_is_left_open(wire: Wire) -> None:
    async def test() -> None:
        async with wire.pair():
            pass
        before = open_fds()
        for closes_first in ("device", "decoder", "both"):
            async with wire.pair() as pair:
                pair.device.transport.send(b"x")
                await pair.decoder.has(1)
                if closes_first != "both":
                    getattr(pair, closes_first).transport.close()
                    await pair.device.ended()
                    await pair.decoder.ended()
        assert open_fds() == before

    run(test)
