"""The engine on a small model, against the naive forward pass; exact mode to the last bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import pytest
import torch

from cloud.decoder import Brain
from cloud.engine.batch import Batch
from cloud.engine.engine import Engine
from cloud.engine.reference.model import build_model
from cloud.engine.sampler import Sampler, distribution
from cloud.engine.sequence import Generation, Sequence
from cloud.engine.tables import evict
from shared.frames import Sampling
from shared.nn.checkpoint import load_checkpoint
from shared.nn.llama import forward
from tests.brains import small_brain, write_model
from tests.small_llama import random_llama


@cache
def model_folder() -> Path:
    return write_model(Path(mkdtemp(prefix="deltarelay-test-")) / "model")


def brain(precision: str, **changes: object) -> Brain:
    return small_brain(model_folder(), precision=precision, **changes)


class Tap:
    """A sampler that keeps every row of logits it sees, by sequence and position."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], torch.Tensor] = {}
        self._sampler = Sampler()

    def draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        for row, sequence in enumerate(sequences):
            self.seen[sequence.number, len(sequence.ids)] = logits[row].clone()
        return self._sampler.draw(logits, sequences)


def tapped(engine: Engine) -> Tap:
    engine._sampler = tap = Tap()  # type: ignore[assignment]
    return tap


def generation(tokens: int, drawn: Callable[[int, str], None] = lambda _t, _w: None) -> Generation:
    return Generation(Sampling(), tokens, frozenset(), drawn)


def run(engine: Engine) -> None:
    while engine.step() is not None:
        engine.check()


def naive_logits(ids: list[int]) -> torch.Tensor:
    checkpoint = load_checkpoint(model_folder())
    weights = {name: weight.dense() for name, weight in checkpoint.weights.items()}
    return forward(checkpoint.config, weights, torch.tensor(ids))[-1]


def some_ids(rng: Random, count: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(count)]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 0.1), ("bf16", 0.5), ("fast", 0.5)])
def test_appends_rewinds_and_replies_in_company_agree_with_the_naive_pass(
    precision: str, tolerance: float
) -> None:
    engine = brain(precision).engine
    tap = tapped(engine)
    rng = Random(3)
    sequences = [engine.add() for _ in range(4)]
    for _ in range(25):
        sequence = rng.choice(sequences)
        keep = rng.randrange(len(sequence.ids) + 1) if rng.random() < 0.4 else len(sequence.ids)
        engine.splice(sequence, keep, some_ids(rng, rng.choice((1, 3, 8, 40))))
        if rng.random() < 0.3:
            engine.generate(sequence, generation(3), 0.0)
            run(engine)
        elif rng.random() < 0.7:
            engine.step()
    assert len(tap.seen) >= 12
    spread = []
    for sequence in sequences:
        engine.generate(sequence, generation(1), 0.0)
        ids = list(sequence.ids)
        run(engine)
        row = tap.seen[sequence.number, len(ids)]
        spread.append(float((row - naive_logits(ids)).abs().max() / naive_logits(ids).std()))
    assert max(spread) < tolerance


def test_exact_mode_agrees_with_the_naive_pass_to_float32() -> None:
    engine = brain("exact").engine
    tap = tapped(engine)
    ids = some_ids(Random(5), 77)
    sequence = engine.add()
    engine.splice(sequence, 0, ids)
    engine.generate(sequence, generation(1), 0.0)
    run(engine)
    torch.testing.assert_close(
        tap.seen[sequence.number, 77], naive_logits(ids), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize(("kind", "tied"), [("qwen2", True), ("qwen2", False), ("llama", False)])
def test_a_folder_with_biases_of_attention_is_served_as_the_naive_pass_has_it(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    model = random_llama(tied=tied, bias=True)
    biased = ("q_proj.bias", "k_proj.bias", "v_proj.bias")  # as Qwen2 has them
    weights = {n: v for n, v in model.weights.items() if ".bias" not in n or n.endswith(biased)}
    write_model(tmp_path / "model", model=replace(model, weights=weights), model_type=kind)
    made = small_brain(tmp_path / "model", precision="exact", context=128)
    tap, ids = tapped(made.engine), some_ids(Random(8), 40)
    sequence = made.engine.add()
    made.engine.splice(sequence, 0, ids)
    made.engine.generate(sequence, generation(3), 0.0)
    run(made.engine)
    dense = {name: weight.dense() for name, weight in made.checkpoint.weights.items()}
    for length in range(40, 43):
        expected = forward(made.checkpoint.config, dense, torch.tensor(sequence.ids[:length]))[-1]
        seen = tap.seen[sequence.number, length]
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-3)


def test_exact_mode_is_bit_identical_however_the_words_arrived() -> None:
    whole = brain("exact").engine
    relayed = brain("exact").engine
    ids = some_ids(Random(1), 90)
    taps = tapped(whole), tapped(relayed)
    one = whole.add()
    whole.splice(one, 0, ids)
    whole.generate(one, generation(20), 0.0)
    run(whole)

    rng = Random(2)
    other, company = relayed.add(), [relayed.add() for _ in range(3)]
    while len(other.ids) < 90 or other.ids[:90] != ids:
        have = len(other.ids)
        if rng.random() < 0.3:  # words that are taken back
            relayed.splice(other, rng.randrange(have + 1), some_ids(rng, 5))
        else:
            keep = next(
                (i for i, (a, b) in enumerate(zip(other.ids, ids, strict=False)) if a != b),
                min(have, 90),
            )
            relayed.splice(other, keep, ids[keep : keep + rng.choice((1, 4, 17))])
        relayed.splice(rng.choice(company), 0, some_ids(rng, 30))
        relayed.step()
    relayed.splice(other, 90, [])
    relayed.generate(other, generation(20), 0.0)
    for sequence in company:
        relayed.generate(sequence, generation(20), 0.0)
    run(relayed)
    assert other.ids == one.ids
    for length in range(90, 110):
        assert torch.equal(taps[0].seen[one.number, length], taps[1].seen[other.number, length])


def test_exact_mode_is_bit_identical_after_eviction() -> None:
    engine = brain("exact").engine
    tap = tapped(engine)
    sequence = engine.add()
    engine.splice(sequence, 0, some_ids(Random(9), 50))
    engine.generate(sequence, generation(30), 0.0)
    run(engine)
    first = dict(tap.seen)
    ids = list(sequence.ids)
    for length in (50, 57, 64, 79):
        evict(engine._pool, sequence)
        sequence.namespace = length  # its own blocks are not to be found
        engine.splice(sequence, 0, ids[:length])
        engine.generate(sequence, generation(1), 0.0)
        run(engine)
        assert torch.equal(first[sequence.number, length], tap.seen[sequence.number, length])


def test_sequences_of_twice_the_cache_all_get_the_reply_they_get_alone() -> None:
    prompts = [some_ids(Random(n), 150) for n in range(6)]
    alone: list[list[int]] = []
    for prompt in prompts:
        engine = brain("exact").engine
        sequence = engine.add()
        engine.splice(sequence, 0, prompt)
        engine.generate(sequence, generation(12), 0.0)
        run(engine)
        alone.append(sequence.ids)
    crowded = brain("exact", context=208, cache_mb=1).engine
    crowded._pool.allocate(crowded.num_free_blocks - 30)  # 480 tokens for 6 × 162
    sequences = [crowded.add() for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        crowded.splice(sequence, 0, prompt)
        crowded.generate(sequence, generation(12), 0.0)
    while crowded.step() is not None:
        pass
    assert [sequence.ids for sequence in sequences] == alone
    assert crowded.num_evictions > 0


def test_a_cancelled_reply_leaves_no_blocks_and_the_sequence_goes_on() -> None:
    engine = brain("fast").engine
    free = engine.num_free_blocks
    sequence = engine.add()
    for _ in range(10):
        engine.splice(sequence, 0, some_ids(Random(4), 30))
        engine.generate(sequence, generation(50), 0.0)
        engine.step()
        engine.step()
        engine.cancel(sequence)
        assert all(not result.drawn for result in iter(engine.step, None))
        engine.check()
    engine.remove(sequence)
    assert engine.num_free_blocks == free


def test_a_first_token_that_is_a_stop_ends_the_reply_with_no_tokens_while_others_go_on() -> None:
    engine = brain("fast").engine
    ended, other = engine.add(), engine.add()
    engine.splice(ended, 0, some_ids(Random(1), 9))
    engine.splice(other, 0, some_ids(Random(2), 9))
    engine.generate(ended, Generation(Sampling(), 5, frozenset(range(600)), lambda _t, _w: None), 0)
    engine.generate(other, generation(5), 0.0)
    reasons: list[str] = []
    while (result := engine.step()) is not None:
        reasons += [drawn.stop for drawn in result.drawn if drawn.stop]
    assert reasons == ["stop", "length"]
    assert (len(ended.ids), len(other.ids)) == (9, 14)


def test_an_append_computes_no_logits() -> None:
    made = brain("fast")
    sampled: list[int] = []
    runner = made.engine.runner
    run_batch = runner.run

    def watch(batch: Batch) -> torch.Tensor:
        logits = run_batch(batch)
        sampled.append(len(logits))
        return logits

    runner.run = watch  # type: ignore[method-assign]
    sequence = made.engine.add()
    made.engine.splice(sequence, 0, some_ids(Random(1), 40))
    run(made.engine)
    assert sampled == [0]
    made.engine.generate(sequence, generation(1), 0.0)
    run(made.engine)
    assert sampled == [0, 1, 0]


def test_a_seeded_draw_depends_on_its_position_only() -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    logits = torch.randn(1, 50)
    sequence = Sequence(0, [1, 2, 3])
    sequence.generation = Generation(sampling, 9, frozenset(), lambda _t, _w: None)
    first = Sampler().draw(logits, [sequence])
    noise = Sampler()
    noise.draw(logits, [sequence])
    assert noise.draw(logits, [sequence]) == first


def test_top_k_top_p_and_min_p_cut_what_they_say() -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0])
    assert (distribution(logits, Sampling(temperature=1.0, top_k=2)) > 0).tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert (distribution(logits, Sampling(temperature=1.0, top_p=0.6)) > 0).sum() == 1
    assert (distribution(logits, Sampling(temperature=1.0, min_p=0.3)) > 0).sum() == 2
    for temperature in (0.01, 1e-30, 1e-300):
        cold = distribution(logits, Sampling(temperature=temperature, top_p=1e-6, min_p=1.0))
        assert cold.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_building_a_model_for_the_gpu_needs_no_cpu_kernels() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    build_model(load_checkpoint(model_folder()), torch.bfloat16, torch.device("cuda"), 128)
