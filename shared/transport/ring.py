"""A single-producer, single-consumer ring of slots: index arithmetic over a memoryview. No I/O.

Layout (little-endian, every word 8-aligned, each writer's words on cache lines of their own):

    0    magic u32, version u32, slot size u32, slots u32   written once by the creator
    128  produced u64                                       the producer's count of slots written
    256  consumed u64                                       the consumer's count of slots read
    384  space wanted u64                                   set by a producer that found it full
    512  slots, each: sequence u64, length u32 (top bit: the frame goes on), crc u32, payload

The sequence of slot k is k + 1 and is written last, as the cursor is; the CRC covers sequence,
length and payload. A reader copies out, then checks, then parses. So a torn or reordered read (weak
memory order, a peer that died in the middle of a slot) is seen, never believed.

A cursor is stored whole, through a view of words: `struct.pack_into` fills with zeroes before it
writes, and a peer that looks in between would see a cursor of 0.
"""

import struct
import zlib

from shared.errors import CapacityError, LocalProtocolError, RemoteProtocolError

MAGIC, VERSION = 0x52444C54, 1
SLOT, SLOTS = 1024, 512
"""Bytes of a slot, and slots: room for the longest frame and as much again."""
HEADER = 512
MAX_FRAME_SLOTS = 300
_GEOMETRY = struct.Struct("<IIII")
_WORD = 8
_SLOT_HEADER = struct.Struct("<QII")
_COVERED = struct.Struct("<QI")
_PRODUCED, _CONSUMED, _WANTED = 128, 256, 384
_MORE = 1 << 31
_RETRIES = 3


def ring_bytes(slot: int = SLOT, slots: int = SLOTS) -> int:
    """Return the bytes a ring takes."""
    return HEADER + slot * slots


class Ring:
    """What both sides know of a ring."""

    def __init__(self, memory: memoryview) -> None:
        if len(memory) < HEADER:
            raise RemoteProtocolError(f"ring of {len(memory)} bytes: its header alone has {HEADER}")
        magic, version, slot, slots = _GEOMETRY.unpack_from(memory, 0)
        if magic != MAGIC or version != VERSION:
            raise RemoteProtocolError(
                f"ring magic {magic:#x} version {version}: expected {MAGIC:#x} version {VERSION}"
            )
        if slot < 64 or slot % 8 or slots < 2 or ring_bytes(slot, slots) > len(memory):
            raise RemoteProtocolError(
                f"ring of {slots} slots of {slot} bytes does not fit its {len(memory)} bytes"
            )
        self._memory = memory
        self._slot, self._slots = int(slot), int(slots)
        self._room = self._slot - _SLOT_HEADER.size
        self._words = memory[:HEADER].cast("Q")  # little-endian on every machine we run on

    @staticmethod
    def format(memory: memoryview, slot: int = SLOT, slots: int = SLOTS) -> None:
        """Write the geometry into zeroed memory."""
        _GEOMETRY.pack_into(memory, 0, MAGIC, VERSION, slot, slots)

    def release(self) -> None:
        """Give up the views, so that the mapping below can be closed."""
        self._words.release()
        self._memory.release()

    def _word(self, at: int) -> int:
        return self._words[at // _WORD]

    def _set(self, at: int, value: int) -> None:
        self._words[at // _WORD] = value

    def _offset(self, index: int) -> int:
        return HEADER + index % self._slots * self._slot


class Producer(Ring):
    """The writing side."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._written = self._word(_PRODUCED)

    @property
    def largest(self) -> int:
        """Bytes of the longest frame that ever fits."""
        return self._room * self._slots

    def write(self, frame: bytes) -> bool:
        """Append `frame`, over several slots if need be; False if there is no room now.

        Raises:
            LocalProtocolError: the frame never fits.
            RemoteProtocolError: the consumer's cursor is impossible.
        """
        pieces = max(1, -(-len(frame) // self._room))
        if pieces > self._slots:
            raise LocalProtocolError(
                f"a frame of {len(frame)} bytes: the ring holds {self.largest}"
            )
        if self._written + pieces - self._consumed() > self._slots:
            self._set(_WANTED, 1)
            if self._written + pieces - self._consumed() > self._slots:
                return False
        for k in range(pieces):
            self._put(frame[k * self._room : (k + 1) * self._room], more=k + 1 < pieces)
        self._set(_PRODUCED, self._written)
        return True

    def _consumed(self) -> int:
        consumed = self._word(_CONSUMED)
        if not self._written - self._slots <= consumed <= self._written:
            raise RemoteProtocolError(
                f"ring: the peer claims to have read {consumed} slots of {self._written} written"
            )
        return consumed

    def _put(self, piece: bytes, *, more: bool) -> None:
        at, sequence = self._offset(self._written), self._written + 1
        length = len(piece) | (_MORE if more else 0)
        crc = zlib.crc32(piece, zlib.crc32(_COVERED.pack(sequence, length)))
        memory = self._memory
        memory[at + _SLOT_HEADER.size : at + _SLOT_HEADER.size + len(piece)] = piece
        _SLOT_HEADER.pack_into(memory, at, sequence, length, crc)
        self._written = sequence


class Consumer(Ring):
    """The reading side."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._read = self._word(_CONSUMED)
        self._parts: list[bytes] = []

    def read(self) -> bytes | None:
        """Return the next whole frame, or None if there is none yet.

        Raises:
            RemoteProtocolError: a cursor, sequence, length or CRC is wrong.
            CapacityError: a frame goes on over more slots than any frame may.
        """
        produced = self._word(_PRODUCED)
        if not self._read <= produced <= self._read + self._slots:
            raise RemoteProtocolError(
                f"ring: the peer claims to have written {produced} slots, {self._read} are read "
                f"and the ring has {self._slots}"
            )
        while self._read < produced:
            piece, more = self._take()
            self._parts.append(piece)
            if not more:
                frame = b"".join(self._parts) if len(self._parts) > 1 else piece
                self._parts.clear()
                return frame
            if len(self._parts) > MAX_FRAME_SLOTS:
                raise CapacityError(f"ring: a frame goes on over {MAX_FRAME_SLOTS} slots")
        return None

    def space_wanted(self) -> bool:
        """Tell whether the producer waits for room, and clear its wish."""
        if not self._word(_WANTED):
            return False
        self._set(_WANTED, 0)
        return True

    def _take(self) -> tuple[bytes, bool]:
        at, expected = self._offset(self._read), self._read + 1
        sequence = size = crc = 0
        for _ in range(_RETRIES):
            sequence, length, crc = _SLOT_HEADER.unpack_from(self._memory, at)
            size = length & ~_MORE
            if sequence == expected and size <= self._room:
                start = at + _SLOT_HEADER.size
                piece = bytes(self._memory[start : start + size])
                if zlib.crc32(piece, zlib.crc32(_COVERED.pack(sequence, length))) == crc:
                    self._read = expected
                    self._set(_CONSUMED, expected)
                    return piece, bool(length & _MORE)
        raise RemoteProtocolError(
            f"ring slot {self._read}: sequence {sequence} (expected {expected}), length {size} "
            f"(at most {self._room}) or CRC {crc:#010x} is wrong"
        )
