"""The ring: an honest side over memory that its peer scribbles on between any two calls."""

import struct

from shared.errors import CapacityError, RemoteProtocolError
from shared.transport.ring import (
    HEADER,
    MAX_FRAME_SLOTS,
    Consumer,
    Producer,
    Ring,
    ring_bytes,
)
from tests.fuzz.choices import Choices

SLOT, SLOTS = 64, 8
ROOM = SLOT - 16
LENGTHS = (0, 1, ROOM - 1, ROOM, ROOM + 1, 3 * ROOM, SLOTS * ROOM)
CURSORS = (128, 256, 384)


def seeds() -> list[bytes]:
    """Honest traffic, and every kind of scribble once."""
    honest = bytes((0, 1, 3, 1, 4, 2, 5, 3, 1, 1)) * 8
    return [honest, honest[:20] + bytes(range(256)), bytes(range(255, -1, -1))]


def target(data: bytes) -> None:
    """Each honest side goes on, or ends with its declared error; it never writes beyond its own."""
    choices = Choices(data)
    memory = bytearray(ring_bytes(SLOT, SLOTS) + 64)
    view = memoryview(memory)[:-64]
    Ring.format(view, SLOT, SLOTS)
    start = choices.pick((0, 0, 1, 7, (1 << 32) - 2, (1 << 63) - 1))
    for at in CURSORS[:2]:
        struct.pack_into("<Q", memory, at, start)
    producer, consumer = Producer(view), Consumer(view)
    try:
        while choices.more:
            _step(choices, memory, producer, consumer)
    except (RemoteProtocolError, CapacityError):
        pass
    assert not any(memory[-64:]), "written behind the ring"
    assert len(consumer._parts) <= MAX_FRAME_SLOTS + 1


def _step(choices: Choices, memory: bytearray, producer: Producer, consumer: Consumer) -> None:
    match choices.byte() % 8:
        case 0 | 1:
            producer.write(b"w" * choices.pick(LENGTHS))
        case 2 | 3:
            frame = consumer.read()
            assert frame is None or len(frame) <= (MAX_FRAME_SLOTS + 1) * ROOM
        case 4:
            consumer.space_wanted()
        case 5:  # a cursor or the geometry
            at = choices.pick((*CURSORS, 0, 8))
            now = struct.unpack_from("<Q", memory, at)[0]
            moved = now + choices.pick((1, -1, SLOTS, -SLOTS)) if choices.below(2) else None
            value = choices.number() if moved is None else moved
            struct.pack_into("<Q", memory, at, value & (1 << 64) - 1)
        case 6:  # a slot's header: its length, or its sequence
            at = HEADER + choices.below(SLOTS) * SLOT
            struct.pack_into("<I", memory, at + choices.pick((0, 4, 8, 12)), choices.number() >> 32)
        case _:
            at = choices.below(len(memory) - 64)
            piece = choices.bytes(choices.below(16))[: len(memory) - 64 - at]
            memory[at : at + len(piece)] = piece
