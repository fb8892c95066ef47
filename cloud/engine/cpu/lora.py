"""Adapters in a step: what a projection says of x, plus B (A x) for the rows that have an adapter.

A phase before the projection *shrinks*: it computes A x, a few values a row. The tasks of the
projection then *expand*: they add B (A x) to their tile of channels. Rows of one adapter that are
neighbours go together as a run, for speed alone: a row's sums have the same order in any run, and
rows without an adapter are in none. The matrices lie where each adapter was loaded, in tiles of 16
ranks or channels like the weights; the program finds them by address, and the sequences of its
batch keep them there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]  # it is in numba's manual
from numba.extending import intrinsic
from numpy.typing import NDArray

from cloud.engine.cpu.job import BAND, PARTS, Floats, Lora
from cloud.engine.cpu.phases import Crew, tasks
from cloud.engine.cpu.simd import ROWS, TILE, dot_f32
from cloud.engine.cpu.tiles import tiled
from shared.adapter import Adapter

A, B, RANK = range(3)
"""What `Lora.where` says of a projection: the addresses of its tiles of A and of B, its rank; 0:
the adapter leaves it as it is."""
_LINE = 64
"""Matrices begin at whole cache lines."""


@dataclass(frozen=True, slots=True, eq=False)
class CpuAdapter:
    """An adapter laid out for the step program."""

    digest: str
    rank: int
    data: Floats
    """A as (tiles, in, TILE) and B, times its scale, as (tiles, rank, TILE), of all projections."""
    where: NDArray[np.int64]  # (layers, 7, 3)

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.data.nbytes


def lay_out_adapter(adapter: Adapter, layers: int) -> CpuAdapter:
    """Lay an adapter out that fits the model."""
    matrices: list[tuple[int, int, int, Floats]] = []
    where = np.zeros((layers, len(PARTS), 3), np.int64)
    for name, pair in adapter.pairs.items():
        _, layer, part = name.split(".")
        place = int(layer), PARTS.index(part)
        where[place][RANK] = pair.rank
        matrices.append((*place, A, tiled(pair.a)))
        matrices.append((*place, B, tiled(pair.b * np.float32(pair.scale))))
    sizes = [-(-tiles.nbytes // _LINE) * _LINE // 4 for *_, tiles in matrices]
    room = np.zeros(sum(sizes) + _LINE // 4, np.float32)
    at = -room.ctypes.data % _LINE // 4
    for (layer_number, part_number, side, tiles), size in zip(matrices, sizes, strict=True):
        room[at : at + tiles.size] = tiles.reshape(-1)
        where[layer_number, part_number, side] = room.ctypes.data + 4 * at
        at += size
    return CpuAdapter(adapter.digest, adapter.rank, room, where)


def lay_out_runs(chunks: Iterable[tuple[int, CpuAdapter | None]], shrunk: Floats) -> Lora:
    """Lay the adapters of a batch out.

    Args:
        chunks: rows and adapter of each.
        shrunk: room for A x.
    """
    adapters: list[CpuAdapter] = []
    runs: list[list[int]] = []
    row = 0
    for count, adapter in chunks:
        if adapter is not None:
            if adapter not in adapters:
                adapters.append(adapter)
            for one in range(row, row + count):
                _add_row(runs, one, adapters.index(adapter))
        row += count
    where = [adapter.where for adapter in adapters]
    return Lora(
        np.array(runs, np.int64).reshape(-1, 3),
        np.stack(where) if where else np.zeros((0, 0, 0, 3), np.int64),
        shrunk,
    )


def _add_row(runs: list[list[int]], row: int, adapter: int) -> None:
    """Add a row to the last run, or begin a new one: runs stay within bands and vectors."""
    if runs and row % BAND:
        first, count, last = runs[-1]
        if last == adapter and first + count == row and count < ROWS:
            runs[-1][1] += 1
            return
    runs.append([row, 1, adapter])


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:
    """Return an address as a pointer to float32."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(address), generate


@numba.njit(nogil=True, inline="always")
def shrink(
    lora: Lora, layer: int, first: int, parts: int, x: Floats, crew: Crew, phase: int
) -> None:
    """Set `shrunk` to A x for `parts` projections from `first` on, which read the same x."""
    runs, where, shrunk = lora.runs, lora.where, lora.shrunk
    inner, width = x.shape[1], shrunk.shape[2]
    tiles = width // TILE
    for task in tasks(crew, phase, len(runs) * parts * tiles):
        run, place, number = task // (parts * tiles), task // tiles % parts, task % tiles
        row, rows, adapter = runs[run]
        _shrink_tile(
            where[adapter, layer, first + place], number, x, row, rows, inner, shrunk[place], width
        )


@numba.njit(nogil=True)
def _shrink_tile(
    where: NDArray[np.int64],
    number: int,
    x: Floats,
    row: int,
    rows: int,
    inner: int,
    out: Floats,
    width: int,
) -> None:
    """Set ranks `number` * TILE and on of some rows of `out` (rows, width)."""
    if number * TILE >= where[RANK]:
        return
    size = inner * TILE
    a = carray(_pointer(where[A] + 4 * number * size), size)
    at = row * width + number * TILE
    for r in range(row, row + rows):
        for j in range(number * TILE, (number + 1) * TILE):
            out[r, j] = 0.0
    dot_f32(rows, x, row * inner, inner, a, 0, TILE, inner, out, at, width)


@numba.njit(nogil=True)
def expand(
    lora: Lora, layer: int, part: int, place: int, row: int, rows: int, number: int, out: Floats
) -> None:
    """Add B (A x) to `out` (rows, TILE): tile `number` of a projection of some rows."""
    for run in range(len(lora.runs)):
        first, count, adapter = lora.runs[run]
        rank = lora.where[adapter, layer, part, RANK]
        if rank and row <= first < row + rows:
            size = rank * TILE
            b = carray(_pointer(lora.where[adapter, layer, part, B] + 4 * number * size), size)
            x, width = lora.shrunk[place], lora.shrunk.shape[2]
            dot_f32(
                count, x, first * width, width, b, 0, TILE, rank, out, (first - row) * TILE, TILE
            )
