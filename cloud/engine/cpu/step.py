"""One step of the model as one program, run by every member of a team.

A step is a row of phases: embed; then for each layer norm, project q, k and v, store, attend,
project back, norm, gate and up, down; then norm and head of the rows that are sampled. The tasks of
a phase are rows, tiles of 16 output channels, or parts of sequences to attend.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from cloud.engine.cpu.attention import attend, store
from cloud.engine.cpu.matmul import PANEL, Input, decode, encode_row, multiply
from cloud.engine.cpu.phases import Crew, enter, leave, tasks
from cloud.engine.cpu.simd import TILE, exp

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Where = NDArray[np.int64]

Q, K, V, OUT, GATE, UP, DOWN = range(7)
"""Projections of a layer, in `Weights.where`."""
FORM, AT, TILE_BYTES = range(3)
"""What `Weights.where` says of a matrix: its form, its first byte, the bytes of a tile."""
BAND = 128
"""Rows that go through a product together: their activations stay in a second-level cache."""
FIXED_PHASES, LAYER_PHASES = 3, 10


class Sizes(NamedTuple):
    """Of the model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    norm_eps: float
    encodes: bool  # some matrix is integer codes


class Weights(NamedTuple):
    """Matrices as tiles in `data`; the rest as float32."""

    data: NDArray[np.uint8]
    where: NDArray[np.int64]  # (layers, 7, 3)
    ends: NDArray[np.int64]  # (2, 3): embedding, head
    norms: Floats  # (2 layers + 1, hidden)
    biases: Floats  # (layers, channels of all projections, in their order), or (0, 0)
    cos: Floats  # (context, head_dim / 2)
    sin: Floats


class Cache(NamedTuple):
    """The arrays of a `KVCache`."""

    keys: NDArray[Any]
    values: NDArray[Any]
    key_scales: Floats
    value_scales: Floats


class Rows(NamedTuple):
    """A batch laid out flat."""

    tokens: Ints  # (rows,)
    positions: Ints
    blocks: Ints  # (rows,): where each row's key and value go
    offsets: Ints
    tables: Ints  # (chunks, most blocks of a chunk)
    tasks: Ints  # (attention tasks, 4): chunk, KV head, first row, rows
    sampled: Ints  # (sampled rows,)


class Scratch(NamedTuple):
    """Memory of a step: shared first, then one of each for every thread."""

    x: Floats  # (most rows, hidden)
    normed: Input  # (most rows, hidden)
    qkv: Floats  # (most rows, (heads + 2 kv_heads) * head_dim)
    q: Floats  # (kv_heads, most rows, group, width)
    attended: Input  # (most rows, heads * head_dim)
    inner: Input  # (most rows, intermediate)
    tile: Floats  # (threads, 2, BAND, TILE)
    panel: Floats  # (threads, PANEL, TILE)
    scores: Floats  # (threads, PART * group, CHUNK)
    total: Floats  # (threads, PART * group, width)
    most: Floats  # (threads, 2, PART * group)


class Job(NamedTuple):
    """Everything a step needs."""

    sizes: Sizes
    weights: Weights
    cache: Cache
    rows: Rows
    scratch: Scratch
    logits: Floats  # (sampled rows, vocabulary): the result


@numba.njit(nogil=True, fastmath=True)
def _norm_row(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(len(x)) + np.float32(eps))
    for i in range(len(x)):
        out[i] = x[i] * scale * weight[i]


@numba.njit(nogil=True, inline="always")
def _embed(job: Job, crew: Crew, phase: int) -> None:
    where, panel, x = job.weights.ends[0], job.scratch.panel[crew.member], job.scratch.x
    for row in tasks(crew, phase, len(job.rows.tokens)):
        token = job.rows.tokens[row]
        at, column = where[AT] + token // TILE * where[TILE_BYTES], token % TILE
        for k in range(0, job.sizes.hidden, PANEL):
            depth = min(PANEL, job.sizes.hidden - k)
            decode(job.weights.data, where[FORM], at, k, depth, panel)
            for i in range(depth):
                x[row, k + i] = panel[i, column]


@numba.njit(nogil=True, inline="always")
def _norm(job: Job, number: int, crew: Crew, phase: int) -> None:
    s, weight = job.scratch, job.weights.norms[number]
    for row in tasks(crew, phase, len(job.rows.tokens)):
        _norm_row(s.x[row], weight, job.sizes.norm_eps, s.normed.values[row])
        if job.sizes.encodes:
            encode_row(s.normed, row, job.sizes.hidden)


@numba.njit(nogil=True)
def _bands(rows: int) -> int:
    return (rows + BAND - 1) // BAND


@numba.njit(nogil=True)
def _tiles(channels: int) -> int:
    return (channels + TILE - 1) // TILE


@numba.njit(nogil=True)
def _product(
    job: Job,
    x: Input,
    where: Where,
    inner: int,
    number: int,
    row: int,
    rows: int,
    out: Floats,
    panel: Floats,
) -> None:
    """Multiply rows with tile `number` of a matrix."""
    at = where[AT] + number * where[TILE_BYTES]
    multiply(x, row, rows, job.weights.data, where[FORM], at, inner, out, panel)


@numba.njit(nogil=True)
def _add_bias(biases: Floats, layer: int, at: int, tile: Floats, rows: int, count: int) -> None:
    if len(biases):
        for r in range(rows):
            for i in range(count):
                tile[r, i] += biases[layer, at + i]


@numba.njit(nogil=True, inline="always")
def _project(job: Job, layer: int, crew: Crew, phase: int) -> None:
    w, s, n, all_rows = job.weights, job.scratch, job.sizes, len(job.rows.tokens)
    tile, panel = s.tile[crew.member, 0], s.panel[crew.member]
    q_width, kv_width = n.heads * n.head_dim, n.kv_heads * n.head_dim
    q_tiles, kv_tiles = _tiles(q_width), _tiles(kv_width)
    total = q_tiles + 2 * kv_tiles
    for task in tasks(crew, phase, total * _bands(all_rows)):
        row, number = task // total * BAND, task % total
        rows = min(BAND, all_rows - row)
        part, start, width = Q, 0, q_width
        if number >= q_tiles + kv_tiles:
            part, start, width = V, q_width + kv_width, kv_width
            number -= q_tiles + kv_tiles
        elif number >= q_tiles:
            part, start, width = K, q_width, kv_width
            number -= q_tiles
        _product(job, s.normed, w.where[layer, part], n.hidden, number, row, rows, tile, panel)
        column, count = start + number * TILE, min(TILE, width - number * TILE)
        _add_bias(w.biases, layer, column, tile, rows, count)
        for r in range(rows):
            for i in range(count):
                s.qkv[row + r, column + i] = tile[r, i]


@numba.njit(nogil=True, inline="always")
def _store(job: Job, layer: int, crew: Crew, phase: int) -> None:
    w, s, c, r = job.weights, job.scratch, job.cache, job.rows
    keys, values = c.keys[layer], c.values[layer]
    key_scales, value_scales = c.key_scales[layer], c.value_scales[layer]
    for row in tasks(crew, phase, len(r.positions)):
        cos, sin = w.cos[r.positions[row]], w.sin[r.positions[row]]
        block, offset, dim = r.blocks[row], r.offsets[row], job.sizes.head_dim
        store(
            s.qkv[row],
            cos,
            sin,
            keys,
            values,
            key_scales,
            value_scales,
            block,
            offset,
            dim,
            row,
            s.q,
        )


@numba.njit(nogil=True, inline="always")
def _attend(job: Job, layer: int, crew: Crew, phase: int) -> None:
    s, c, r = job.scratch, job.cache, job.rows
    keys, values = c.keys[layer], c.values[layer]
    key_scales, value_scales = c.key_scales[layer], c.value_scales[layer]
    for number in tasks(crew, phase, len(r.tasks)):
        chunk, head, row, rows = r.tasks[number]
        attend(
            s.q,
            keys,
            values,
            key_scales,
            value_scales,
            r.tables[chunk],
            head,
            row,
            rows,
            r.positions[row] + 1,
            job.sizes.head_dim,
            s.scores[crew.member],
            s.total[crew.member],
            s.most[crew.member, 0],
            s.most[crew.member, 1],
            s.panel[crew.member],
            s.attended.values,
        )


@numba.njit(nogil=True, inline="always")
def _encode(job: Job, x: Input, inner: int, crew: Crew, phase: int) -> None:
    if job.sizes.encodes:
        for row in tasks(crew, phase, len(job.rows.tokens)):
            encode_row(x, row, inner)


@numba.njit(nogil=True, inline="always")
def _add_product(
    job: Job, x: Input, layer: int, part: int, inner: int, bias: int, crew: Crew, phase: int
) -> None:
    """Add x (rows, inner) times a matrix to the residual stream; its biases begin at `bias`."""
    s, hidden, all_rows = job.scratch, job.sizes.hidden, len(job.rows.tokens)
    tile, panel, total = s.tile[crew.member, 0], s.panel[crew.member], _tiles(hidden)
    where, biases = job.weights.where[layer, part], job.weights.biases
    for task in tasks(crew, phase, total * _bands(all_rows)):
        row, number = task // total * BAND, task % total
        rows, count = min(BAND, all_rows - row), min(TILE, hidden - number * TILE)
        _product(job, x, where, inner, number, row, rows, tile, panel)
        _add_bias(biases, layer, bias + number * TILE, tile, rows, count)
        for r in range(rows):
            for i in range(count):
                s.x[row + r, number * TILE + i] += tile[r, i]


@numba.njit(nogil=True, fastmath=True)
def _gate_tile(
    gate: Floats, up: Floats, row: int, rows: int, out: Floats, at: int, count: int
) -> None:
    """SwiGLU: out[row..row + rows, at..at + count] = silu(gate) * up."""
    for r in range(rows):
        for i in range(count):
            g = gate[r, i]
            e = exp(-abs(g))
            sigmoid = np.float32(1.0) / (np.float32(1.0) + e)
            if g < 0:
                sigmoid = e * sigmoid
            out[row + r, at + i] = g * sigmoid * up[r, i]


@numba.njit(nogil=True, inline="always")
def _gate_up(job: Job, layer: int, bias: int, crew: Crew, phase: int) -> None:
    s, n, all_rows = job.scratch, job.sizes, len(job.rows.tokens)
    gate, up, panel = s.tile[crew.member, 0], s.tile[crew.member, 1], s.panel[crew.member]
    gates, ups = job.weights.where[layer, GATE], job.weights.where[layer, UP]
    biases = job.weights.biases
    total = _tiles(n.intermediate)
    for task in tasks(crew, phase, total * _bands(all_rows)):
        row, number = task // total * BAND, task % total
        rows, count = min(BAND, all_rows - row), min(TILE, n.intermediate - number * TILE)
        _product(job, s.normed, gates, n.hidden, number, row, rows, gate, panel)
        _product(job, s.normed, ups, n.hidden, number, row, rows, up, panel)
        _add_bias(biases, layer, bias + number * TILE, gate, rows, count)
        _add_bias(biases, layer, bias + n.intermediate + number * TILE, up, rows, count)
        _gate_tile(gate, up, row, rows, s.inner.values, number * TILE, count)


@numba.njit(nogil=True, inline="always")
def _norm_sampled(job: Job, number: int, crew: Crew, phase: int) -> None:
    s, weight = job.scratch, job.weights.norms[number]
    for sample in tasks(crew, phase, len(job.rows.sampled)):
        row = job.rows.sampled[sample]
        _norm_row(s.x[row], weight, job.sizes.norm_eps, s.normed.values[sample])
        if job.sizes.encodes:
            encode_row(s.normed, sample, job.sizes.hidden)


@numba.njit(nogil=True, inline="always")
def _head(job: Job, crew: Crew, phase: int) -> None:
    s, n, samples = job.scratch, job.sizes, len(job.rows.sampled)
    tile, panel, total = s.tile[crew.member, 0], s.panel[crew.member], _tiles(n.vocabulary)
    for task in tasks(crew, phase, total * _bands(samples)):
        row, number = task // total * BAND, task % total
        rows, count = min(BAND, samples - row), min(TILE, n.vocabulary - number * TILE)
        _product(job, s.normed, job.weights.ends[1], n.hidden, number, row, rows, tile, panel)
        for r in range(rows):
            for i in range(count):
                job.logits[row + r, number * TILE + i] = tile[r, i]


@numba.njit(nogil=True, cache=True)
def run_step(crew: Crew, job: Job) -> None:
    """Take part in one step."""
    if not enter(crew):
        return
    n, s = job.sizes, job.scratch
    attended = n.heads * n.head_dim
    out_bias = attended + 2 * n.kv_heads * n.head_dim
    gate_bias = out_bias + n.hidden
    down_bias = gate_bias + 2 * n.intermediate
    _embed(job, crew, 0)
    for i in range(n.layers):
        phase = 1 + LAYER_PHASES * i
        _norm(job, 2 * i, crew, phase)
        _project(job, i, crew, phase + 1)
        _store(job, i, crew, phase + 2)
        _attend(job, i, crew, phase + 3)
        _encode(job, s.attended, attended, crew, phase + 4)
        _add_product(job, s.attended, i, OUT, attended, out_bias, crew, phase + 5)
        _norm(job, 2 * i + 1, crew, phase + 6)
        _gate_up(job, i, gate_bias, crew, phase + 7)
        _encode(job, s.inner, n.intermediate, crew, phase + 8)
        _add_product(job, s.inner, i, DOWN, n.intermediate, down_bias, crew, phase + 9)
    if len(job.rows.sampled):
        phase = 1 + LAYER_PHASES * n.layers
        _norm_sampled(job, 2 * n.layers, crew, phase)
        _head(job, crew, phase + 1)
    leave(crew)
