"""The projections of a layer and the head: which thread multiplies which rows and channels.

A task is a band of rows times a tile of channels.
"""

from collections.abc import Iterator

import numba

from cloud.engine.cpu.curves import gate_rows
from cloud.engine.cpu.job import (
    AT,
    BAND,
    FORM,
    GATE,
    TILE_BYTES,
    UP,
    Floats,
    Job,
    K,
    Q,
    Room,
    Where,
)
from cloud.engine.cpu.lora import expand
from cloud.engine.cpu.matmul import Bytes, Input, multiply
from cloud.engine.cpu.phases import Crew, tasks
from cloud.engine.cpu.simd import TILE


@numba.njit(nogil=True)
def _tiles(channels: int) -> int:
    return (channels + TILE - 1) // TILE


@numba.njit(nogil=True)
def _tile_tasks(crew: Crew, phase: int, rows: int, tiles: int) -> Iterator[tuple[int, int, int]]:
    """Yield this member's tasks of a phase: first row, rows, number of the tile."""
    bands = (rows + BAND - 1) // BAND
    for task in tasks(crew, phase, tiles * bands):
        row = task // tiles * BAND
        yield row, min(BAND, rows - row), task % tiles


@numba.njit(nogil=True)
def _product(
    data: Bytes,
    where: Where,
    number: int,
    x: Input,
    row: int,
    rows: int,
    out: Floats,
    panel: Floats,
) -> None:
    """Set `out` (rows, TILE) to rows of x times tile `number` of a matrix."""
    at = where[AT] + number * where[TILE_BYTES]
    multiply(x, row, rows, data, where[FORM], at, out, panel)


@numba.njit(nogil=True)
def _add_bias(biases: Floats, layer: int, at: int, tile: Floats, rows: int, count: int) -> None:
    if len(biases):
        for r in range(rows):
            for i in range(count):
                tile[r, i] += biases[layer, at + i]


@numba.njit(nogil=True, inline="always")
def project(job: Job, layer: int, rows: int, room: Room, crew: Crew, phase: int) -> None:
    """Set qkv to the normed rows times q, k and v."""
    w, x, qkv, lora = job.weights, job.scratch.normed, job.scratch.qkv, job.lora
    data, where, biases, channels = w.data, w.where[layer], w.biases, w.channels
    tile, panel, adapted = room.tile, room.panel, len(lora.runs) > 0
    q_tiles, kv_tiles = _tiles(channels[1]), _tiles(channels[2] - channels[1])
    for row, some, task in _tile_tasks(crew, phase, rows, q_tiles + 2 * kv_tiles):
        part, number = Q, task
        if task >= q_tiles:
            part, number = K + (task - q_tiles) // kv_tiles, (task - q_tiles) % kv_tiles
        _product(data, where[part], number, x, row, some, tile, panel)
        if adapted:
            expand(lora, layer, part, part, row, some, number, tile)
        column = channels[part] + number * TILE
        count = min(TILE, channels[part + 1] - column)
        _add_bias(biases, layer, column, tile, some, count)
        for r in range(some):
            for i in range(count):
                qkv[row + r, column + i] = tile[r, i]


@numba.njit(nogil=True, inline="always")
def add_product(
    job: Job, layer: int, part: int, x: Input, rows: int, room: Room, crew: Crew, phase: int
) -> None:
    """Add x times a projection back to hidden size to the residual stream."""
    w, out, lora = job.weights, job.scratch.x, job.lora
    data, where, biases, bias = w.data, w.where[layer, part], w.biases, w.channels[part]
    tile, panel, adapted = room.tile, room.panel, len(lora.runs) > 0
    channels = out.shape[1]
    for row, some, number in _tile_tasks(crew, phase, rows, _tiles(channels)):
        count = min(TILE, channels - number * TILE)
        _product(data, where, number, x, row, some, tile, panel)
        if adapted:
            expand(lora, layer, part, 0, row, some, number, tile)
        _add_bias(biases, layer, bias + number * TILE, tile, some, count)
        for r in range(some):
            for i in range(count):
                out[row + r, number * TILE + i] += tile[r, i]


@numba.njit(nogil=True, inline="always")
def gate_up(job: Job, layer: int, rows: int, room: Room, crew: Crew, phase: int) -> None:
    """Set `inner` to the gated products of the normed rows with gate and up."""
    w, x, out, lora = job.weights, job.scratch.normed, job.scratch.inner.values, job.lora
    data, gates, ups, biases = w.data, w.where[layer, GATE], w.where[layer, UP], w.biases
    gate, up, panel, adapted = room.tile, room.up, room.panel, len(lora.runs) > 0
    channels, bias = out.shape[1], w.channels[GATE]
    for row, some, number in _tile_tasks(crew, phase, rows, _tiles(channels)):
        column, count = number * TILE, min(TILE, channels - number * TILE)
        _product(data, gates, number, x, row, some, gate, panel)
        _product(data, ups, number, x, row, some, up, panel)
        if adapted:
            expand(lora, layer, GATE, 0, row, some, number, gate)
            expand(lora, layer, UP, 1, row, some, number, up)
        _add_bias(biases, layer, bias + column, gate, some, count)
        _add_bias(biases, layer, bias + channels + column, up, some, count)
        gate_rows(some, gate, up)
        for r in range(some):
            for i in range(count):
                out[row + r, column + i] = gate[r, i]


@numba.njit(nogil=True, inline="always")
def head(job: Job, room: Room, crew: Crew, phase: int) -> None:
    """Set the logits of the rows that are sampled: the first of the normed ones."""
    data, where, x = job.weights.data, job.weights.ends[1], job.scratch.normed
    tile, panel, logits = room.tile, room.panel, job.logits
    rows, words = logits.shape
    for row, some, number in _tile_tasks(crew, phase, rows, _tiles(words)):
        _product(data, where, number, x, row, some, tile, panel)
        for r in range(some):
            for i in range(min(TILE, words - number * TILE)):
                logits[row + r, number * TILE + i] = tile[r, i]
