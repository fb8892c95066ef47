"""What the bytes of a snapshot's files mean. No torch, no I/O.

Both kinds of file begin with a magic that has the version, and every byte is under a CRC-32: a
reader takes a whole file or nothing of it. Numbers are little-endian.

    log      magic 8 · length 4 · CRC of the body 4 · body (msgpack of `SavedConversation`)
    segment  magic 8 · fingerprint 32 · bytes of a block 4 · blocks 4 · CRC of the blocks 4
             · 16 for each block: its key · CRC of all before 4 · zeros up to a multiple of 64
             · the blocks

A block's key is a hash over the sequence's namespace and all its ids up to the block's last: equal
words behind other words, of another tenant or with another adapter have another key.
"""

import struct
import zlib
from collections.abc import Hashable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

import msgspec

from shared.errors import InputError
from shared.frames.bodies import Natural
from shared.session.saved_stream import SavedStream, TokenIds

LOG_MAGIC, SEGMENT_MAGIC = b"drlog\x00\x00\x01", b"drkv\x00\x00\x00\x01"
MAX_LOG = 64 * 1024 * 1024
"""Bytes of a log."""
MAX_BLOCKS = 1 << 20
"""Blocks of a segment."""
KEY_BYTES, FINGERPRINT_BYTES = 16, 32
_LOG_HEAD = struct.Struct("<8sII")
_SEGMENT_HEAD = struct.Struct("<8s32sIII")
_CRC = struct.Struct("<I")
_ALIGNMENT = 64

SavedTurn: TypeAlias = tuple[TokenIds, TokenIds]
"""Ids of a user's words and of the reply."""


class SavedConversation(msgspec.Struct, frozen=True):
    """A conversation's log."""

    tokenizer: str
    """Digest of what gives the ids their meaning."""
    device: str
    epoch: Natural
    """Of the device's last connection."""
    stream: SavedStream
    adapter: str
    """Digest of the one that replied last, as the device was told; empty: none."""
    turns: list[SavedTurn | None]
    """Finished ones, with one whose complete reply the device has not confirmed; None: no part of
    the prompt any more."""

    @property
    def name(self) -> str:
        """The conversation's id, unique for its device."""
        return self.stream.body.conversation


@dataclass(frozen=True, slots=True)
class SegmentHead:
    """What a segment has."""

    fingerprint: bytes
    """Of all that decides the bits of keys and values, but for namespace and ids."""
    block_bytes: int
    keys: tuple[bytes, ...]
    """Of its blocks, in their order."""
    crc: int
    """Of the blocks."""

    @property
    def start(self) -> int:
        """Where the blocks begin in the file."""
        return head_bytes(len(self.keys))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.start + len(self.keys) * self.block_bytes


def encode_log(conversation: SavedConversation) -> bytes:
    """Return a log file."""
    body = msgspec.msgpack.encode(conversation)
    return _LOG_HEAD.pack(LOG_MAGIC, len(body), zlib.crc32(body)) + body


def decode_log(data: bytes, place: str) -> SavedConversation:
    """Read a log file; `place` names it in messages.

    Raises:
        InputError: it is damaged, or not of this version.
    """
    if len(data) < _LOG_HEAD.size or len(data) > MAX_LOG:
        raise InputError(f"{place}: {len(data)} bytes: expected {_LOG_HEAD.size} to {MAX_LOG}")
    magic, length, crc = _LOG_HEAD.unpack_from(data)
    _check_magic(magic, LOG_MAGIC, place)
    body = memoryview(data)[_LOG_HEAD.size :]
    if len(body) != length:
        raise InputError(f"{place}: {len(body)} bytes of the log's {length} are there: cut short")
    if zlib.crc32(body) != crc:
        raise InputError(f"{place}: the log has another CRC than when it was written: damaged")
    try:
        saved = msgspec.msgpack.decode(body, type=SavedConversation)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise InputError(f"{place}: no log of this version: {error}") from None
    finished = saved.stream.turn + (saved.stream.reason is not None)
    if len(saved.turns) != finished:
        raise InputError(f"{place}: {len(saved.turns)} finished turns where {finished} are due")
    return saved


def head_bytes(num_blocks: int) -> int:
    """Return the bytes in front of a segment's blocks."""
    used = _SEGMENT_HEAD.size + num_blocks * KEY_BYTES + _CRC.size
    return -(-used // _ALIGNMENT) * _ALIGNMENT


def encode_head(head: SegmentHead) -> bytes:
    """Return a segment up to its first block."""
    count = len(head.keys)
    fields = _SEGMENT_HEAD.pack(
        SEGMENT_MAGIC, head.fingerprint, head.block_bytes, count, head.crc
    ) + b"".join(head.keys)
    return (fields + _CRC.pack(zlib.crc32(fields))).ljust(head_bytes(count), b"\0")


def decode_head(data: bytes | memoryview, size: int, place: str) -> SegmentHead:
    """Read what a segment has from its first bytes, which may be more or fewer than the head.

    Args:
        size: bytes of the whole file.

    Raises:
        InputError: it is damaged, cut short, or not of this version.
    """
    if len(data) < _SEGMENT_HEAD.size:
        raise InputError(f"{place}: {len(data)} bytes: a segment has more")
    magic, fingerprint, block_bytes, count, crc = _SEGMENT_HEAD.unpack_from(data)
    _check_magic(magic, SEGMENT_MAGIC, place)
    end = _SEGMENT_HEAD.size + count * KEY_BYTES
    if count > MAX_BLOCKS or end + _CRC.size > size:
        raise InputError(f"{place}: {size} bytes are too few for {count} blocks: damaged")
    fields = bytes(data[:end])
    if len(data) < end + _CRC.size or _CRC.unpack_from(data, end) != (zlib.crc32(fields),):
        raise InputError(f"{place}: the head has another CRC than when it was written: damaged")
    keys = fields[_SEGMENT_HEAD.size :]
    split = tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
    head = SegmentHead(fingerprint, block_bytes, split, crc)
    if any(data[end + _CRC.size : head.start]):
        raise InputError(f"{place}: bytes behind the head are not zero: damaged")
    if head.size != size:
        raise InputError(f"{place}: {size} bytes where {head.size} are due: cut short or damaged")
    return head


def check_blocks(head: SegmentHead, blocks: memoryview, place: str) -> None:
    """Check a segment's blocks.

    Raises:
        InputError: they are not those that were written.
    """
    if zlib.crc32(blocks) != head.crc:
        raise InputError(f"{place}: its blocks have another CRC than when written: damaged")


def block_keys(namespace: Hashable, ids: Ids[int], size: int) -> list[bytes]:
    """Return the keys of the full blocks of `ids`, `size` of them a block."""
    key = blake2b(repr(namespace).encode(), digest_size=KEY_BYTES).digest()
    layout = struct.Struct(f"<{size}I")
    keys: list[bytes] = []
    for end in range(size, len(ids) + 1, size):
        key = blake2b(key + layout.pack(*ids[end - size : end]), digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


def _check_magic(found: bytes, expected: bytes, place: str) -> None:
    if found[:4] != expected[:4]:
        raise InputError(f"{place}: begins with {found!r}: no file of a snapshot")
    if found != expected:
        raise InputError(f"{place}: version {found[4:].hex()}, this is {expected[4:].hex()}")
