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
    all: Ints  # (rows,): 0, 1, 2, ...
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
    tiles: Floats  # (threads, 2, BAND, TILE)
    panels: Floats  # (threads, PANEL, TILE)
    scores: Floats  # (threads, PART * group, CHUNK)
    totals: Floats  # (threads, PART * group, width)
    masses: Floats  # (threads, 2, PART * group)


class Room(NamedTuple):
    """One thread's own memory."""

    tile: Floats
    up: Floats
    panel: Floats
    scores: Floats
    total: Floats
    most: Floats
    mass: Floats


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
def _embed(w: Weights, tokens: Ints, x: Floats, panel: Floats, crew: Crew, phase: int) -> None:
    data, where, hidden = w.data, w.ends[0], x.shape[1]
    for row in tasks(crew, phase, len(tokens)):
        token = tokens[row]
        at, column = where[AT] + token // TILE * where[TILE_BYTES], token % TILE
        for k in range(0, hidden, PANEL):
            depth = min(PANEL, hidden - k)
            decode(data, where[FORM], at, k, depth, panel)
            for i in range(depth):
                x[row, k + i] = panel[i, column]


@numba.njit(nogil=True, inline="always")
def _norm(
    x: Floats, rows: Ints, weight: Floats, n: Sizes, out: Input, crew: Crew, phase: int
) -> None:
    """Norm some rows of x into the first rows of `out`."""
    for number in tasks(crew, phase, len(rows)):
        _norm_row(x[rows[number]], weight, n.norm_eps, out.values[number])
        if n.encodes:
            encode_row(out, number, n.hidden)


@numba.njit(nogil=True, inline="always")
def _encode(x: Input, rows: int, n: Sizes, inner: int, crew: Crew, phase: int) -> None:
    if n.encodes:
        for row in tasks(crew, phase, rows):
            encode_row(x, row, inner)


@numba.njit(nogil=True)
def _room(s: Scratch, member: int) -> Room:
    return Room(
        s.tiles[member, 0],
        s.tiles[member, 1],
        s.panels[member],
        s.scores[member],
        s.totals[member],
        s.masses[member, 0],
        s.masses[member, 1],
    )


@numba.njit(nogil=True)
def _tiles(channels: int) -> int:
    return (channels + TILE - 1) // TILE


@numba.njit(nogil=True)
def _bands(rows: int) -> int:
    return (rows + BAND - 1) // BAND


@numba.njit(nogil=True)
def _product(
    data: NDArray[np.uint8],
    where: Where,
    number: int,
    x: Input,
    row: int,
    rows: int,
    out: Floats,
    panel: Floats,
) -> None:
    """Multiply rows of x (rows, inner) with tile `number` of a matrix."""
    at = where[AT] + number * where[TILE_BYTES]
    multiply(x, row, rows, data, where[FORM], at, out, panel)


@numba.njit(nogil=True)
def _add_bias(biases: Floats, layer: int, at: int, tile: Floats, rows: int, count: int) -> None:
    if len(biases):
        for r in range(rows):
            for i in range(count):
                tile[r, i] += biases[layer, at + i]


@numba.njit(nogil=True, inline="always")
def _project(
    w: Weights,
    n: Sizes,
    layer: int,
    x: Input,
    rows: int,
    room: Room,
    qkv: Floats,
    crew: Crew,
    phase: int,
) -> None:
    """Set qkv to x times q, k and v."""
    data, where, biases = w.data, w.where[layer], w.biases
    q_width, kv_width = n.heads * n.head_dim, n.kv_heads * n.head_dim
    q_tiles, kv_tiles = _tiles(q_width), _tiles(kv_width)
    total = q_tiles + 2 * kv_tiles
    for task in tasks(crew, phase, total * _bands(rows)):
        row, number = task // total * BAND, task % total
        some = min(BAND, rows - row)
        part, start, width = Q, 0, q_width
        if number >= q_tiles + kv_tiles:
            part, start, width = V, q_width + kv_width, kv_width
            number -= q_tiles + kv_tiles
        elif number >= q_tiles:
            part, start, width = K, q_width, kv_width
            number -= q_tiles
        _product(data, where[part], number, x, row, some, room.tile, room.panel)
        column, count = start + number * TILE, min(TILE, width - number * TILE)
        _add_bias(biases, layer, column, room.tile, some, count)
        for r in range(some):
            for i in range(count):
                qkv[row + r, column + i] = room.tile[r, i]


@numba.njit(nogil=True, inline="always")
def _store(
    w: Weights, r: Rows, cache: Cache, layer: int, s: Scratch, crew: Crew, phase: int
) -> None:
    """Turn queries and keys by their positions; put keys and values into the cache."""
    keys, values = cache.keys[layer], cache.values[layer]
    key_scales, value_scales = cache.key_scales[layer], cache.value_scales[layer]
    cos, sin, qkv, q, dim = w.cos, w.sin, s.qkv, s.q, 2 * w.cos.shape[1]
    for row in tasks(crew, phase, len(r.positions)):
        position, block, offset = r.positions[row], r.blocks[row], r.offsets[row]
        new = qkv[row], cos[position], sin[position]
        store(*new, keys, values, key_scales, value_scales, block, offset, dim, row, q)


@numba.njit(nogil=True, inline="always")
def _attend(
    r: Rows,
    cache: Cache,
    layer: int,
    q: Floats,
    room: Room,
    out: Floats,
    dim: int,
    crew: Crew,
    phase: int,
) -> None:
    keys, values = cache.keys[layer], cache.values[layer]
    key_scales, value_scales = cache.key_scales[layer], cache.value_scales[layer]
    scores, total, most, mass = room.scores, room.total, room.most, room.mass
    for number in tasks(crew, phase, len(r.tasks)):
        chunk, head, row, rows = r.tasks[number]
        table, context = r.tables[chunk], r.positions[row] + 1
        memory = scores, total, most, mass, room.panel
        where = head, row, rows, context, dim
        attend(q, keys, values, key_scales, value_scales, table, *where, *memory, out)


@numba.njit(nogil=True, inline="always")
def _add_product(
    w: Weights,
    layer: int,
    part: int,
    bias: int,
    x: Input,
    rows: int,
    room: Room,
    out: Floats,
    crew: Crew,
    phase: int,
) -> None:
    """Add x times a matrix to `out`; its biases begin at `bias`."""
    data, where, biases = w.data, w.where[layer, part], w.biases
    channels = out.shape[1]
    total = _tiles(channels)
    for task in tasks(crew, phase, total * _bands(rows)):
        row, number = task // total * BAND, task % total
        some, count = min(BAND, rows - row), min(TILE, channels - number * TILE)
        _product(data, where, number, x, row, some, room.tile, room.panel)
        _add_bias(biases, layer, bias + number * TILE, room.tile, some, count)
        for r in range(some):
            for i in range(count):
                out[row + r, number * TILE + i] += room.tile[r, i]


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
def _gate_up(
    w: Weights,
    layer: int,
    bias: int,
    x: Input,
    rows: int,
    room: Room,
    out: Floats,
    crew: Crew,
    phase: int,
) -> None:
    """Set `out` to the gated products of x with gate and up."""
    data, gates, ups, biases = w.data, w.where[layer, GATE], w.where[layer, UP], w.biases
    channels = out.shape[1]
    total = _tiles(channels)
    for task in tasks(crew, phase, total * _bands(rows)):
        row, number = task // total * BAND, task % total
        some, count = min(BAND, rows - row), min(TILE, channels - number * TILE)
        _product(data, gates, number, x, row, some, room.tile, room.panel)
        _product(data, ups, number, x, row, some, room.up, room.panel)
        _add_bias(biases, layer, bias + number * TILE, room.tile, some, count)
        _add_bias(biases, layer, bias + channels + number * TILE, room.up, some, count)
        _gate_tile(room.tile, room.up, row, some, out, number * TILE, count)


@numba.njit(nogil=True, inline="always")
def _head(w: Weights, x: Input, room: Room, logits: Floats, crew: Crew, phase: int) -> None:
    data, where = w.data, w.ends[1]
    rows, words = logits.shape
    total = _tiles(words)
    for task in tasks(crew, phase, total * _bands(rows)):
        row, number = task // total * BAND, task % total
        some, count = min(BAND, rows - row), min(TILE, words - number * TILE)
        _product(data, where, number, x, row, some, room.tile, room.panel)
        for r in range(some):
            for i in range(count):
                logits[row + r, number * TILE + i] = room.tile[r, i]


@numba.njit(nogil=True, cache=True)
def run_step(crew: Crew, job: Job) -> None:
    """Take part in one step."""
    if not enter(crew):
        return
    n, w, cache, r, s = job.sizes, job.weights, job.cache, job.rows, job.scratch
    room = _room(s, crew.member)
    rows, attended = len(r.tokens), n.heads * n.head_dim
    out_bias = attended + 2 * n.kv_heads * n.head_dim
    gate_bias = out_bias + n.hidden
    down_bias = gate_bias + 2 * n.intermediate
    _embed(w, r.tokens, s.x, room.panel, crew, 0)
    for i in range(n.layers):
        phase = 1 + LAYER_PHASES * i
        _norm(s.x, r.all, w.norms[2 * i], n, s.normed, crew, phase)
        _project(w, n, i, s.normed, rows, room, s.qkv, crew, phase + 1)
        _store(w, r, cache, i, s, crew, phase + 2)
        _attend(r, cache, i, s.q, room, s.attended.values, n.head_dim, crew, phase + 3)
        _encode(s.attended, rows, n, attended, crew, phase + 4)
        _add_product(w, i, OUT, out_bias, s.attended, rows, room, s.x, crew, phase + 5)
        _norm(s.x, r.all, w.norms[2 * i + 1], n, s.normed, crew, phase + 6)
        _gate_up(w, i, gate_bias, s.normed, rows, room, s.inner.values, crew, phase + 7)
        _encode(s.inner, rows, n, n.intermediate, crew, phase + 8)
        _add_product(w, i, DOWN, down_bias, s.inner, rows, room, s.x, crew, phase + 9)
    if len(r.sampled):
        phase = 1 + LAYER_PHASES * n.layers
        _norm(s.x, r.sampled, w.norms[2 * n.layers], n, s.normed, crew, phase)
        _head(w, s.normed, room, job.logits, crew, phase + 1)
    leave(crew)


@numba.njit(nogil=True, cache=True)
def run_attention(crew: Crew, job: Job) -> None:
    """Take part in the attention of a step once more: what it costs alone."""
    if not enter(crew):
        return
    n, cache, r, s = job.sizes, job.cache, job.rows, job.scratch
    room = _room(s, crew.member)
    for i in range(n.layers):
        _attend(r, cache, i, s.q, room, s.attended.values, n.head_dim, crew, i)
    leave(crew)
