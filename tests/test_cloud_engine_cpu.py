"""The compiled step: every loop against its naive twin, and the same bits in any company."""

import os
import time
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numba
import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cloud.engine import cpu
from cloud.engine.batch import Batch, Chunk
from cloud.engine.cache import BLOCK, KVCache
from cloud.engine.cpu import codes as code_loops
from cloud.engine.cpu import curves, matmul, simd
from cloud.engine.cpu.features import HAS_AMX
from cloud.engine.cpu.matmul import AMX_ROWS, PANEL, PANEL_ROOM, Input, decode, encode_row, multiply
from cloud.engine.cpu.model import pack_model
from cloud.engine.cpu.phases import Crew, counters_for, enter, leave, tasks
from cloud.engine.cpu.runner import CpuRunner
from cloud.engine.cpu.simd import GROUP, TILE
from cloud.engine.cpu.team import Team
from cloud.engine.cpu.tiles import Form, form_of, pack, tile_bytes
from cloud.engine.reference.model import build_model
from cloud.engine.reference.runner import ReferenceRunner
from cloud.engine.sequence import Sequence
from shared.nn.checkpoint import Checkpoint, load_checkpoint
from shared.nn.weights import Weight
from tests.small_llama import random_llama, write_folder, write_gguf

Floats = NDArray[np.float32]
KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q5_0]


def weight(kind: Kind, channels: int, inner: int) -> Weight:
    values = np.random.default_rng(channels).standard_normal((channels, inner)).astype(np.float32)
    return Weight(kind.name, gguf.quantize(values, kind), (channels, inner))


def unpacked(packed: NDArray[np.uint8], form: Form, channels: int, inner: int) -> Floats:
    """Return the matrix (channels, inner) that tiles stand for."""
    panel = np.zeros((PANEL_ROOM, TILE), np.float32)
    out = np.zeros((len(packed) * TILE, inner), np.float32)
    for tile in range(len(packed)):
        for k in range(0, inner, PANEL):
            depth = min(PANEL, inner - k)
            decode(packed.reshape(-1), int(form), tile * packed.shape[1], k, depth, panel)
            out[tile * TILE : (tile + 1) * TILE, k : k + depth] = panel[:depth].T
    assert not out[channels:].any()
    return out[:channels]


def activations(values: Floats) -> Input:
    rows, inner = values.shape
    groups = np.zeros((2, rows, inner // GROUP), np.float32)
    codes = np.zeros((rows + AMX_ROWS, inner), np.int16)
    x = Input(values, codes, groups[0], groups[1])
    for row in range(rows):
        encode_row(x, row, inner)
    return x


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tiles_stand_for_the_values_of_their_file(kind: Kind) -> None:
    stored = weight(kind, 37, 320)
    form = form_of(stored)
    packed = pack(stored, form)
    assert packed.shape == (3, tile_bytes(form, 320))
    expected = stored.dense().numpy()
    tolerance = 2**-8 if kind == Kind.Q5_0 else 1e-6  # there is no form for it: bfloat16
    np.testing.assert_allclose(unpacked(packed, form, 37, 320), expected, tolerance, 1e-6)


def test_floats_are_laid_out_in_the_form_that_is_asked_for() -> None:
    stored = weight(Kind.Q4_1, 16, 64)
    assert form_of(stored, Form.F32) == Form.F32
    assert form_of(Weight("Q8_0", stored.data, (16, 40))) == Form.BF16  # no whole groups
    packed = pack(stored, Form.F32)
    np.testing.assert_array_equal(unpacked(packed, Form.F32, 16, 64), stored.dense().numpy())


@pytest.mark.parametrize("kind", KINDS[:-1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("inner", [32, 288, 576])
def test_a_product_is_the_naive_one_and_its_rows_do_not_know_each_other(
    kind: Kind, inner: int
) -> None:
    stored = weight(kind, TILE, inner)
    form = form_of(stored)
    packed = pack(stored, form).reshape(-1)
    rng = np.random.default_rng(inner)
    values = (rng.standard_normal((70, inner)) * rng.choice((0.01, 1, 30), (70, 1))).astype("f4")
    x, panel = activations(values), np.zeros((PANEL_ROOM, TILE), np.float32)
    whole = np.empty((70, TILE), np.float32)
    multiply(x, 0, 70, packed, int(form), 0, whole, panel)
    naive = values.astype(np.float64) @ stored.dense().numpy().astype(np.float64).T
    scale = np.abs(values).max(1, keepdims=True) * np.sqrt(inner)
    assert (np.abs(whole - naive) / scale).max() < 2e-4
    some = np.empty_like(whole)
    for rows in range(1, 34):
        multiply(x, 3, rows, packed, int(form), 0, some, panel)
        np.testing.assert_array_equal(some[:rows], whole[3 : 3 + rows])


def test_activation_codes_are_within_half_a_step_and_zeros_stay_zero() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((4, 96)).astype("f4")
    values[2] = 0
    values[3, 7] = 1e30
    x = activations(values)
    steps = np.repeat(x.scales, GROUP, axis=1)
    codes = x.codes[: len(values)]
    assert (np.abs(codes * steps - values) <= steps * 0.501).all()
    np.testing.assert_array_equal(x.sums, codes.reshape(4, -1, GROUP).sum(-1, dtype=np.int64))


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_processors_without_vector_products_of_pairs_get_the_same_sums(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simd, "FEATURES", {})
    plain, fast = code_loops._make_dot_codes(form), getattr(code_loops, f"dot_{form}")

    def program(dot: Any) -> Any:
        @numba.njit
        def run(x: Input, w: NDArray[np.uint8], groups: int, panel: Floats, out: Floats) -> None:
            c, s, t = x.codes, x.scales, x.sums
            n = s.shape[1]
            dot(3, c, 0, c.shape[1], s, t, 0, n, w, 0, groups, panel, out, 0, 16)

        return run

    stored = weight(Kind.Q4_1 if form == "int4" else Kind.Q8_0, TILE, 96)
    packed = pack(stored, form_of(stored)).reshape(-1)
    x = activations(np.random.default_rng(1).standard_normal((3, 96)).astype("f4"))
    panel, outs = np.zeros((PANEL, TILE), np.float32), np.zeros((2, 3, TILE), np.float32)
    program(plain)(x, packed, 3, panel, outs[0])
    monkeypatch.undo()
    program(fast)(x, packed, 3, panel, outs[1])
    np.testing.assert_array_equal(outs[0], outs[1])
    assert outs.any()


def test_exponentials_are_right_to_a_few_units_in_the_last_place() -> None:
    @numba.vectorize(["float32(float32)"])
    def exp(x: np.float32) -> np.float32:
        return simd.exp(x)

    x = np.linspace(-86, 0, 200_001, dtype=np.float32)
    np.testing.assert_allclose(exp(x), np.exp(x.astype(np.float64)), rtol=4e-7)
    assert exp(np.float32(0)) == 1
    assert exp(np.float32(-1e30)) < 1e-37


@pytest.mark.skipif(not HAS_AMX, reason="no matrix unit (AMX) here")
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("inner", [32, 288, 576])
def test_the_matrix_unit_gives_the_bits_of_the_vector_unit(
    kind: Kind, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = weight(kind, TILE, inner)
    form = form_of(stored)
    packed = pack(stored, form).reshape(-1)
    rng = np.random.default_rng(inner)
    x = activations((rng.standard_normal((70, inner)) * 5).astype("f4"))
    panel, outs = np.zeros((PANEL_ROOM, TILE), np.float32), np.zeros((2, 80, TILE), np.float32)
    by_vectors = matmul._multiply_codes.py_func
    monkeypatch.setattr(matmul, "HAS_AMX", False)
    for rows in (1, AMX_ROWS, 17, 48, 70):
        outs[:] = 0
        numba.njit(by_vectors)(x, 0, rows, packed, int(form), 0, inner, outs[0], panel)
        matmul._multiply_codes_amx(x, 0, rows, packed, int(form), 0, outs[1], panel)
        np.testing.assert_array_equal(outs[0, :rows], outs[1, :rows])
        assert outs[0, :rows].any()


def test_gates_and_softmax_weights_are_right_to_a_few_units_in_the_last_place() -> None:
    @numba.njit
    def gate(x: Floats, up: Floats) -> None:
        curves.gate_rows(len(x), x, up)

    @numba.njit
    def soften(scores: Floats, visible: int, top: float) -> tuple[float, float]:
        return curves.soften(scores, 0, visible, len(scores), np.float32(top))  # type: ignore[return-value]

    rng = np.random.default_rng(3)
    x, up = (rng.standard_normal((50, TILE)).astype("f4") * 9 for _ in range(2))
    x[0, :3] = 0, 200, -200
    exact = x.astype("f8") / (1 + np.exp(-x.astype("f8"))) * up
    gate(x, up)
    np.testing.assert_allclose(x, exact, rtol=1e-6, atol=1e-30)
    for visible in range(65):
        scores = rng.standard_normal(64).astype("f4") * 20
        seen = scores[:visible].astype("f8")
        top = max([-3.0, *seen])
        weights = np.zeros(64)
        weights[:visible] = np.exp(seen - top)
        most, mass = soften(scores, visible, -3.0)
        assert most == np.float32(top)
        np.testing.assert_allclose(scores, weights, rtol=4e-6, atol=1e-30)
        np.testing.assert_allclose(mass, weights.sum(), rtol=1e-5)


def test_programs_of_other_versions_are_forgotten_after_a_month(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, days in (("old", 31), ("recent", 3), ("mine", 90)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program").write_text("")
        then = time.time() - days * 86400
        os.utime(tmp_path / name, (then, then))
    monkeypatch.setattr(cpu, "COMPILED", tmp_path / "mine")
    cpu.forget_old_programs()
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["mine", "recent"]


# --- phases and teams


@numba.njit(nogil=True)
def count_tasks(crew: Crew, totals: NDArray[np.int64], done: NDArray[np.int64]) -> None:
    if not enter(crew):
        return
    for phase in range(len(totals)):
        for task in tasks(crew, phase, totals[phase]):
            done[phase, task] += 1
    leave(crew)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_team_does_every_task_of_every_phase_once(size: int) -> None:
    team = Team(size)
    totals = np.array([1, 0, 7, 400, 3, 64] * 20)
    for _ in range(30):
        done = np.zeros((len(totals), 400), np.int64)
        team.run(count_tasks, len(totals), totals, done)
        np.testing.assert_array_equal(done, np.arange(400) < totals[:, None])
    team.close()


def test_a_helper_that_comes_too_late_touches_nothing() -> None:
    totals, counters = np.array([5]), counters_for(1)
    done = np.zeros((1, 5), np.int64)
    count_tasks(Crew(0, 2, counters.ctypes.data), totals, done)
    count_tasks(Crew(1, 2, counters.ctypes.data), totals, done)
    assert done.tolist() == [[1] * 5]


# --- the whole step


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("models")
    paths: dict[str, Path] = {
        kind.name: write_gguf(folder / f"{kind.name}.gguf", random_llama(), kind=kind)
        for kind in (Kind.Q4_1, Kind.Q8_0)
    }
    paths["biased"] = write_folder(
        folder / "biased", random_llama(tied=False, bias=True), attention_bias=True
    )
    return {name: load_checkpoint(path) for name, path in paths.items()}


def chunks(rng: Random, shapes: list[tuple[int, int]], num_blocks: int) -> Batch:
    """Chunks of (context, count), with their blocks scattered over the cache."""
    blocks = rng.sample(range(num_blocks), num_blocks)
    made: list[Chunk] = []
    for number, (context, count) in enumerate(shapes):
        table = [blocks.pop() for _ in range(-(-context // BLOCK))]
        ids = [rng.randrange(3, 500) for _ in range(context)]
        owner = Sequence(number, ids, context - count, table)
        made.append(Chunk(owner, context - count, count, True))
    return Batch(tuple(made))


def whole(batch: Batch) -> Batch:
    """The same sequences from their first token on."""
    return Batch(tuple(Chunk(c.sequence, 0, c.start + c.count, True) for c in batch.chunks))


def runner(
    checkpoint: Checkpoint, form: Form | None, dtype: torch.dtype, threads: int = 2
) -> CpuRunner:
    cache = KVCache(checkpoint.config, 60, dtype, torch.device("cpu"))
    return CpuRunner(pack_model(checkpoint, 256, form), cache, Team(threads), 600)


RAGGED = [(1, 1), (16, 1), (17, 3), (100, 16), (90, 40), (33, 2), (128, 1), (128, 128)]


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "biased"])
def test_a_step_is_its_naive_twin(checkpoints: dict[str, Checkpoint], name: str) -> None:
    checkpoint = checkpoints[name]
    batch = whole(chunks(Random(1), RAGGED, 60))
    cache = KVCache(checkpoint.config, 60, torch.float32, torch.device("cpu"))
    model = build_model(checkpoint, torch.float32, torch.device("cpu"), 256)
    expected = ReferenceRunner(model, cache).run(batch)
    spread = float(expected.std())
    exact = runner(checkpoint, Form.F32, torch.float32).run(batch)
    assert float((exact - expected).abs().max()) < 1e-4 * spread
    fast = runner(checkpoint, None, torch.bfloat16).run(batch)
    assert float((fast - expected).abs().max()) < 0.1 * spread
    codes = runner(checkpoint, None, torch.int8).run(batch)
    assert float((codes - expected).abs().max()) < 0.3 * spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_a_token_has_the_same_logits_however_it_was_reached(
    checkpoints: dict[str, Checkpoint], dtype: torch.dtype, seed: int
) -> None:
    rng = Random(seed)
    checkpoint = checkpoints[rng.choice(("Q4_1", "Q8_0", "biased"))]
    shapes = [(rng.randrange(1, 129), 1) for _ in range(4)]
    batch = whole(chunks(rng, shapes, 60))
    at_once = runner(checkpoint, None, dtype, 1).run(batch).clone()
    pieces = runner(checkpoint, None, dtype)
    have = [0] * 4
    last: dict[int, torch.Tensor] = {}
    while any(h < context for h, (context, _) in zip(have, shapes, strict=True)):
        some: list[tuple[int, Chunk]] = []
        for i in rng.sample(range(4), rng.randrange(1, 5)):
            left = shapes[i][0] - have[i]
            count = min(left, rng.choice((1, 1, 2, 7, 30)))
            if count:
                some.append((i, Chunk(batch.chunks[i].sequence, have[i], count, count == left)))
                have[i] += count
        if some:
            logits = pieces.run(Batch(tuple(chunk for _, chunk in some)))
            sampled = [i for i, chunk in some if chunk.sample]
            last |= {i: row.clone() for i, row in zip(sampled, logits, strict=True)}
    for i in range(4):
        assert torch.equal(last[i], at_once[i])


def test_attention_is_the_textbook_one(checkpoints: dict[str, Checkpoint]) -> None:
    from cloud.engine.cpu.attention import CHUNK, PART, attend

    rng = np.random.default_rng(2)
    kv_heads, group, dim, width, rows = 2, 3, 24, 32, 20
    keys, values = (rng.standard_normal((kv_heads, 100, dim)).astype("f4") for _ in range(2))
    paged_keys = np.zeros((9, kv_heads, width, BLOCK), np.float32)
    paged_values = np.zeros((9, kv_heads, BLOCK, width), np.float32)
    table = np.array([4, 2, 8, 0, 6, 1, 3], np.int32)
    for p in range(100):
        paged_keys[table[p // BLOCK], :, :dim, p % BLOCK] = keys[:, p]
        paged_values[table[p // BLOCK], :, p % BLOCK, :dim] = values[:, p]
    q = np.zeros((kv_heads, rows, group, width), np.float32)
    q[..., :dim] = rng.standard_normal((kv_heads, rows, group, dim)) * dim**-0.5
    out = np.zeros((rows, kv_heads * group * dim), np.float32)
    room, none = np.zeros((3, PART * group, 64), np.float32), np.zeros((0, kv_heads, BLOCK), "f4")
    scores = np.zeros((PART * group, CHUNK), np.float32)
    total = np.zeros((PART * group, width), np.float32)
    panel = np.zeros((PANEL_ROOM, TILE), np.float32)
    for first in range(0, rows, PART):
        for head in range(kv_heads):
            attend(
                q, paged_keys, paged_values, none, none, table, head, first,
                min(PART, rows - first), 81 + first, dim, scores, total, room[0, :, 0].copy(),
                room[1, :, 0].copy(), panel, out,
            )  # fmt: skip
    mask = torch.arange(100) < torch.arange(81, 81 + rows).unsqueeze(1)
    folded = torch.from_numpy(q[..., :dim]).permute(0, 2, 1, 3) * dim**0.5
    expected = nnf.scaled_dot_product_attention(
        folded,
        torch.from_numpy(keys).unsqueeze(1),
        torch.from_numpy(values).unsqueeze(1),
        attn_mask=mask,
    )
    np.testing.assert_allclose(
        out.reshape(rows, kv_heads, group, dim),
        expected.permute(2, 0, 1, 3).numpy(),
        rtol=1e-4,
        atol=1e-5,
    )
