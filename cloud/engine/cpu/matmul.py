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

from cloud.engine.cpu.simd import (
    CODE_ROWS,
    GROUP,
    GROUP_BYTES,
    ROWS,
    TILE,
    decode_int4,
    decode_int8,
    dot_bf16,
    dot_f16,
    dot_f32,
    dot_int4,
    dot_int8,
    dot_unpacked_int4,
    dot_unpacked_int8,
    unpack_int4,
    unpack_int8,
    widen_bf16,
    widen_f16,
    widen_f32,
)
from cloud.engine.cpu.tiles import Form

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

PANEL = 256
"""Values of k that are unpacked at a time: at most 16 KiB, half of a first-level cache."""
FEW = 4 * CODE_ROWS
"""Rows up to which codes are unpacked again for every call, rather than once into a panel."""
F32, BF16, F16, INT4, INT8 = (int(form) for form in Form)
_INT4_BYTES, _INT8_BYTES = GROUP_BYTES["int4"], GROUP_BYTES["int8"]
_MOST = np.float32(32767.0)


class Input(NamedTuple):
    """Activations that a product reads."""

    values: Floats  # (rows, inner)
    codes: NDArray[np.int16]  # (rows, inner): about value / scale
    scales: Floats  # (rows, inner / GROUP)
    sums: Floats  # (rows, inner / GROUP): of the codes


@numba.njit(nogil=True, fastmath=True)
def encode_row(x: Input, row: int, inner: int) -> None:
    """Set codes, scales and sums of one row from its values."""
    values, codes = x.values[row], x.codes[row]
    for group in range(inner // GROUP):
        at = group * GROUP
        most = np.float32(0.0)
        for i in range(GROUP):
            most = max(most, abs(values[at + i]))
        by = _MOST / most if most > 0 else np.float32(0.0)
        total = np.int32(0)
        for i in range(GROUP):
            code = np.int32(np.rint(values[at + i] * by))
            codes[at + i] = code
            total += code
        x.scales[row, group] = most / _MOST
        x.sums[row, group] = np.float32(total)


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
        panel: room for (PANEL, TILE) floats.
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
