"""Weights in tiles of 16 output channels, in the form they are stored in.

A tile holds, value of k after value of k, 16 channels side by side, so that one vector instruction
serves 16 of them. Codes of GGML's blocks are moved, never changed: Q4_1 and Q4_0 become `int4`,
Q8_0 becomes `int8`, each with the scales (and minima) of its file as they are. A matrix whose
channels do not fill the last tile ends with zeros.
"""

from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from cloud.engine.cpu.codes import GROUP_BYTES
from cloud.engine.cpu.simd import GROUP, TILE
from shared.nn.weights import Weight

Bytes = NDArray[np.uint8]
Scalar = TypeVar("Scalar", bound=np.generic)


class Form(IntEnum):
    """How the weights of a tile are written."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT4 = 3  # per group of 32 k: 16 half scales, 16 half minima, codes
    INT8 = 4  # per group of 32 k: 16 half scales, codes


_FORMS = {
    "F32": Form.F32,
    "BF16": Form.BF16,
    "F16": Form.F16,
    "Q4_0": Form.INT4,
    "Q4_1": Form.INT4,
    "Q8_0": Form.INT8,
}


def form_of(weight: Weight, wanted: Form | None = None) -> Form:
    """Return the form to lay a matrix out in.

    Args:
        wanted: a form of floats, for every matrix; None: as it is stored, or bfloat16 if there is
            no form for that.
    """
    form = _FORMS.get(weight.kind, Form.BF16) if wanted is None else wanted
    if form in (Form.INT4, Form.INT8) and weight.shape[1] % GROUP:
        return Form.BF16
    return form


def tile_bytes(form: Form, inner: int) -> int:
    """Return the bytes of a tile of `inner` values of k."""
    match form:
        case Form.INT4:
            return inner // GROUP * GROUP_BYTES["int4"]
        case Form.INT8:
            return inner // GROUP * GROUP_BYTES["int8"]
        case Form.F32:
            return inner * TILE * 4
        case _:
            return inner * TILE * 2


def pack(weight: Weight, form: Form) -> Bytes:
    """Lay a matrix (channels, inner) out: (tiles, bytes of a tile)."""
    match form:
        case Form.INT4:
            return _pack_int4(weight)
        case Form.INT8:
            return _pack_int8(weight)
        case _:
            return _pack_floats(weight.dense(), form)


def tiled(rows: NDArray[Scalar]) -> NDArray[Scalar]:
    """(channels, n, ...) → (tiles, n, ..., TILE), the last tile filled up with zeros."""
    missing = -len(rows) % TILE
    padded = np.concatenate((rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)))
    return np.moveaxis(padded.reshape(-1, TILE, *rows.shape[1:]), 1, -1)


def _pack_floats(dense: torch.Tensor, form: Form) -> Bytes:
    kind = {Form.F32: torch.float32, Form.BF16: torch.bfloat16, Form.F16: torch.float16}[form]
    raw = dense.to(kind)
    bits = raw.view(torch.int32 if form == Form.F32 else torch.int16).numpy()
    tiles = np.ascontiguousarray(tiled(bits))
    return tiles.view(np.uint8).reshape(len(tiles), -1)


def _pack_int4(weight: Weight) -> Bytes:
    """GGML, ggml-common.h: Q4_1 is half d, half m, 16 bytes; Q4_0 half d, 16 bytes.

    The low nibbles are the first 16 values, the high ones the last; value = d q + m, or d (q - 8).
    Here 16 bits hold every other one of eight neighbours: k, k + 2, k + 4, k + 6, from the lowest.
    """
    channels, inner = weight.shape
    header = 4 if weight.kind == "Q4_1" else 2
    blocks = weight.data.reshape(channels, inner // GROUP, header + GROUP // 2)
    headers = np.ascontiguousarray(blocks[:, :, :header]).view(np.float16)
    scale = headers[:, :, 0]
    minimum = (
        headers[:, :, 1] if header == 4 else (scale.astype(np.float32) * -8).astype(np.float16)
    )
    nibbles = blocks[:, :, header:]
    codes = np.concatenate((nibbles & 15, nibbles >> 4), axis=2)
    eights = codes.reshape(channels, inner // GROUP, GROUP // 8, 4, 2)
    halves = np.empty((*eights.shape[:3], 2, 2), np.uint8)  # (..., parity, byte)
    halves[..., 0] = eights[:, :, :, 0] | eights[:, :, :, 1] << 4
    halves[..., 1] = eights[:, :, :, 2] | eights[:, :, :, 3] << 4
    return _groups("int4", (scale, minimum), halves.view("<u2")[..., 0])


def _pack_int8(weight: Weight) -> Bytes:
    """GGML, ggml-common.h: Q8_0 is half d, 32 signed bytes; value = d q."""
    channels, inner = weight.shape
    blocks = weight.data.reshape(channels, inner // GROUP, 2 + GROUP)
    scale = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
    pairs = blocks[:, :, 2:].reshape(channels, inner // GROUP, GROUP // 2, 2)
    return _groups("int8", (scale,), pairs)


def _groups(
    form: str, headers: tuple[NDArray[np.float16], ...], codes: NDArray[np.generic]
) -> Bytes:
    """Headers (channels, groups) and codes (channels, groups, steps, 2) → tiles of groups.

    The two codes of a step are neighbours in the tile: they are multiplied as a pair.
    """
    tiles, groups = -(-len(codes) // TILE), codes.shape[1]
    out = np.empty((tiles, groups, GROUP_BYTES[form]), np.uint8)
    at = 0
    for header in headers:
        out[:, :, at : at + 2 * TILE] = np.ascontiguousarray(tiled(header)).view(np.uint8)
        at += 2 * TILE
    pairs = np.ascontiguousarray(np.swapaxes(tiled(codes), -1, -2))  # (..., steps, TILE, 2)
    out[:, :, at:] = pairs.view(np.uint8).reshape(tiles, groups, -1)
    return out.reshape(tiles, -1)
