"""Snapshot files: what a disk, or somebody who can write to the folder, has made of them."""

import struct
import zlib

import msgspec

from cloud.snapshot.format import (
    LOG_MAGIC,
    check_blocks,
    decode_head,
    decode_log,
    encode_log,
)
from shared.errors import InputError, RemoteProtocolError
from shared.session.saved_stream import resume_stream, save_stream
from tests.relay_world import check_ids
from tests.test_cloud_snapshot_format import conversation, segment

_LOG, _BODY, _SEGMENT, _HEAD = b"l", b"b", b"s", b"h"
"""What an input is: a log; a log's body; a segment; one whose head gets the CRC that it needs."""
_KEYS, _COUNT_AT = 52, 44
"""Where a segment's keys begin, and the number of its blocks."""


def seeds() -> list[bytes]:
    """Files as they are written, and with CRCs that a mutation does not spoil."""
    log, blocks = encode_log(conversation()), segment(3)
    return [_LOG + log, _BODY + log[16:], _SEGMENT + blocks, _HEAD + blocks, _HEAD + segment(0)]


def target(data: bytes) -> None:
    """A file is taken whole, or refused with one error; what is taken can be gone on with."""
    kind, rest = data[:1], data[1:]
    try:
        if kind in (_SEGMENT, _HEAD):
            _take_segment(_with_crc(rest) if kind == _HEAD else rest)
        else:
            head = struct.pack("<8sII", LOG_MAGIC, len(rest), zlib.crc32(rest))
            _take_log(head + rest if kind == _BODY else rest)
    except InputError as error:
        if "here" not in str(error):
            raise AssertionError(f"no place in {error}") from error


def _take_log(data: bytes) -> None:
    saved = decode_log(data, "here")
    assert decode_log(encode_log(saved), "here") == saved or "nan" in repr(saved)
    try:
        stream = resume_stream(saved.stream, check_ids)
    except RemoteProtocolError:
        return
    assert save_stream(stream) == saved.stream or "nan" in repr(saved)
    msgspec.msgpack.encode(stream.held)


def _take_segment(data: bytes) -> None:
    head = decode_head(data, len(data), "here")
    check_blocks(head, memoryview(data)[head.start :], "here")
    assert head.size == len(data)


def _with_crc(data: bytes) -> bytes:
    (count,) = struct.unpack_from("<I", data.ljust(_KEYS, b"\0"), _COUNT_AT)
    end = _KEYS + 16 * min(count, len(data) // 16)
    return data[:end] + struct.pack("<I", zlib.crc32(data[:end])) + data[end + 4 :]
