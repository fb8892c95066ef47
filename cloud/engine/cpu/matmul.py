"""A tile of a matrix product: rows of activations times 16 output channels.

Weights that are floats are multiplied with float32 activations. Weights that are integer codes are
multiplied with 16-bit codes of the activations, one scale for every group of 32: the product of a
group is then an exact sum of integers, and the rounding of activations (2^-16 of the largest of
their group) is a hundredth of bfloat16's.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from cloud.engine.cpu import amx
from cloud.engine.cpu.codes import (
    CODE_ROWS,
    GROUP_BYTES,
    decode_int4,
    decode_int8,
    dot_int4,
    dot_int8,
    dot_unpacked_int4,
    dot_unpacked_int8,
    unpack_int4,
    unpack_int8,
)
from cloud.engine.cpu.curves import encode_groups
from cloud.engine.cpu.features import HAS_AMX
from cloud.engine.cpu.simd import (
    GROUP,
    ROWS,
    TILE,
    dot_bf16,
    dot_f16,
    dot_f32,
    widen_bf16,
    widen_f16,
    widen_f32,
)
from cloud.engine.cpu.tiles import Form

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

PANEL = 256
"""Values of k that are unpacked at a time: at most 16 KiB, half of a first-level cache."""
PANEL_ROOM = max(PANEL, 2 * amx.ROOM // (4 * TILE))
"""Rows of a panel's memory: the matrix unit wants weights and sums beside each other."""
FEW = 4 * CODE_ROWS
"""Rows up to which codes are unpacked again for every call, rather than once into a panel."""
F32, BF16, F16, INT4, INT8 = (int(form) for form in Form)
_INT4_BYTES, _INT8_BYTES = GROUP_BYTES["int4"], GROUP_BYTES["int8"]
AMX_ROWS = 16
"""Rows from which the matrix unit is faster, where there is one."""


class Input(NamedTuple):
    """Activations that a product reads."""

    values: Floats  # (rows, inner)
    codes: NDArray[np.int16]  # (rows, inner): about value / scale
    scales: Floats  # (rows, inner / GROUP)
    sums: Floats  # (rows, inner / GROUP): of the codes


@numba.njit(nogil=True)
def encode_row(x: Input, row: int, inner: int) -> None:
    """Set codes, scales and sums of one row from its values."""
    groups = inner // GROUP
    encode_groups(x.values, row * inner, groups, x.codes, x.scales, x.sums, row * groups)


@numba.njit(nogil=True)
def multiply(
    x: Input,
    row: int,
    rows: int,
    w: Bytes,
    form: int,
    at: int,
    out: Floats,
    panel: Floats,
) -> None:
    """Set out[:rows] (rows, TILE) to x[row : row + rows] times the tile at byte `at` of `w`.

    Args:
        x: (rows, inner).
        panel: room for (PANEL_ROOM, TILE) floats.
    """
    inner = x.values.shape[1]
    for i in range(rows):
        for j in range(TILE):
            out[i, j] = 0.0
    if form == INT4 or form == INT8:
        _multiply_codes(x, row, rows, w, form, at, inner, out, panel)
    else:
        _multiply_floats(x.values, row, rows, w, form, at, inner, out, panel)


@numba.njit(nogil=True)
def _multiply_codes(
    x: Input,
    row: int,
    rows: int,
    w: Bytes,
    form: int,
    at: int,
    inner: int,
    out: Floats,
    panel: Floats,
) -> None:
    c, s, t = x.codes, x.scales, x.sums
    cs, ss, groups = c.shape[1], s.shape[1], inner // GROUP
    if HAS_AMX and rows >= AMX_ROWS:
        _multiply_codes_amx(x, row, rows, w, form, at, out, panel)
        return
    if rows <= FEW:
        for i in range(0, rows, CODE_ROWS):
            n, j, k = min(CODE_ROWS, rows - i), (row + i) * cs, (row + i) * ss
            if form == INT4:
                dot_int4(n, c, j, cs, s, t, k, ss, w, at, groups, panel, out, i * TILE, TILE)
            else:
                dot_int8(n, c, j, cs, s, t, k, ss, w, at, groups, panel, out, i * TILE, TILE)
        return
    step = 2 * PANEL // GROUP  # of 16-bit pairs the panel holds twice as many
    for group in range(0, groups, step):
        some = min(step, groups - group)
        here = at + group * (_INT4_BYTES if form == INT4 else _INT8_BYTES)
        if form == INT4:
            unpack_int4(w, here, some, panel)
        else:
            unpack_int8(w, here, some, panel)
        for i in range(0, rows, CODE_ROWS):
            n = min(CODE_ROWS, rows - i)
            j, k = (row + i) * cs + group * GROUP, (row + i) * ss + group
            if form == INT4:
                dot_unpacked_int4(
                    n, c, j, cs, s, t, k, ss, w, here, some, panel, out, i * TILE, TILE
                )
            else:
                dot_unpacked_int8(
                    n, c, j, cs, s, t, k, ss, w, here, some, panel, out, i * TILE, TILE
                )


@numba.njit(nogil=True)
def _multiply_codes_amx(
    x: Input, row: int, rows: int, w: Bytes, form: int, at: int, out: Floats, panel: Floats
) -> None:
    c, s, t = x.codes, x.scales, x.sums
    cs, ss, size = c.shape[1], s.shape[1], _INT4_BYTES if form == INT4 else _INT8_BYTES
    amx.begin()
    for group in range(0, ss, amx.GROUPS):
        some, here = min(amx.GROUPS, ss - group), at + group * size
        if form == INT4:
            amx.spread_int4(w, here, some, panel)
        else:
            amx.spread_int8(w, here, some, panel)
        for i in range(0, rows, amx.ROWS):
            n = min(amx.ROWS, rows - i)
            j, k, to = (row + i) * cs + group * GROUP, (row + i) * ss + group, i * TILE
            if form == INT4:
                amx.multiply_int4(n, c, j, cs, s, t, k, ss, w, here, some, panel, out, to)
            else:
                amx.multiply_int8(n, c, j, cs, s, t, k, ss, w, here, some, panel, out, to)
    amx.end()


@numba.njit(nogil=True)
def _multiply_floats(
    x: Floats,
    row: int,
    rows: int,
    w: Bytes,
    form: int,
    at: int,
    inner: int,
    out: Floats,
    panel: Floats,
) -> None:
    stride, first = x.shape[1], row * x.shape[1]
    if form == BF16 and rows <= ROWS:
        dot_bf16(rows, x, first, stride, w, at, 2 * TILE, inner, out, 0, TILE)
    elif form == F16 and rows <= ROWS:
        dot_f16(rows, x, first, stride, w, at, 2 * TILE, inner, out, 0, TILE)
    else:
        for k in range(0, inner, PANEL):
            depth = min(PANEL, inner - k)
            decode(w, form, at, k, depth, panel)
            for i in range(0, rows, ROWS):
                some, x_at = min(ROWS, rows - i), first + i * stride + k
                dot_f32(some, x, x_at, stride, panel, 0, TILE, depth, out, i * TILE, TILE)


@numba.njit(nogil=True)
def decode(w: Bytes, form: int, at: int, k: int, depth: int, panel: Floats) -> None:
    """Write values k..k + depth of a tile into `panel` (depth, TILE) as float32."""
    if form == INT4:
        decode_int4(w, at + k // GROUP * _INT4_BYTES, depth // GROUP, panel)
    elif form == INT8:
        decode_int8(w, at + k // GROUP * _INT8_BYTES, depth // GROUP, panel)
    elif form == BF16:
        widen_bf16(w, at + k * 2 * TILE, depth, panel)
    elif form == F16:
        widen_f16(w, at + k * 2 * TILE, depth, panel)
    else:
        widen_f32(w, at + k * 4 * TILE, depth, panel)
