"""Shared prefixes: found when they are equal, never written, never what was taken back."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud.engine.batch import Batch
from cloud.engine.blocks import BlockPool
from cloud.engine.engine import Engine
from cloud.engine.prefix import PrefixIndex
from cloud.engine.scheduler import Scheduler
from cloud.engine.sequence import Generation, Sequence
from cloud.engine.tables import evict
from shared.frames import Sampling
from tests.test_cloud_engine import brain, generation, run, some_ids, tapped

SIZE = 4
WORDS = 6


class HonestRunner:
    """Keeps in every slot what it was computed from: its namespace and all ids up to it.

    So a row that would attend to another sequence's keys, or to old ones, is seen at once.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._slots: dict[tuple[int, int], object] = {}
        self._pool = pool
        self.num_tokens = 0

    def run(self, batch: Batch) -> torch.Tensor:
        for chunk in batch.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            for position in range(end):
                where = sequence.blocks[position // SIZE], position % SIZE
                truth = sequence.namespace, tuple(sequence.ids[: position + 1])
                if position < chunk.start:
                    assert self._slots[where] == truth
                else:
                    if self._slots.get(where) != truth:
                        assert not self._pool.is_shared(where[0]), "a shared block is written"
                    self._slots[where] = truth
            self.num_tokens += chunk.count
        sampled = sum(chunk.sample for chunk in batch.chunks)
        return torch.zeros(sampled, WORDS)

    def copy_block(self, source: int, target: int) -> None:
        for offset in range(SIZE):
            if (source, offset) in self._slots:
                self._slots[target, offset] = self._slots[source, offset]


class RandomSampler:
    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        return [self._rng.randrange(2) for _ in sequences]


def honest_engine(num_blocks: int, seed: int = 0) -> Engine:
    pool = BlockPool(num_blocks, SIZE)
    now = iter(range(1 << 30))
    sampler = RandomSampler(Random(seed))
    scheduler = Scheduler(pool, step_tokens=6, idle_step_tokens=20)
    return Engine(HonestRunner(pool), pool, scheduler, sampler, lambda: float(next(now)))  # type: ignore[arg-type]


def honest(engine: Engine) -> HonestRunner:
    assert isinstance(engine.runner, HonestRunner)
    return engine.runner


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_no_sequence_ever_sees_keys_of_other_ids_whatever_is_taken_back(seed: int) -> None:
    rng = Random(seed)
    engine = honest_engine(rng.choice((8, 14, 40)), seed)
    sequences = [engine.add(rng.choice(("", "", "other"))) for _ in range(4)]
    common = [rng.randrange(2) for _ in range(24)]
    for _ in range(60):
        sequence = rng.choice(sequences)
        match rng.randrange(8):
            case 0 | 1 | 2 if sequence.generation is None:
                begin = common[: rng.randrange(1, 22)]
                keep = rng.randrange(len(sequence.ids) + 1)
                whole = rng.choice((begin, sequence.ids[:keep] + begin[:5]))[:28]
                settled = rng.choice((None, rng.randrange(len(whole) + 1)))
                engine.splice(sequence, 0, whole, settled)
            case 3 if sequence.generation is None and sequence.ids:
                engine.generate(sequence, generation(rng.randrange(1, 4)), 0.0)
            case 4:
                engine.cancel(sequence)
            case 5:
                evict(engine._pool, sequence)
            case 6 if rng.random() < 0.3:
                engine.remove(sequence)
                sequences.remove(sequence)
                sequences.append(engine.add(rng.choice(("", "other"))))
            case _:
                engine.step()
        engine.check()
    run(engine)
    for sequence in sequences:
        engine.remove(sequence)
    engine.check()
    assert engine.num_free_blocks == engine._pool.num_blocks


def prefill(engine: Engine, ids: list[int], namespace: str = "", **options: int) -> Sequence:
    sequence = engine.add(namespace)
    engine.splice(sequence, 0, ids, **options)
    run(engine)
    return sequence


def test_an_equal_beginning_is_run_once() -> None:
    engine = honest_engine(40)
    ids = [1, 0] * 10
    prefill(engine, ids)
    prefill(engine, [*ids, 3, 3])
    assert honest(engine).num_tokens == 20 + 2


def test_a_beginning_stays_known_after_its_sequence_is_gone_until_its_room_is_wanted() -> None:
    engine = honest_engine(10)
    ids = [1, 0] * 10
    engine.remove(prefill(engine, ids))
    assert engine.num_free_blocks == 10
    engine.remove(prefill(engine, ids))
    assert honest(engine).num_tokens == 20
    engine.remove(prefill(engine, [2] * 40))
    prefill(engine, ids)
    assert honest(engine).num_tokens == 20 + 40 + 20


def test_another_namespace_shares_nothing() -> None:
    engine = honest_engine(40)
    prefill(engine, [1] * 12)
    prefill(engine, [1] * 12, "lora")
    assert honest(engine).num_tokens == 24


def test_the_tail_of_a_turn_is_not_shared() -> None:
    engine = honest_engine(40)
    prefill(engine, [1] * 12, settled=8)
    prefill(engine, [1] * 12)
    assert honest(engine).num_tokens == 12 + 4


def test_what_was_taken_back_is_not_found_any_more() -> None:
    engine = honest_engine(40)
    first = prefill(engine, [1] * 16)
    engine.splice(first, 6, [2, 2])
    prefill(engine, [1] * 16)
    assert honest(engine).num_tokens == 16 + 2 + 16 - 4


def test_taking_words_back_inside_a_shared_block_leaves_the_other_its_words() -> None:
    engine = honest_engine(40)
    first = prefill(engine, [1] * 8)
    second = prefill(engine, [1] * 8)
    assert first.blocks == second.blocks
    engine.splice(first, 6, [2, 2])
    run(engine)
    assert honest(engine).num_tokens == 8 + 2
    engine.generate(second, generation(2), 0.0)
    run(engine)  # the runner asserts that it still sees its own keys


def test_a_full_pool_runs_a_few_ids_again_rather_than_copy() -> None:
    engine = honest_engine(2)
    first = prefill(engine, [1] * 8)
    second = prefill(engine, [1] * 8)
    engine.splice(first, 6, [2])
    assert (first.cached, len(first.blocks)) == (4, 1)
    engine.remove(second)
    run(engine)
    assert first.cached == 7


def test_a_reply_always_has_an_id_to_run() -> None:
    engine = honest_engine(40)
    prefill(engine, [1] * 8)
    second = engine.add()
    engine.splice(second, 0, [1] * 8)
    engine.generate(second, Generation(Sampling(), 1, frozenset(), lambda _t, _w: None), 0.0)
    run(engine)
    assert len(second.ids) == 9


def test_dropping_an_entry_drops_what_is_behind_it_only() -> None:
    index = PrefixIndex()
    index.add("", None, [1], 10)
    index.add("", 10, [2], 11)
    index.add("", 11, [3], 12)
    index.add("", 10, [4], 13)
    assert sorted(index.drop(11)) == [11, 12]
    assert index.drop(11) == []
    assert index.find("", 10, [4]) == 13
    index.add("", 10, [2], 14)
    assert len(index) == 3
    with pytest.raises(AssertionError, match="another block"):
        index.add("", 10, [2], 15)


@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_a_reply_behind_a_shared_prefix_has_the_same_logits_to_the_last_bit(
    precision: str,
) -> None:
    engine = brain(precision).engine
    tap = tapped(engine)
    system, turn = some_ids(Random(1), 70), some_ids(Random(2), 9)
    alone = engine.add("alone")
    engine.splice(alone, 0, system + turn)
    engine.generate(alone, generation(6), 0.0)
    run(engine)
    prefill(engine, system)
    shared = engine.add()
    engine.splice(shared, 0, system + turn)
    engine.generate(shared, generation(6), 0.0)
    result = engine.step()
    assert result is not None
    assert result.num_tokens == 70 + 9 - 64
    run(engine)
    assert shared.ids == alone.ids
    for length in range(79, 85):
        one, other = tap.seen[alone.number, length], tap.seen[shared.number, length]
        assert torch.equal(one, other)
