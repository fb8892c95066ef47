"""What a step reads and writes, as the compiled program sees it."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloud.engine.cpu.matmul import Input

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Where = NDArray[np.int64]

PARTS = ("q", "k", "v", "o", "gate", "up", "down")
Q, K, V, OUT, GATE, UP, DOWN = range(7)
"""Projections of a layer, in `Weights.where` and `Lora.where`."""
FORM, AT, TILE_BYTES = range(3)
"""What `Weights.where` says of a matrix: its form, its first byte, the bytes of a tile."""
BAND = 128
"""Rows that go through a product together: their activations stay in a second-level cache."""


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
    channels: NDArray[np.int64]  # (8,): first channel of each projection among all, and their end
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


class Lora(NamedTuple):
    """The adapters of a batch (`lora`)."""

    runs: NDArray[np.int64]  # (runs, 3): first row, rows, adapter
    where: NDArray[np.int64]  # (adapters, layers, 7, 3)
    shrunk: Floats  # (3, most rows, most rank): A x, of projections that read the same x


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
    lora: Lora
    scratch: Scratch
    logits: Floats  # (sampled rows, vocabulary): the result
