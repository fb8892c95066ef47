"""The ring against a plain queue, and against what a hostile or dying peer may leave in it."""

import mmap
import os
import struct
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import CapacityError, LocalProtocolError, RemoteProtocolError
from shared.frames import MAX_FRAME
from shared.transport.ring import (
    HEADER,
    MAGIC,
    MAX_FRAME_SLOTS,
    SLOT,
    SLOTS,
    VERSION,
    Consumer,
    Producer,
    Ring,
    ring_bytes,
)

PRODUCED, CONSUMED, WANTED = 128, 256, 384
SMALL, FEW = 64, 4
ROOM = SMALL - 16
bounded = settings(max_examples=200, deadline=None, derandomize=True)


def make(slot: int = SMALL, slots: int = FEW) -> tuple[bytearray, Producer, Consumer]:
    memory = bytearray(ring_bytes(slot, slots))
    Ring.format(memoryview(memory), slot, slots)
    return memory, Producer(memoryview(memory)), Consumer(memoryview(memory))


def word(memory: bytearray, at: int) -> int:
    return int(struct.unpack_from("<Q", memory, at)[0])


def set_word(memory: bytearray, at: int, value: int) -> None:
    struct.pack_into("<Q", memory, at, value)


# --- as a queue


@bounded
@given(
    st.lists(st.one_of(st.none(), st.binary(max_size=3 * ROOM)), max_size=60),
    st.integers(0, 1 << 40),
)
def test_it_is_a_queue_bounded_by_its_slots(steps: list[bytes | None], start: int) -> None:
    memory, _, _ = make()
    set_word(memory, PRODUCED, start)
    set_word(memory, CONSUMED, start)
    producer, consumer = Producer(memoryview(memory)), Consumer(memoryview(memory))
    twin = deque[bytes]()

    def slots(frame: bytes) -> int:
        return max(1, -(-len(frame) // ROOM))

    for frame in steps:
        if frame is None:
            assert consumer.read() == (twin.popleft() if twin else None)
        else:
            fits = sum(map(slots, twin)) + slots(frame) <= FEW
            assert producer.write(frame) is fits
            if fits:
                twin.append(frame)
    assert [consumer.read() for _ in range(len(twin) + 1)] == [*twin, None]


@pytest.mark.parametrize("size", [0, 1, ROOM - 1, ROOM, ROOM + 1, FEW * ROOM])
def test_a_frame_takes_as_many_slots_as_it_needs(size: int) -> None:
    memory, producer, consumer = make()
    frame = bytes(range(256)) * 2
    assert producer.write(frame[:size])
    assert word(memory, PRODUCED) == max(1, -(-size // ROOM))
    assert consumer.read() == frame[:size]
    assert word(memory, CONSUMED) == word(memory, PRODUCED)


def test_the_longest_frame_of_the_protocol_fits_twice() -> None:
    _, producer, consumer = make(SLOT, SLOTS)
    frame = bytes(range(256)) * (MAX_FRAME // 256)
    assert producer.largest >= MAX_FRAME
    assert producer.write(frame)
    assert consumer.read() == frame
    assert -(-MAX_FRAME // (SLOT - 16)) < MAX_FRAME_SLOTS


def test_a_frame_that_never_fits_is_our_own_mistake() -> None:
    _, producer, consumer = make()
    with pytest.raises(LocalProtocolError, match=rf"{FEW * ROOM + 1} bytes: the ring holds 192"):
        producer.write(bytes(FEW * ROOM + 1))
    assert consumer.read() is None


def test_a_full_ring_takes_nothing_and_asks_to_be_told_of_room() -> None:
    _, producer, consumer = make()
    while producer.write(b"x"):
        pass
    assert not producer.write(b"y")
    assert consumer.read() == b"x"
    assert consumer.space_wanted()
    assert not consumer.space_wanted(), "the wish was heard"
    assert not producer.write(bytes(2 * ROOM)), "one slot is free, two are wanted"
    assert consumer.space_wanted()
    assert producer.write(b"y")
    assert [consumer.read() for _ in range(FEW + 1)] == [b"x"] * (FEW - 1) + [b"y", None]


def test_both_sides_go_on_where_the_cursors_stand() -> None:
    memory, producer, consumer = make()
    for n in range(10):
        assert producer.write(b"%d" % n)
        assert consumer.read() == b"%d" % n
    assert producer.write(b"kept")
    again = Consumer(memoryview(memory))
    assert again.read() == b"kept"
    assert Producer(memoryview(memory)).write(b"more")


def test_a_released_ring_lets_go_of_the_memory() -> None:
    memory, producer, consumer = make()
    for ring in (producer, consumer):
        ring.release()
    memory.extend(b"grows only without views")


# --- damage


def test_a_producer_that_dies_in_a_slot_has_written_nothing() -> None:
    memory, producer, consumer = make()
    assert producer.write(b"whole")
    cursor = word(memory, PRODUCED)
    producer.write(bytes(3 * ROOM))
    set_word(memory, PRODUCED, cursor)  # it died before the cursor moved
    assert consumer.read() == b"whole"
    assert consumer.read() is None


def test_a_producer_that_dies_between_the_slots_of_a_frame_leaves_no_half_frame() -> None:
    memory, producer, consumer = make()
    producer.write(bytes(3 * ROOM))
    set_word(memory, PRODUCED, 2)
    assert consumer.read() is None


@pytest.mark.parametrize("at", range(16 + 5))
def test_no_changed_byte_of_a_slot_is_believed(at: int) -> None:
    memory, producer, consumer = make()
    producer.write(b"hello")
    memory[HEADER + at] ^= 0x55
    with pytest.raises(RemoteProtocolError, match="ring slot 0"):
        consumer.read()
    assert word(memory, CONSUMED) == 0


def test_a_slot_of_an_earlier_round_is_not_believed() -> None:
    memory, producer, consumer = make()
    for _ in range(FEW):
        producer.write(b"old")
        consumer.read()
    set_word(memory, PRODUCED, FEW + 1)  # the cursor came before the slot, as on a weak machine
    with pytest.raises(RemoteProtocolError, match=r"sequence 1 \(expected 5\)"):
        consumer.read()


def test_a_slot_that_becomes_whole_is_read_after_all() -> None:
    memory, producer, consumer = make()
    producer.write(b"hello")
    memory[HEADER] ^= 1
    with pytest.raises(RemoteProtocolError):
        consumer.read()
    memory[HEADER] ^= 1
    assert consumer.read() == b"hello"


@pytest.mark.parametrize("length", [ROOM + 1, 1 << 20, (1 << 31) - 1])
def test_a_length_beyond_the_slot_is_refused_without_reading_it(length: int) -> None:
    memory, producer, consumer = make()
    producer.write(b"hello")
    struct.pack_into("<I", memory, HEADER + 8, length)
    with pytest.raises(RemoteProtocolError, match=f"length {length}"):
        consumer.read()


@pytest.mark.parametrize("produced", [FEW + 1, 1 << 63, (1 << 64) - 1])
def test_a_producer_cursor_beyond_the_ring_is_refused(produced: int) -> None:
    memory, _, consumer = make()
    set_word(memory, PRODUCED, produced)
    with pytest.raises(RemoteProtocolError, match="claims to have written"):
        consumer.read()


def test_a_producer_cursor_that_goes_back_is_refused() -> None:
    memory, producer, consumer = make()
    producer.write(b"a")
    consumer.read()
    set_word(memory, PRODUCED, 0)
    with pytest.raises(RemoteProtocolError, match="claims to have written 0 slots, 1 are read"):
        consumer.read()


@pytest.mark.parametrize("consumed", [2, 1 << 63, (1 << 64) - 1])
def test_a_consumer_cursor_beyond_what_was_written_is_refused(consumed: int) -> None:
    memory, producer, _ = make()
    producer.write(b"a")
    set_word(memory, CONSUMED, consumed)
    with pytest.raises(RemoteProtocolError, match="claims to have read"):
        producer.write(b"b")


def test_a_consumer_cursor_that_goes_back_too_far_is_refused() -> None:
    memory, producer, consumer = make()
    for _ in range(FEW + 1):
        producer.write(b"a")
        consumer.read()
    set_word(memory, CONSUMED, 0)
    with pytest.raises(RemoteProtocolError, match="claims to have read 0 slots of 5"):
        producer.write(b"b")


def test_a_frame_that_never_ends_is_given_up() -> None:
    memory, producer, consumer = make(64, 512)
    producer.write(bytes(512 * ROOM))
    with pytest.raises(CapacityError, match=f"over {MAX_FRAME_SLOTS} slots"):
        consumer.read()
    assert word(memory, PRODUCED) == 512


@pytest.mark.parametrize(
    ("geometry", "why"),
    [
        ((0, VERSION, SMALL, FEW), "magic 0x0"),
        ((MAGIC, VERSION + 1, SMALL, FEW), "version 2"),
        ((MAGIC, VERSION, SMALL, FEW + 1), "does not fit"),
        ((MAGIC, VERSION, SMALL + 4, FEW), "does not fit"),
        ((MAGIC, VERSION, 0, FEW), "does not fit"),
        ((MAGIC, VERSION, SMALL, 1), "does not fit"),
        ((MAGIC, VERSION, 1 << 31, 1 << 31), "does not fit"),
    ],
)
def test_a_geometry_that_does_not_fit_the_memory_is_refused(
    geometry: tuple[int, ...], why: str
) -> None:
    memory, _, _ = make()
    struct.pack_into("<4I", memory, 0, *geometry)
    for side in (Producer, Consumer):
        with pytest.raises(RemoteProtocolError, match=why):
            side(memoryview(memory))


@pytest.mark.parametrize("size", [0, 15, HEADER - 1])
def test_memory_too_small_for_a_header_is_refused(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"ring of {size} bytes"):
        Consumer(memoryview(bytearray(size)))


def test_a_geometry_changed_later_changes_nothing() -> None:
    memory, producer, consumer = make()
    struct.pack_into("<4I", memory, 0, 0, 0, 1 << 30, 1 << 30)
    assert producer.write(b"x")
    assert consumer.read() == b"x"


@bounded
@given(st.lists(st.binary(max_size=2 * ROOM), min_size=1, max_size=3), st.data())
def test_whatever_bytes_change_a_frame_is_right_or_refused(
    frames: list[bytes], data: st.DataObject
) -> None:
    memory, producer, consumer = make()
    written = [frame for frame in frames if producer.write(frame)]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.sampled_from([PRODUCED, CONSUMED, *range(HEADER, len(memory))]))
        memory[at] ^= data.draw(st.integers(1, 255))
    try:
        for frame in written:
            got = consumer.read()
            assert got in (frame, None)
            if got is None:
                break
    except (RemoteProtocolError, CapacityError):
        pass


def test_a_cursor_is_stored_whole_however_often_the_other_side_looks() -> None:
    """A store in pieces shows as a cursor that goes back: to 0, or to half of the old one."""
    shared, start = mmap.mmap(-1, 4096), 1 << 40
    Ring.format(memoryview(shared), SMALL, FEW)
    words = memoryview(shared).cast("Q")
    cursors = (PRODUCED // 8, CONSUMED // 8)
    for at in cursors:
        words[at] = start
    child = os.fork()
    if child == 0:
        producer, consumer = Producer(memoryview(shared)), Consumer(memoryview(shared))
        for _ in range(100_000):
            producer.write(b"")
            consumer.read()
        os._exit(0)
    least = [start, start]
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        for _ in range(1000):
            seen = [words[at] for at in cursors]
            assert seen[0] >= least[0]
            assert seen[1] >= least[1]
            least = seen
    assert words[cursors[1]] == start + 100_000
