"""Frames to bytes and back. The order of fields in `FIELDS` is the wire contract. Pure."""

from typing import Any, NamedTuple

from shared.errors import LocalProtocolError, RemoteProtocolError
from shared.frames import kinds
from shared.frames.bodies import MAJOR, MAX_FRAME, MINOR, Held, HelloBody, OpenBody, WelcomeBody
from shared.wire import BYTES, COUNTER, CRC, FLAG, IDS, TEXT, VARINT, Codec, Truncated, record
from shared.wire import put_varint as _put_varint
from shared.wire import take_varint as _take_varint

OPTIONAL_KINDS = 0x60
"""From this kind on, a reader skips what it does not know."""


class Field(NamedTuple):
    """One field of a frame, its codec and the minor version that brought it.

    A field that came later has a default in its frame, for peers of an older minor version.
    """

    name: str
    codec: Codec
    since: int = 0


def _fields(**codecs: Codec) -> tuple[Field, ...]:
    return tuple(Field(name, codec) for name, codec in codecs.items())


FIELDS: dict[type[kinds.Frame], tuple[Field, ...]] = {
    kinds.Hello: _fields(body=record(HelloBody)),
    kinds.Open: _fields(body=record(OpenBody)),
    kinds.Commit: _fields(turn=VARINT, base=VARINT, ids=IDS, crc=CRC),
    kinds.Rewind: _fields(turn=VARINT, to=VARINT),
    kinds.EndTurn: _fields(turn=VARINT, attempt=VARINT, ids=IDS, length=VARINT, crc=CRC),
    kinds.Cancel: _fields(turn=VARINT, heard=VARINT),
    kinds.Reopen: _fields(turn=VARINT, attempt=VARINT),
    kinds.History: _fields(turn=VARINT, attempt=VARINT, user_ids=IDS, reply_ids=IDS, done=FLAG),
    kinds.Bye: (),
    kinds.Tail: _fields(turn=VARINT, after=VARINT, tick=VARINT, ids=IDS),
    kinds.ReplyAck: _fields(turn=VARINT, index=VARINT, crc=CRC, again=FLAG),
    kinds.Fetch: _fields(digest=TEXT, offset=VARINT),
    kinds.Welcome: _fields(body=record(WelcomeBody)),
    kinds.Ack: _fields(seq=VARINT, credit=VARINT, load=VARINT),
    kinds.Resync: _fields(held=record(Held)),
    kinds.Tokens: _fields(turn=VARINT, attempt=VARINT, index=VARINT, ids=IDS),
    kinds.Finish: _fields(turn=VARINT, attempt=VARINT, length=VARINT, reason=TEXT),
    kinds.Notice: _fields(topic=TEXT, text=TEXT),
    kinds.Error: _fields(code=VARINT, text=TEXT),
    kinds.Blob: _fields(digest=TEXT, offset=VARINT, size=VARINT, data=BYTES),
}
_KINDS: dict[int, type[kinds.Frame]] = {frame.kind: frame for frame in FIELDS}


def encode(frame: kinds.Frame, minor: int = MINOR) -> bytes:
    """Return the bytes of `frame` for a peer that speaks `minor`.

    Raises:
        LocalProtocolError: a value does not fit its field, or the frame is longer than `MAX_FRAME`.
    """
    out = bytearray((MAJOR << 4 | minor, frame.kind))
    try:
        _put_varint(out, frame.stream)
        _put_varint(out, frame.epoch)
        if isinstance(frame, kinds.Reliable):
            COUNTER.put(out, frame.seq)
        for name, codec, since in FIELDS[type(frame)]:
            if since <= minor:
                codec.put(out, getattr(frame, name))
    except ValueError as error:
        raise LocalProtocolError(f"{type(frame).__name__} cannot be sent: {error}") from None
    if len(out) > MAX_FRAME:
        raise LocalProtocolError(
            f"{type(frame).__name__} of {len(out)} bytes: a frame has at most {MAX_FRAME}"
        )
    return bytes(out)


def decode(data: bytes) -> kinds.Frame | None:
    """Parse one frame; None if it is of an unknown kind that may be skipped.

    Raises:
        RemoteProtocolError: another major version, an unknown kind, a field cut short or out of
            range, bytes left over, or a frame longer than `MAX_FRAME`.
    """
    if len(data) > MAX_FRAME:
        raise RemoteProtocolError(f"a frame of {len(data)} bytes: at most {MAX_FRAME} are allowed")
    if len(data) < 2:
        raise RemoteProtocolError(f"a frame of {len(data)} bytes: the header alone has four")
    major, minor = data[0] >> 4, data[0] & 0xF
    if major != MAJOR:
        raise RemoteProtocolError(
            f"protocol version {major}.{minor}: this end speaks {MAJOR}.{MINOR}; "
            "update the older end"
        )
    kind = _KINDS.get(data[1])
    if kind is None:
        if data[1] >= OPTIONAL_KINDS:
            return None
        raise RemoteProtocolError(f"unknown frame kind 0x{data[1]:02x}")
    try:
        values, at = _take_fields(kind, data, minor)
    except Truncated:
        raise RemoteProtocolError(f"{kind.__name__} is cut short at {len(data)} bytes") from None
    except ValueError as error:
        raise RemoteProtocolError(f"{kind.__name__} is malformed: {error}") from None
    if at != len(data) and minor <= MINOR:
        raise RemoteProtocolError(f"{kind.__name__} has {len(data) - at} bytes too many")
    return kind(**values)


def _take_fields(kind: type[kinds.Frame], data: bytes, minor: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    values["stream"], at = _take_varint(data, 2)
    values["epoch"], at = _take_varint(data, at)
    if kind.reliable:
        values["seq"], at = COUNTER.take(data, at)
    for name, codec, since in FIELDS[kind]:
        if since <= minor:
            values[name], at = codec.take(data, at)
    return values, at
