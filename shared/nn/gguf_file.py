"""Reads a GGUF file: metadata, and every tensor as a view into the mapped file. No torch.

The format is ggml's docs/gguf.md. gguf's own reader makes several numpy objects per string, 4 s for
a vocabulary of 49,152, and believes every count it finds; this one checks each count against the
bytes that are left, so a damaged file can neither hang it nor make it allocate. Tests hold it to
gguf's.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelError

_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_ITEMS = 2**20
"""Longest list in the metadata: the largest vocabularies have a quarter of it."""
_STRING, _ARRAY = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY
_SCALARS: dict[int, str] = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.FLOAT64: "d",
    gguf.GGUFValueType.BOOL: "?",
}
_NUMPY = {"F32": np.float32, "F16": np.float16}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its rows as stored, read-only. Kinds but F32 and F16 are bytes."""

    kind: str
    data: NDArray[Any]  # (rows, bytes or values per row)
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a GGUF file holds."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_file(path: Path) -> GgufFile:
    """Read a GGUF file; the tensors stay in the mapped file.

    Raises:
        ModelError: it is no GGUF file of a known version.
        ValueError: it is truncated or damaged; the message says where.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it begins with other bytes)")
        cursor = _Cursor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ModelError(
            f"{path}: GGUF version {version}; supported are {_VERSIONS} in little-endian order: "
            "convert the model again with a current llama.cpp"
        )
    num_tensors, num_keys = cursor.count(_MIN_TENSOR), cursor.count(_MIN_KEY)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        name = cursor.string()
        if name in metadata:
            raise ValueError(f"metadata {name!r} is there twice")
        metadata[name] = cursor.value(cursor.scalar("I"))
    entries = [cursor.entry() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.at // alignment) * alignment
    return GgufFile(metadata, _place(cursor.buffer, start, alignment, entries))


_MIN_KEY, _MIN_TENSOR, _MIN_STRING = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8, 8
"""The fewest bytes one of them takes."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        values, size = gguf.GGML_QUANT_SIZES[self.kind]
        if self.shape[-1] % values:
            raise ValueError(f"tensor {self.name!r}: rows of {self.shape[-1]} are no whole blocks")
        return self.shape[-1] // values * size


class _Cursor:
    """Reads the header from front to back, never past the end."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.at = 4

    def scalar(self, form: str) -> Any:
        self._need(struct.calcsize(form))
        (value,) = struct.unpack_from("<" + form, self.buffer, self.at)
        self.at += struct.calcsize(form)
        return value

    def count(self, size: int) -> int:
        """Read how many items of at least `size` bytes follow."""
        number: int = self.scalar("Q")
        self._need(number * size)
        return number

    def items(self, size: int) -> int:
        """Read how many items a list has."""
        number = self.count(size)
        if number > _MAX_ITEMS:
            raise ValueError(f"the list at byte {self.at} has {number} items, over {_MAX_ITEMS}")
        return number

    def string(self) -> str:
        length = self.count(1)
        self.at += length
        return self.buffer[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_scalar_form(kind, self.at))
        kind = self.scalar("I")
        if kind == _STRING:
            return self._strings()
        form = _scalar_form(kind, self.at)
        number = self.items(struct.calcsize(form))
        values = struct.unpack_from(f"<{number}{form}", self.buffer, self.at)
        self.at += number * struct.calcsize(form)
        return list(values)

    def entry(self) -> _Entry:
        """Read what the header says about one tensor."""
        name, dimensions = self.string(), self.scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        if 0 in shape:  # then the others could be anything, and take no bytes
            raise ValueError(f"tensor {name!r} has the shape {shape}: it is empty")
        kind = gguf.GGMLQuantizationType(self.scalar("I"))
        return _Entry(name, kind, shape, self.scalar("Q"))

    def _strings(self) -> list[str]:
        """Read an array of strings: the loop over a vocabulary, so without a call per string."""
        number = self.items(_MIN_STRING)
        buffer, at, end = self.buffer, self.at, len(self.buffer)
        length_at = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(number):
            if at + _MIN_STRING > end:
                break
            (length,) = length_at(buffer, at)
            at += _MIN_STRING + length
            if at > end:
                break
            strings.append(buffer[at - length : at].decode())
        if len(strings) < number:
            raise ValueError(f"the file ends at byte {end}, inside a list of {number} strings")
        self.at = at
        return strings

    def _need(self, size: int) -> None:
        if self.at + size > len(self.buffer):
            raise ValueError(
                f"the file ends at byte {len(self.buffer)}, where {size} more bytes "
                f"from {self.at} on are expected"
            )


def _scalar_form(kind: int, at: int) -> str:
    form = _SCALARS.get(kind)
    if form is None:
        raise ValueError(f"metadata at byte {at} has the unknown type {kind}")
    return form


def _place(
    buffer: mmap.mmap, start: int, alignment: int, entries: list[_Entry]
) -> dict[str, GgufTensor]:
    """Turn the header's entries into views, each inside the file and beside the others."""
    whole = np.frombuffer(buffer, np.uint8)
    tensors: dict[str, GgufTensor] = {}
    free = start
    for entry in sorted(entries, key=lambda entry: entry.offset):
        at, size = start + entry.offset, math.prod(entry.shape[:-1]) * entry.row_bytes
        if entry.name in tensors:
            raise ValueError(f"tensor {entry.name!r} is there twice")
        if at < free or entry.offset % alignment:
            raise ValueError(
                f"tensor {entry.name!r} at byte {at} lies over another or off its grid"
            )
        free = at + size
        if free > len(whole):
            raise ValueError(
                f"the file ends at byte {len(whole)}, but tensor {entry.name!r} "
                f"takes bytes {at} to {free}"
            )
        kind = entry.kind.name
        data = whole[at:free].view(_NUMPY.get(kind, np.uint8))
        tensors[entry.name] = GgufTensor(kind, data.reshape(*entry.shape[:-1], -1), entry.shape)
    return tensors
