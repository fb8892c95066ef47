"""Field codecs of the wire: varints, id lists, text, CRCs, msgpack bodies. Pure.

A codec writes a value to the end of a bytearray and reads one from an offset of a frame. Readers
check every bound before they use it and raise `Truncated` or `ValueError`; `frames` turns both into
one error.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from shared.tokenlog import MAX_ID

MAX_VARINT = (1 << 64) - 1
MAX_COUNTER = 1 << 62
"""Largest number that either end counts on from: what follows has still 64 bits."""
_U32 = struct.Struct("<I")


class Truncated(ValueError):
    """The frame ends inside this field."""


class Codec(NamedTuple):
    """How one field is written and read."""

    put: Callable[[bytearray, Any], None]
    take: Callable[[bytes, int], tuple[Any, int]]


def put_varint(out: bytearray, value: int) -> None:
    """Append `value` as LEB128 (unsigned, at most 64 bits)."""
    if 0 <= value <= 0x7F:
        out.append(value)
        return
    if not 0 <= value <= MAX_VARINT:
        raise ValueError(f"varint {value} is outside 0..2^64-1")
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def take_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a LEB128 at `at`; return it and the offset behind it."""
    if at < len(data) and (byte := data[at]) < 0x80:
        return byte, at + 1
    value = shift = 0
    while True:
        if at >= len(data):
            raise Truncated
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise ValueError("varint is longer than 64 bits")
    if value > MAX_VARINT:
        raise ValueError("varint is longer than 64 bits")
    return value, at


def _put_counter(out: bytearray, value: int) -> None:
    put_varint(out, _check_counter(value))


def _take_counter(data: bytes, at: int) -> tuple[int, int]:
    value, at = take_varint(data, at)
    return _check_counter(value), at


def _check_counter(value: int) -> int:
    if value > MAX_COUNTER:
        raise ValueError(f"sequence number {value} is above 2^62")
    return value


def _put_ids(out: bytearray, ids: tuple[int, ...]) -> None:
    put_varint(out, len(ids))
    for token in ids:
        if token > MAX_ID:
            raise ValueError(f"token id {token} is above 2^32-1")
        put_varint(out, token)


def _take_ids(data: bytes, at: int) -> tuple[tuple[int, ...], int]:
    count, at = take_varint(data, at)
    if count > len(data) - at:  # every id takes at least a byte
        raise Truncated
    ids: list[int] = []
    for _ in range(count):
        token, at = take_varint(data, at)
        ids.append(token)
    if ids and max(ids) > MAX_ID:
        raise ValueError(f"token id {max(ids)} is above 2^32-1")
    return tuple(ids), at


def _put_crc(out: bytearray, crc: int) -> None:
    if not 0 <= crc <= 0xFFFFFFFF:
        raise ValueError(f"CRC {crc} is outside 0..2^32-1")
    out += _U32.pack(crc)


def _take_crc(data: bytes, at: int) -> tuple[int, int]:
    if at + 4 > len(data):
        raise Truncated
    return _U32.unpack_from(data, at)[0], at + 4


def _put_bytes(out: bytearray, value: bytes) -> None:
    put_varint(out, len(value))
    out += value


def _take_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = take_varint(data, at)
    if size > len(data) - at:
        raise Truncated
    return bytes(data[at : at + size]), at + size


def _put_text(out: bytearray, value: str) -> None:
    _put_bytes(out, value.encode())


def _take_text(data: bytes, at: int) -> tuple[str, int]:
    raw, at = _take_bytes(data, at)
    return raw.decode(), at


def _put_flag(out: bytearray, value: bool) -> None:
    out.append(int(value))


def _take_flag(data: bytes, at: int) -> tuple[bool, int]:
    if at >= len(data):
        raise Truncated
    if data[at] > 1:
        raise ValueError(f"flag byte {data[at]} is neither 0 nor 1")
    return data[at] == 1, at + 1


def record(kind: type[msgspec.Struct]) -> Codec:
    """Return the codec of a msgpack body: unknown keys are ignored, missing ones are defaults."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(kind)

    def put(out: bytearray, value: msgspec.Struct) -> None:
        try:
            _put_bytes(out, encoder.encode(value))
        except (msgspec.MsgspecError, OverflowError) as error:
            raise ValueError(str(error)) from None

    def take(data: bytes, at: int) -> tuple[msgspec.Struct, int]:
        raw, at = _take_bytes(data, at)
        try:
            return decoder.decode(raw), at  # msgspec's own errors are ValueErrors
        except RecursionError:
            raise ValueError("a body is nested too deeply") from None

    return Codec(put, take)


VARINT = Codec(put_varint, take_varint)
COUNTER = Codec(_put_counter, _take_counter)
IDS = Codec(_put_ids, _take_ids)
CRC = Codec(_put_crc, _take_crc)
BYTES = Codec(_put_bytes, _take_bytes)
TEXT = Codec(_put_text, _take_text)
FLAG = Codec(_put_flag, _take_flag)
