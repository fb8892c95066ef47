"""Rotary positions, the cache's new rows, and causal attention over its scattered blocks.

Attention keeps a running softmax (Milakov & Gimelshein, arXiv:1805.02867) over chunks of keys that
begin at the same positions for everybody, in float32. The query heads of a group are rows of one
product, so that a key is read once for all of them.
"""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from cloud.engine.cache import BLOCK
from cloud.engine.cpu.curves import soften
from cloud.engine.cpu.simd import ROWS, TILE, dot, encode, exp, prefetch, widen

Floats = NDArray[np.float32]
Cached = NDArray[Any]

CHUNK = 4 * BLOCK
"""Keys between two corrections of the running softmax."""
PART = 16
"""Most rows of a sequence that one task attends."""


@numba.njit(nogil=True)
def _largest(row: Floats, at: int, count: int) -> np.float32:
    most = np.float32(0.0)
    for i in range(count):
        most = max(most, abs(row[at + i]))
    return most


@numba.njit(nogil=True)
def store(
    row: Floats,
    cos: Floats,
    sin: Floats,
    keys: Cached,
    values: Cached,
    key_scales: Floats,
    value_scales: Floats,
    block: int,
    offset: int,
    dim: int,
    number: int,
    q: Floats,
) -> None:
    """Turn one token's queries and keys by its position; put its keys and values into the cache.

    Args:
        row: queries, keys, values, head by head; changed in place.
        cos, sin: (dim / 2,) of the token's position.
        keys, values, key_scales, value_scales: of this layer.
        q: (kv_heads, rows, group, width); row `number` is set, scaled for attention.
    """
    kv_heads, group, half = q.shape[0], q.shape[2], dim // 2
    heads = kv_heads * group
    shrink = np.float32(1.0 / np.sqrt(dim))
    for head in range(heads + kv_heads):
        at = head * dim
        for i in range(half):
            a, b = row[at + i], row[at + half + i]
            row[at + i] = a * cos[i] - b * sin[i]
            row[at + half + i] = b * cos[i] + a * sin[i]
    for head in range(heads):
        for i in range(dim):
            q[head // group, number, head % group, i] = row[head * dim + i] * shrink
    quantized = len(key_scales) > 0
    for head in range(kv_heads):
        key, value = (heads + head) * dim, (heads + kv_heads + head) * dim
        key_by = value_by = np.float32(1.0)
        if quantized:
            key_scale = _largest(row, key, dim) / np.float32(127.0)
            value_scale = _largest(row, value, dim) / np.float32(127.0)
            key_scales[block, head, offset] = key_scale
            value_scales[block, head, offset] = value_scale
            key_by = np.float32(1.0) / key_scale if key_scale > 0 else np.float32(0.0)
            value_by = np.float32(1.0) / value_scale if value_scale > 0 else np.float32(0.0)
        for i in range(dim):
            keys[block, head, i, offset] = encode(row[key + i] * key_by, keys)
            values[block, head, offset, i] = encode(row[value + i] * value_by, values)


@numba.njit(nogil=True)
def attend(
    q: Floats,
    keys: Cached,
    values: Cached,
    key_scales: Floats,
    value_scales: Floats,
    table: NDArray[np.int32],
    head: int,
    row: int,
    rows: int,
    context: int,
    dim: int,
    scores: Floats,
    total: Floats,
    most: Floats,
    mass: Floats,
    panel: Floats,
    out: Floats,
) -> None:
    """Attend some rows of one sequence with the queries of one KV head.

    Args:
        q: (kv_heads, rows, group, width).
        table: the sequence's blocks.
        context: keys the first of the rows sees; each next one sees one more.
        scores, total, most, mass, panel: room for this task.
        out: (rows, heads * dim).
    """
    group, width = q.shape[2], q.shape[3]
    size = rows * group
    first_q = (head * q.shape[1] + row) * group * width
    quantized = len(key_scales) > 0
    block_keys = keys.shape[1] * width * BLOCK  # elements from one block to the next
    lines = width * BLOCK * keys.itemsize // 64
    for j in range(size):
        most[j], mass[j] = np.float32(-1e30), np.float32(0.0)
        for i in range(width):
            total[j, i] = 0.0
    last = context + rows - 1
    for start in range(0, last, CHUNK):
        count = min(CHUNK, last - start)
        base = max(0, start - context + 1) * group  # earlier rows see none of these keys
        wide = size - base > 2 * ROWS
        for p in range(start + CHUNK, min(start + 2 * CHUNK, last), BLOCK):
            at = table[p // BLOCK] * block_keys + head * width * BLOCK
            prefetch(keys, at, lines)
            prefetch(values, at, lines)
        for j in range(base, size):
            for p in range(CHUNK):
                scores[j, p] = 0.0
        for p in range(0, count, BLOCK):
            block = table[(start + p) // BLOCK]
            at = block * block_keys + head * width * BLOCK
            if wide:
                widen(keys, at, width, panel)
                for j in range(base, size, ROWS):
                    some, x = min(ROWS, size - j), first_q + j * width
                    dot(some, q, x, width, panel, 0, BLOCK, width, scores, j * CHUNK + p, CHUNK)
            else:
                for j in range(base, size, ROWS):
                    some, x = min(ROWS, size - j), first_q + j * width
                    dot(some, q, x, width, keys, at, BLOCK, width, scores, j * CHUNK + p, CHUNK)
            if quantized:
                for j in range(base, size):
                    for i in range(BLOCK):
                        scores[j, p + i] *= key_scales[block, head, i]
        for j in range(base, size):
            visible = min(count, context + j // group - start)
            top, added = soften(scores, j * CHUNK, visible, CHUNK, most[j])
            shrink = exp(most[j] - top)
            most[j], mass[j] = top, mass[j] * shrink + added
            for i in range(width):
                total[j, i] *= shrink
        for p in range(0, count, BLOCK):
            block, depth = table[(start + p) // BLOCK], min(BLOCK, count - p)
            at = block * block_keys + head * width * BLOCK
            if quantized:
                for j in range(base, size):
                    for i in range(depth):
                        scores[j, p + i] *= value_scales[block, head, i]
            if wide:
                widen(values, at, width, panel)
            for i in range(0, width, TILE):
                for j in range(base, size, ROWS):
                    some, x, y = min(ROWS, size - j), j * CHUNK + p, j * width + i
                    if wide:
                        dot(some, scores, x, CHUNK, panel, i, width, depth, total, y, width)
                    else:
                        dot(some, scores, x, CHUNK, values, at + i, width, depth, total, y, width)
    for j in range(size):
        at = (head * group + j % group) * dim
        for i in range(dim):
            out[row + j // group, at + i] = total[j, i] / mass[j]
