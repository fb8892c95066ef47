"""Frames that a stranger may send: mostly what would come next, with any field at any value."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shared import frames
from shared.errors import LocalProtocolError
from shared.frames import codec
from shared.wire import BYTES, CRC, FLAG, IDS, TEXT, VARINT
from tests.fuzz.choices import Choices

COUNTS = (0, 1, 1, 1, 2, 2, 3, 3, 9, 300)
MANY = 40_000
"""More ids than a turn has, in one frame."""
IDS_SENT = (1, 2, 3, 4, 5, 6, 7, 200, (1 << 30) - 1, 1 << 31)
TEXTS = ("", "d", "c0", "c1", "stop", "\n\x00é" * 9, "x" * 70_000, "ab" * 32)


def draw_frame(
    choices: Choices,
    kinds: Sequence[type[frames.Frame]],
    likely: Mapping[str, Any],
    bodies: Mapping[type[frames.Frame], Sequence[msgspec.Struct]],
) -> bytes | None:
    """Return the bytes of a frame; None if its values do not fit the wire.

    Args:
        likely: by field name, what would come next; most fields have just that.
        bodies: by kind, what a body may be.
    """
    kind = choices.pick(kinds)
    fields = {"stream": VARINT, "epoch": VARINT} | ({"seq": VARINT} if kind.reliable else {})
    fields |= {field.name: field.codec for field in codec.FIELDS[kind]}
    values: dict[str, Any] = {}
    for name, how in fields.items():
        if name in likely and choices.byte() < 232:
            values[name] = likely[name]
        else:
            values[name] = _any(choices, how, bodies.get(kind, ()))
    crc_of_ids = likely.get("crc_of_ids")
    if crc_of_ids is not None and "ids" in values and "crc" in values and choices.byte() < 232:
        values["crc"] = crc_of_ids(values["ids"])
    if "length" in values and "ids" in values and choices.byte() < 232:
        values["length"] = likely.get("base", 0) + len(values["ids"])
    try:
        return frames.encode(kind(**values))
    except LocalProtocolError:
        return None


def _any(choices: Choices, how: codec.Codec, bodies: Sequence[msgspec.Struct]) -> Any:
    if how is VARINT:
        return choices.number()
    if how is IDS:
        count = MANY if choices.byte() == 255 else choices.pick(COUNTS)
        return (choices.pick(IDS_SENT),) * count
    if how is CRC:
        return choices.number() & 0xFFFFFFFF
    if how is FLAG:
        return bool(choices.below(2))
    if how is TEXT:
        return choices.pick(TEXTS)
    if how is BYTES:
        return bytes(choices.pick(COUNTS))
    return choices.pick(bodies)
