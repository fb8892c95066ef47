"""Shared memory: death on either side, what is left behind, and peers that do not play fair."""

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
import resource
import socket
import stat
import struct
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from shared.errors import CapacityError, LinkError, RemoteProtocolError
from shared.transport import shm as shm_module
from shared.transport import shm_listener
from shared.transport.handover import receive_memory, send_memory
from shared.transport.ring import SLOTS, Ring, ring_bytes
from shared.transport.segment import SIZE, Segment, create_memory
from shared.transport.shm import ShmTransport, connect_shm
from shared.transport.shm_listener import ShmListener
from tests.conformance.ends import End, Waiting, listening, open_fds, run, sealed_pair, until
from tests.conformance.peer import spawned


def shm_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "deltarelay" in name}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decoder.sock"


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(path: Path) -> Generator[None, None, None]:
    fds, names = open_fds(), shm_names()
    yield
    assert open_fds() == fds
    assert shm_names() == names
    assert not path.exists()


@contextmanager
def raw_client(path: Path) -> Generator[socket.socket, None, None]:
    """A client that is connected and does nothing by itself."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(path))
        yield client


# --- death


def test_a_device_killed_in_mid_sentence_is_noticed_and_its_last_frame_read(path: Path) -> None:
    async def test() -> None:
        async with listening(ShmListener(path)) as waiting:
            async with spawned("device", str(path)) as process:
                end = await waiting.next()
                process.kill()
                assert isinstance(await end.ended(), LinkError)
                assert end.frames == [b"from the other process"]
            assert shm_names() == set()
            async with spawned("device", str(path)):
                assert await (await waiting.next(2)).has(1) == [b"from the other process"]

    run(test)


def test_a_killed_decoder_is_noticed_and_its_socket_taken_over(path: Path) -> None:
    async def test() -> None:
        async with spawned("decoder", str(path)) as process:
            end = End(await connect_shm(path)).start()
            await end.has(1)
            process.kill()
            assert "the peer is gone" in str(await end.ended())
            end.transport.send(b"into nothing")
        assert path.is_socket(), "it could not clean up"
        with pytest.raises(LinkError, match="refused"):
            await connect_shm(path)
        async with spawned("decoder", str(path)):
            again = End(await connect_shm(path)).start()
            await again.has(1)
            again.transport.close()
        async with listening(ShmListener(path)):
            assert shm_names() == set()

    run(test)


def test_a_device_that_dies_before_it_is_served_harms_nobody(path: Path) -> None:
    async def test() -> None:
        async with listening(ShmListener(path)) as waiting:
            for _ in range(20):
                with raw_client(path):
                    pass
            with closing(End(await connect_shm(path)).start().transport) as alive:
                alive.send(b"x")
                await until(lambda: any(end.frames == [b"x"] for end in waiting.ends))
            await until(lambda: all(end.ends for end in waiting.ends))

    run(test)


# --- the socket


def test_a_second_decoder_on_the_same_socket_is_refused(path: Path) -> None:
    async def test() -> None:
        async with listening(ShmListener(path)):
            with pytest.raises(LinkError, match="another decoder listens here"):
                await ShmListener(path).start(Waiting())
            with closing(await connect_shm(path)):
                pass

    run(test)


def test_a_decoder_whose_queue_is_full_still_counts_as_living(path: Path) -> None:
    async def test() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy:
            busy.bind(str(path))
            busy.listen(0)
            with (
                raw_client(path),
                pytest.raises(LinkError, match="another decoder listens here"),
            ):
                await ShmListener(path).start(Waiting())
        path.unlink()

    run(test)


@pytest.mark.parametrize("kind", ["file", "folder", "stream"])
def test_a_path_that_is_no_socket_of_ours_is_left_alone(path: Path, kind: str) -> None:
    async def test() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            if kind == "file":
                path.write_text("precious")
            elif kind == "folder":
                path.mkdir()
            else:
                other.bind(str(path))
                other.listen()
            with pytest.raises(LinkError, match=str(path)):
                await ShmListener(path).start(Waiting())
            with pytest.raises(LinkError, match=str(path)):
                await connect_shm(path)
            assert path.exists()
            path.rmdir() if kind == "folder" else path.unlink()

    run(test)


@pytest.mark.parametrize("name", ["missing/decoder.sock", "x" * 120])
def test_a_path_that_cannot_be_used_is_named(tmp_path: Path, name: str) -> None:
    async def test() -> None:
        for attempt in (
            ShmListener(tmp_path / name).start(Waiting()),
            connect_shm(tmp_path / name),
        ):
            with pytest.raises(LinkError, match=f"{name}.*(No such file|too long)"):
                await attempt

    run(test)


def test_the_socket_is_for_its_owner_alone_and_goes_with_the_decoder(path: Path) -> None:
    async def test() -> None:
        mask = os.umask(0)
        try:
            async with listening(ShmListener(path)) as _:
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
            async with listening(ShmListener(path, allow_uids=[12345])) as _:
                assert stat.S_IMODE(path.stat().st_mode) == 0o666
            assert os.umask(0) == 0, "the process's mask is as it was"
        finally:
            os.umask(mask)

    run(test)


def test_of_two_decoders_that_start_at_once_one_removes_what_a_dead_one_left(path: Path) -> None:
    async def test() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(path))
        first, second = ShmListener(path), ShmListener(path)
        with first._alone():
            with pytest.raises(LinkError, match="another decoder listens here"):
                await second.start(Waiting())
        async with listening(first):
            with pytest.raises(LinkError, match="another decoder listens here"):
                await second.start(Waiting())
            with closing(await connect_shm(path)):
                pass
        assert list(path.parent.iterdir()) == []

    run(test)


def test_a_decoder_does_not_remove_the_socket_of_a_later_one(path: Path) -> None:
    async def test() -> None:
        first = ShmListener(path)
        await first.start(Waiting())
        path.unlink()  # somebody tidied up
        async with listening(ShmListener(path)):
            await first.close()
            with closing(await connect_shm(path)):
                pass

    run(test)


# --- who may connect


def test_another_user_is_refused_by_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with listening(ShmListener(path)) as waiting:
            monkeypatch.setattr(shm_listener, "peer_of", lambda _socket: (1, 4_000_000_000))
            with pytest.raises(LinkError, match=r"user 4000000000 may not connect.*allow_uids"):
                await connect_shm(path)
            assert waiting.ends == []

    run(test)


def test_an_allowed_user_gets_memory_that_nobody_can_shrink(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with listening(ShmListener(path, allow_uids=[4242])) as waiting:
            for module in (shm_listener, shm_module):
                monkeypatch.setattr(module, "peer_of", lambda _socket: (1, 4242))
            device = End(await connect_shm(path)).start()
            device.transport.send(b"x")
            end = await waiting.next()
            assert await end.has(1) == [b"x"]
            for transport in (device.transport, end.transport):
                assert isinstance(transport, ShmTransport)
                memory = transport._segment.memory
                for size in (0, SIZE - 1, SIZE + 1):
                    with pytest.raises(PermissionError):
                        os.ftruncate(memory, size)
            device.transport.close()

    run(test)


def test_the_memory_of_another_user_must_be_sealed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with listening(ShmListener(path, allow_uids=[4242])):
            foreign = iter([(1, os.getuid()), (1, 4242)])  # only the client sees another user
            for module in (shm_listener, shm_module):
                monkeypatch.setattr(module, "peer_of", lambda _socket: next(foreign))
            with pytest.raises(RemoteProtocolError, match="not sealed"):
                await connect_shm(path)

    run(test)


def test_what_is_handed_over_does_not_survive_an_exec(path: Path) -> None:
    async def test() -> None:
        async with listening(ShmListener(path)) as waiting:
            with closing(await connect_shm(path)) as device:
                for transport in (device, (await waiting.next()).transport):
                    assert isinstance(transport, ShmTransport)
                    flags = fcntl.fcntl(transport._segment.memory, fcntl.F_GETFD)
                    assert flags & fcntl.FD_CLOEXEC

    run(test)


# --- what a server may answer


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        (b"", LinkError, "hung up at once"),
        (b"no room", LinkError, "the decoder refused: no room"),
        (b"\xff\xfe", LinkError, "the decoder refused"),
        (b"DRSM\x02\x00", RemoteProtocolError, "0 descriptors arrived"),
        (b"DRSM\x09\x00", RemoteProtocolError, "update the older end"),
        (b"DRSM", RemoteProtocolError, "0 descriptors arrived"),
        (None, LinkError, "no answer"),
    ],
)
def test_an_answer_without_descriptors_is_explained(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes | None,
    error: type[Exception],
    why: str,
) -> None:
    monkeypatch.setattr(shm_module, "_WAIT", 0.05)

    async def test() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.bind(str(path))
            server.listen()
            connecting = asyncio.ensure_future(connect_shm(path))
            await asyncio.sleep(0)
            with server.accept()[0] as control:
                if answer == b"":
                    control.close()
                elif answer:
                    control.send(answer)
                with pytest.raises(error, match=why):
                    await connecting
        path.unlink()

    run(test)


def test_a_client_that_gives_up_waiting_closes_its_socket(path: Path) -> None:
    async def test() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.bind(str(path))
            server.listen()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await connect_shm(path)
        path.unlink()

    run(test)


def forged(*, size: int = SIZE, geometry: bool = True) -> int:
    memory = os.memfd_create("forged")
    os.ftruncate(memory, size)
    if geometry:
        with mmap.mmap(memory, SIZE) as whole, memoryview(whole) as view:
            for at in (0, SIZE // 2):
                with view[at : at + SIZE // 2] as half:
                    Ring.format(half)
    return memory


@pytest.mark.parametrize(
    ("size", "geometry", "why"),
    [(SIZE - 4096, False, "bytes, not"), (0, False, "0 bytes"), (SIZE, False, "ring magic 0x0")],
)
def test_memory_of_another_shape_is_refused_and_closed(size: int, geometry: bool, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        Segment(forged(size=size, geometry=geometry), server=False)


def test_memory_that_has_no_seals_is_refused_where_they_are_asked_for() -> None:
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(RemoteProtocolError, match="shared memory has 0 bytes"):
        Segment(read, server=False, sealed=True)
    with pytest.raises(RemoteProtocolError, match="not sealed"):
        Segment(forged(), server=False, sealed=True)


def test_a_file_that_knows_no_seals_is_refused(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, SIZE)
    with pytest.raises(RemoteProtocolError, match="not sealed"):
        Segment(fd, server=False, sealed=True)


# --- scarcity


@pytest.mark.parametrize("sealed", [False, True])
def test_a_full_dev_shm_is_told_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match="No space left on device; free space in /dev/shm"):
        create_memory(sealed=sealed)


def test_a_device_hears_why_there_is_no_memory_and_the_next_one_is_served(path: Path) -> None:
    async def test() -> None:
        async with listening(ShmListener(path)):
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # Python ignores SIGXFSZ
            try:
                with pytest.raises(LinkError, match=r"refused: .*File too large; free space"):
                    await connect_shm(path)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert shm_names() == set()
            with closing(await connect_shm(path)):
                pass

    run(test)


@contextmanager
def descriptors_left(count: int) -> Generator[None, None, None]:
    """Leave room for `count` more descriptors in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
    limit = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    fill = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        with contextlib.suppress(OSError):  # until there are too many
            while True:
                fill.append(os.open("/dev/null", os.O_RDONLY))
        for fd in free:
            os.close(fd)
        free = []
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in [*fill, *free]:
            os.close(fd)


def test_a_descriptor_that_does_not_fit_is_reported() -> None:
    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with control, other:
        mine = create_memory(sealed=False)
        send_memory(other, mine, sealed=False)
        missing = pytest.raises(RemoteProtocolError, match="0 descriptors arrived, 1 is expected")
        with descriptors_left(0), missing:
            receive_memory(control)
        os.close(mine)


def test_more_descriptors_than_expected_are_refused_and_none_is_kept() -> None:
    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with control, other:
        socket.send_fds(other, [b"DRSM\x02\x00"], [other.fileno()] * 2)
        with pytest.raises(RemoteProtocolError, match="descriptors arrived, 1 is expected"):
            receive_memory(control)


@pytest.mark.parametrize("room", [0, 1])
def test_a_decoder_out_of_descriptors_waits_without_spinning_and_recovers(
    path: Path, room: int
) -> None:
    async def test() -> None:
        listener = ShmListener(path)
        turns = 0
        accept = listener._accept

        def counted() -> None:
            nonlocal turns
            turns += 1
            accept()

        listener._accept = counted  # type: ignore[method-assign] # only counts
        async with listening(listener) as waiting:
            with raw_client(path) as client:
                with descriptors_left(room):
                    await asyncio.sleep(0.25)
                assert waiting.ends == []
                assert turns <= 2
                if room:  # it was accepted, and told why not
                    assert b"raise the limit on open files" in client.recv(300)
                else:
                    await waiting.next()
            with closing(await connect_shm(path)):
                pass

    run(test)


def test_an_end_that_overflowed_before_it_started_is_told_so() -> None:
    async def test() -> None:
        device, decoder = sealed_pair()
        for _ in range(80):
            device.send(bytes(65_536))
        device.send(b"into nothing")
        end = End(device).start()
        assert isinstance(await end.ended(), CapacityError)
        decoder.close()

    run(test)


def test_a_client_that_is_gone_before_it_gets_its_memory_costs_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(shm_listener, "send_memory", gone)

    async def test() -> None:
        async with listening(ShmListener(path)) as waiting:
            with pytest.raises(LinkError, match=r"refused: .*Broken pipe"):
                await connect_shm(path)
            assert waiting.ends == []

    run(test)


# --- peers that do not play fair


def test_a_device_that_writes_nonsense_loses_its_connection_and_nobody_elses(path: Path) -> None:
    async def test() -> None:
        async with listening(ShmListener(path)) as waiting:
            good, bad = [End(await connect_shm(path)).start() for _ in range(2)]
            ends = [await waiting.next(n) for n in (1, 2)]
            assert isinstance(bad.transport, ShmTransport)
            segment = bad.transport._segment
            struct.pack_into("<Q", segment.producer._memory, 128, 1 << 60)
            bad.transport._wake_peer()
            assert isinstance(await ends[1].ended(), RemoteProtocolError)
            assert isinstance(await bad.ended(), LinkError)
            good.transport.send(b"unharmed")
            assert await ends[0].has(1) == [b"unharmed"]
            good.transport.close()

    run(test)


def test_a_reader_whose_cursor_lies_loses_its_connection(path: Path) -> None:
    async def test() -> None:
        async with listening(ShmListener(path)) as waiting:
            device = End(await connect_shm(path)).start()
            end = await waiting.next()
            assert isinstance(device.transport, ShmTransport)
            struct.pack_into("<Q", device.transport._segment.consumer._memory, 256, 77)
            end.transport.send(b"x")
            assert isinstance(await end.ended(), RemoteProtocolError)
            assert isinstance(await device.ended(), LinkError)

    run(test)


def test_a_device_that_leaves_nonsense_behind_is_gone_all_the_same(path: Path) -> None:
    async def test() -> None:
        async with listening(ShmListener(path)) as waiting:
            device = await connect_shm(path)
            end = await waiting.next()
            struct.pack_into("<Q", device._segment.producer._memory, 128, 1 << 60)
            device.close()
            assert isinstance(await end.ended(), RemoteProtocolError)

    run(test)


def test_words_on_the_control_socket_end_the_connection(path: Path) -> None:
    async def test() -> None:
        async with listening(ShmListener(path)) as waiting:
            with raw_client(path) as client:
                end = await waiting.next()
                client.send(b"GET /")
                assert "b'GET /' on the control socket" in str(await end.ended())
                os.close(receive_memory(client)[0])

    run(test)


def test_a_wake_up_without_a_reason_is_no_harm() -> None:
    async def test() -> None:
        device, decoder = sealed_pair()
        end = End(decoder).start()
        for _ in range(3):
            device._wake_peer()
            await asyncio.sleep(0.005)
        for _ in range(10_000):  # more than the socket takes: it is woken already
            device._wake_peer()
        device.send(b"x")
        assert await end.has(1) == [b"x"]
        device.close()
        await end.ended()

    run(test)


def test_a_flood_leaves_the_event_loop_its_turns() -> None:
    async def test() -> None:
        device, decoder = sealed_pair()
        end = End(decoder).start()
        order: list[str] = []

        def take(frame: bytes) -> None:
            order.append("frame")
            if len(order) < 3000:
                device._segment.producer.write(frame)  # as fast as it is read

        end.on_frame = take
        for _ in range(SLOTS):
            assert device._segment.producer.write(b"x")
        device._wake_peer()

        def turn() -> None:
            order.append("other")
            if end.transport is decoder and len(order) < 3000:
                asyncio.get_running_loop().call_soon(turn)

        turn()
        await until(lambda: len(order) >= 3000)
        longest = max(len(run) for run in "".join(word[0] for word in order).split("o"))
        assert longest <= 2 * shm_module._BURST
        device.close()
        await end.ended()

    run(test)


def test_frames_that_ask_for_much_leave_the_event_loop_its_turns_and_none_is_lost() -> None:
    async def test() -> None:
        device, decoder = sealed_pair()
        order: list[str] = []
        end = End(decoder)

        def take(frame: bytes) -> None:
            order.append("frame")
            time.sleep(0.01)

        def turn() -> None:
            order.append("other")
            if not end.ends:
                asyncio.get_running_loop().call_soon(turn)

        end.on_frame = take
        end.start()
        for _ in range(20):
            device.send(b"x")
        device.close()  # what was written before is read all the same, a little at a time
        turn()
        assert isinstance(await end.ended(), LinkError)
        assert order.count("frame") == 20
        longest = max(len(run) for run in "".join(word[0] for word in order).split("o"))
        assert longest <= 2

    run(test)


def test_the_size_of_a_segment_is_two_rings_of_whole_pages() -> None:
    assert 2 * ring_bytes() == SIZE
    assert SIZE % 1024 == 0
