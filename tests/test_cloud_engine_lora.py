"""Adapters in a step: the program against its naive twin and merged weights, in any company."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud.engine.batch import Batch, Chunk
from cloud.engine.cache import KVCache
from cloud.engine.cpu.job import BAND
from cloud.engine.cpu.lora import lay_out_runs
from cloud.engine.cpu.runner import CpuRunner
from cloud.engine.cpu.simd import ROWS
from cloud.engine.cpu.tiles import Form
from cloud.engine.reference.model import build_model
from cloud.engine.reference.runner import ReferenceRunner
from cloud.engine.sequence import LoadedAdapter
from shared.adapter import Adapter
from shared.nn.checkpoint import Checkpoint, load_checkpoint
from tests.small_adapters import merged, random_adapter
from tests.small_llama import random_llama, write_folder, write_gguf
from tests.test_cloud_engine_cpu import RAGGED, checkpoints, chunks, runner, whole

__all__ = ["checkpoints"]  # a fixture
ADAPTERS = [
    random_adapter(1),
    random_adapter(2, rank=20, scale=-0.25),
    random_adapter(3, rank=1, parts=("v", "down"), layers=[1]),
]


def with_adapters(batch: Batch, adapters: list[LoadedAdapter | None]) -> Batch:
    """The same rows, of sequences that have adapters."""
    return Batch(
        tuple(
            Chunk(replace(c.sequence, adapter=adapter), c.start, c.count, c.sample)
            for c, adapter in zip(batch.chunks, adapters, strict=True)
        )
    )


def picks(seed: int, count: int) -> list[Adapter | None]:
    rng = Random(seed)
    return [rng.choice((None, *ADAPTERS)) for _ in range(count)]


def loaded(
    engine: CpuRunner | ReferenceRunner, wanted: list[Adapter | None]
) -> list[LoadedAdapter | None]:
    known = {id(adapter): engine.load_adapter(adapter) for adapter in ADAPTERS}
    return [known[id(adapter)] if adapter is not None else None for adapter in wanted]


def reference(checkpoint: Checkpoint) -> ReferenceRunner:
    cache = KVCache(checkpoint.config, 60, torch.float32, torch.device("cpu"))
    return ReferenceRunner(build_model(checkpoint, torch.float32, torch.device("cpu"), 256), cache)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=["all", "wide", "few"])
def test_a_step_with_an_adapter_is_that_of_the_merged_weights(
    checkpoints: dict[str, Checkpoint], adapter: Adapter
) -> None:
    checkpoint = checkpoints["biased"]
    batch = whole(chunks(Random(1), RAGGED, 60))
    plain = reference(checkpoint).run(batch)
    expected = reference(merged(checkpoint, adapter)).run(batch)
    spread = float(expected.std())
    assert float((plain - expected).abs().max()) > 0.1 * spread
    for engine in (reference(checkpoint), runner(checkpoint, Form.F32, torch.float32)):
        adapted = with_adapters(batch, [engine.load_adapter(adapter)] * len(RAGGED))
        assert float((engine.run(adapted) - expected).abs().max()) < 1e-4 * spread


def test_an_adapter_means_the_same_for_a_gguf_file_and_a_folder_of_one_model(
    tmp_path: Path,
) -> None:
    folder = load_checkpoint(write_folder(tmp_path / "folder", random_llama()))
    file = load_checkpoint(write_gguf(tmp_path / "model.gguf", random_llama()))
    batch = whole(chunks(Random(1), RAGGED, 60))
    expected = reference(merged(folder, ADAPTERS[0])).run(batch)
    engine = runner(file, Form.F32, torch.float32)
    adapted = with_adapters(batch, [engine.load_adapter(ADAPTERS[0])] * len(RAGGED))
    assert float((engine.run(adapted) - expected).abs().max()) < 1e-4 * float(expected.std())


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "biased"])
def test_a_step_with_several_adapters_is_its_naive_twin(
    checkpoints: dict[str, Checkpoint], name: str
) -> None:
    checkpoint, wanted = checkpoints[name], [*ADAPTERS, None, *ADAPTERS, ADAPTERS[0]]
    batch = whole(chunks(Random(1), RAGGED, 60))
    twin = reference(checkpoint)
    expected = twin.run(with_adapters(batch, loaded(twin, wanted)))
    spread = float(expected.std())
    exact = runner(checkpoint, Form.F32, torch.float32)
    got = exact.run(with_adapters(batch, loaded(exact, wanted)))
    assert float((got - expected).abs().max()) < 1e-4 * spread
    fast = runner(checkpoint, None, torch.bfloat16)
    got = fast.run(with_adapters(batch, loaded(fast, wanted)))
    assert float((got - expected).abs().max()) < 0.1 * spread


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30), dtype=st.sampled_from((torch.float32, torch.bfloat16)))
def test_a_row_has_the_same_bits_in_the_company_of_any_adapters(
    checkpoints: dict[str, Checkpoint], seed: int, dtype: torch.dtype
) -> None:
    rng = Random(seed)
    checkpoint = checkpoints[rng.choice(("Q4_1", "Q8_0", "biased"))]
    shapes = [(rng.choice((1, 5, 40, 128)), 1) for _ in range(5)]
    wanted = picks(seed, 5)
    batch = whole(chunks(rng, shapes, 60))
    together = runner(checkpoint, None, dtype)
    adapted = with_adapters(batch, loaded(together, wanted))
    rows = together.run(adapted).clone()
    for number, chunk in enumerate(adapted.chunks):
        alone = runner(checkpoint, None, dtype, 1)
        adapter = loaded(alone, wanted)[number]
        one = Chunk(replace(chunk.sequence, adapter=adapter), 0, chunk.count - 1, False)
        if one.count:
            alone.run(Batch((one,)))
        last = Chunk(one.sequence, chunk.count - 1, 1, True)
        assert torch.equal(alone.run(Batch((last,)))[0], rows[number])


def test_rows_without_an_adapter_are_what_they_are_without_adapters_beside_them(
    checkpoints: dict[str, Checkpoint],
) -> None:
    batch = whole(chunks(Random(4), RAGGED, 60))
    plain = runner(checkpoints["Q4_1"], None, torch.bfloat16)
    expected = plain.run(batch).clone()
    beside = [None if n % 2 else ADAPTERS[n % 3] for n in range(len(RAGGED))]
    got = plain.run(with_adapters(batch, loaded(plain, beside)))
    for number, adapter in enumerate(beside):
        assert torch.equal(got[number], expected[number]) == (adapter is None)


def test_neighbours_with_one_adapter_are_a_run_within_vectors_and_bands(
    checkpoints: dict[str, Checkpoint],
) -> None:
    engine = runner(checkpoints["Q4_1"], None, torch.bfloat16, 1)
    one, other, _ = loaded(engine, ADAPTERS)
    chunk_list = [(2, None), (1, one), (1, one), (3, other), (200, one), (1, None)]
    lora = lay_out_runs(chunk_list, engine._shrunk)  # type: ignore[arg-type]
    assert lora.runs[:2].tolist() == [[2, 2, 0], [4, 3, 1]]
    covered: list[int] = []
    for first, count, adapter in lora.runs.tolist():
        assert 1 <= count <= ROWS
        assert first // BAND == (first + count - 1) // BAND
        covered += [adapter] * count
    assert covered == [0] * 2 + [1] * 3 + [0] * 200


def test_an_adapter_takes_the_memory_it_says(
    checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    engine = runner(checkpoints["Q4_1"], None, torch.bfloat16, 1)
    small, large = (engine.load_adapter(random_adapter(1, rank=r)).num_bytes for r in (16, 64))
    assert 3.5 < large / small <= 4
