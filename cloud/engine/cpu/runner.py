"""Lays a batch out and runs the step program on a team of threads."""

import math
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from cloud.engine.batch import Batch
from cloud.engine.cache import BLOCK, KVCache
from cloud.engine.cpu.attention import CHUNK, PART
from cloud.engine.cpu.job import BAND, Cache, Job, Lora, Rows, Scratch, Sizes
from cloud.engine.cpu.lora import CpuAdapter, lay_out_adapter, lay_out_runs
from cloud.engine.cpu.matmul import AMX_ROWS, PANEL_ROOM, Input
from cloud.engine.cpu.model import CpuModel
from cloud.engine.cpu.simd import GROUP, LINE, TILE
from cloud.engine.cpu.step import FIXED_PHASES, LAYER_PHASES, run_attention, run_step
from cloud.engine.cpu.team import Team
from shared.adapter import Adapter

Floats = NDArray[np.float32]
Scalar = TypeVar("Scalar", bound=np.generic)
_FLOAT, _CODE = np.dtype(np.float32), np.dtype(np.int16)


FEW_ROWS = 4
"""Most rows of a task of attention in a short chunk: every thread should have some."""


class CpuRunner:
    """The model, its cache and the threads that run it.

    Args:
        most_rows: tokens of the longest step.
        max_rank: of an adapter.
    """

    def __init__(
        self, model: CpuModel, cache: KVCache, team: Team, most_rows: int, max_rank: int = 64
    ) -> None:
        self._model, self.team, self._most_rows = model, team, most_rows
        self._paged = cache
        self._cache = Cache(
            _bits(cache.keys),
            _bits(cache.values),
            cache.key_scales.numpy(),
            cache.value_scales.numpy(),
        )
        self._scratch = _scratch(model.sizes, cache.width, most_rows, team.size)
        self._shrunk = np.zeros((3, most_rows, -(-max_rank // TILE) * TILE), np.float32)
        self._logits = np.empty((0, model.sizes.vocabulary), np.float32)
        self._phases = FIXED_PHASES + LAYER_PHASES * model.sizes.layers

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices: what a step reads."""
        return self._model.weights.data.nbytes

    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits of all chunks' last `num_logits` rows: (rows, vocabulary).

        They are valid until the next run.
        """
        job = self._job(batch)
        self.team.run(run_step, self._phases, job)
        return torch.from_numpy(job.logits)

    def load_adapter(self, adapter: Adapter) -> CpuAdapter:
        """Lay an adapter out that fits the model; any thread may do this."""
        assert adapter.rank <= self._shrunk.shape[2], "the rank is checked where adapters come in"
        return lay_out_adapter(adapter, self._model.sizes.layers)

    def copy_block(self, source: int, target: int) -> None:
        """Copy the keys and values of a block."""
        self._paged.copy(source, target)

    def run_attention(self, batch: Batch) -> None:
        """Run the attention of a batch that was just run once more, for those who time it."""
        self.team.run(run_attention, self._model.sizes.layers, self._job(batch))

    def _job(self, batch: Batch) -> Job:
        rows = lay_out(batch, self._model.sizes.kv_heads)
        assert len(rows.tokens) <= self._most_rows, "the step is longer than its scratch memory"
        return Job(
            self._model.sizes,
            self._model.weights,
            self._cache,
            rows,
            self._lora(batch),
            self._scratch,
            self._room_for(len(rows.sampled)),
        )

    def _lora(self, batch: Batch) -> Lora:
        chunks: list[tuple[int, CpuAdapter | None]] = []
        for chunk in batch.chunks:
            adapter = chunk.sequence.adapter
            assert adapter is None or isinstance(adapter, CpuAdapter), "it was not loaded here"
            chunks.append((chunk.count, adapter))
        return lay_out_runs(chunks, self._shrunk)

    def _room_for(self, samples: int) -> Floats:
        if samples > len(self._logits):
            self._logits = np.empty((samples, self._model.sizes.vocabulary), np.float32)
        return self._logits[:samples]


def was_compiled() -> bool:
    """Tell whether this process had to compile the program rather than load it."""
    return bool(run_step.stats.cache_misses)


def lay_out(batch: Batch, kv_heads: int) -> Rows:
    """Lay the chunks of a batch out as rows."""
    tokens: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    tasks: list[tuple[int, int, int, int]] = []
    sampled: list[int] = []
    for number, chunk in enumerate(batch.chunks):
        first, end = len(tokens), chunk.start + chunk.count
        tokens += chunk.sequence.ids[chunk.start : end]
        places = range(chunk.start, end)
        positions += places
        blocks += [chunk.sequence.blocks[p // BLOCK] for p in places]
        part = _rows_of_a_task(chunk.count)
        tasks += [
            (number, head, row, min(part, len(tokens) - row))
            for row in range(first, len(tokens), part)
            for head in range(kv_heads)
        ]
        sampled += range(len(tokens) - chunk.num_logits, len(tokens))
    width = max(len(chunk.sequence.blocks) for chunk in batch.chunks)
    tables = np.zeros((len(batch.chunks), width), np.int32)
    for number, chunk in enumerate(batch.chunks):
        tables[number, : len(chunk.sequence.blocks)] = chunk.sequence.blocks
    where = np.array(positions, np.int32)
    tasks.sort(key=lambda task: -task[3] * (positions[task[2]] + task[3]))  # the longest first
    return Rows(
        np.array(tokens, np.int32),
        np.arange(len(tokens), dtype=np.int32),
        where,
        np.array(blocks, np.int32),
        where % BLOCK,
        tables,
        np.array(tasks, np.int32),
        np.array(sampled, np.int32),
    )


def _rows_of_a_task(count: int) -> int:
    """Return the rows of a task of attention: where there are few, threads share them evenly."""
    if count > PART:
        return PART
    tasks = -(-count // FEW_ROWS)
    return -(-count // tasks)


def _bits(tensor: torch.Tensor) -> NDArray[np.generic]:
    """Return a tensor's memory; bfloat16 as uint16."""
    raw = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return raw.numpy()


def _scratch(sizes: Sizes, width: int, rows: int, threads: int) -> Scratch:
    group = sizes.heads // sizes.kv_heads

    def room(*shape: int) -> Floats:
        return aligned(shape, _FLOAT)

    return Scratch(
        room(rows, sizes.hidden),
        _input(rows, sizes.hidden),
        room(rows, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim),
        room(sizes.kv_heads, rows, group, width),
        _input(rows, sizes.heads * sizes.head_dim),
        _input(rows, sizes.intermediate),
        room(threads, 2, BAND, TILE),
        room(threads, max(PANEL_ROOM, width), TILE),
        room(threads, PART * group, CHUNK),
        room(threads, PART * group, width),
        room(threads, 2, PART * group),
    )


def _input(rows: int, inner: int) -> Input:
    groups = rows, inner // GROUP
    return Input(
        aligned((rows, inner), _FLOAT),
        aligned((rows + AMX_ROWS, inner), _CODE),  # the matrix unit reads 16 rows, however few
        aligned(groups, _FLOAT),
        aligned(groups, _FLOAT),
    )


def aligned(shape: tuple[int, ...], kind: "np.dtype[Scalar]") -> NDArray[Scalar]:
    """Return zeros that begin with a cache line: a vector never lies across two."""
    size = math.prod(shape) * kind.itemsize
    room = np.zeros(size + LINE, np.uint8)
    return room[-room.ctypes.data % LINE :][:size].view(kind).reshape(shape)
