"""One step of the model as one program, run by every member of a team.

A step is a row of phases: embed; then for each layer norm, project q, k and v, store, attend,
project back, norm, gate and up, down; then norm and head of the rows that are sampled. Where there
are adapters, a phase before each projection shrinks what it reads. The tasks of a phase are rows,
tiles of 16 output channels, or parts of sequences to attend.
"""

import numba
import numpy as np

from cloud.engine.cpu.attention import attend, store
from cloud.engine.cpu.job import (
    AT,
    DOWN,
    FORM,
    GATE,
    OUT,
    TILE_BYTES,
    Cache,
    Floats,
    Ints,
    Job,
    Q,
    Room,
    Rows,
    Scratch,
    Sizes,
    Weights,
)
from cloud.engine.cpu.lora import shrink
from cloud.engine.cpu.matmul import PANEL, Input, decode, encode_row
from cloud.engine.cpu.phases import Crew, enter, leave, tasks
from cloud.engine.cpu.projections import add_product, gate_up, head, project
from cloud.engine.cpu.simd import TILE

FIXED_PHASES, LAYER_PHASES = 3, 14


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


@numba.njit(nogil=True, cache=True)
def run_step(crew: Crew, job: Job) -> None:
    """Take part in one step."""
    if not enter(crew):
        return
    n, w, cache, r, s = job.sizes, job.weights, job.cache, job.rows, job.scratch
    room = _room(s, crew.member)
    rows, width = len(r.tokens), n.heads * n.head_dim
    lora, adapted = job.lora, len(job.lora.runs) > 0
    _embed(w, r.tokens, s.x, room.panel, crew, 0)
    for i in range(n.layers):
        phase = 1 + LAYER_PHASES * i
        _norm(s.x, r.all, w.norms[2 * i], n, s.normed, crew, phase)
        if adapted:
            shrink(lora, i, Q, 3, s.normed.values, crew, phase + 1)
        project(job, i, rows, room, crew, phase + 2)
        _store(w, r, cache, i, s, crew, phase + 3)
        _attend(r, cache, i, s.q, room, s.attended.values, n.head_dim, crew, phase + 4)
        _encode(s.attended, rows, n, width, crew, phase + 5)
        if adapted:
            shrink(lora, i, OUT, 1, s.attended.values, crew, phase + 6)
        add_product(job, i, OUT, s.attended, rows, room, crew, phase + 7)
        _norm(s.x, r.all, w.norms[2 * i + 1], n, s.normed, crew, phase + 8)
        if adapted:
            shrink(lora, i, GATE, 2, s.normed.values, crew, phase + 9)
        gate_up(job, i, rows, room, crew, phase + 10)
        _encode(s.inner, rows, n, n.intermediate, crew, phase + 11)
        if adapted:
            shrink(lora, i, DOWN, 1, s.inner.values, crew, phase + 12)
        add_product(job, i, DOWN, s.inner, rows, room, crew, phase + 13)
    if len(r.sampled):
        phase = 1 + LAYER_PHASES * n.layers
        _norm(s.x, r.sampled, w.norms[2 * n.layers], n, s.normed, crew, phase)
        head(job, room, crew, phase + 1)
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
