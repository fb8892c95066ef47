"""Step times are learned, and long prompts are cut so that replies keep their pace."""

from random import Random

import pytest

from cloud.engine.batch import Batch, Chunk, keys_of
from cloud.engine.blocks import BlockPool
from cloud.engine.pace import SLOWDOWN
from cloud.engine.scheduler import Scheduler
from cloud.engine.sequence import Generation, Sequence
from cloud.engine.steptime import StepTime
from shared.frames import Sampling


def seconds(rows: int, keys: int, mood: float = 1.0) -> float:
    return mood * (5e-3 + 1.5e-3 * rows + 4e-7 * keys)


def batch(rows: int, context: int) -> Batch:
    return Batch((Chunk(Sequence(0, [0] * (context + rows)), context, rows, False),))


def learned(mood: float = 1.0, times: StepTime | None = None) -> StepTime:
    times, rng = times or StepTime(), Random(1)
    for _ in range(300):
        step = batch(rng.choice((1, 2, 4, 8, 60)), rng.randrange(2000))
        times.observe(step, seconds(step.num_tokens, step.num_keys, mood))
    return times


def test_keys_are_counted_row_by_row() -> None:
    assert keys_of(10, 3) == 11 + 12 + 13
    assert batch(3, 10).num_keys == 36


@pytest.mark.parametrize(("rows", "keys"), [(1, 300), (4, 1000), (100, 50_000)])
def test_a_step_is_predicted_from_those_before(rows: int, keys: int) -> None:
    assert learned().predict(rows, keys) == pytest.approx(seconds(rows, keys), rel=0.02)


def test_predictions_follow_the_machine() -> None:
    times = learned(2.0, learned(1.0))
    assert times.predict(4, 1000) == pytest.approx(seconds(4, 1000, 2.0), rel=0.05)


def test_thousands_of_equal_steps_do_not_spoil_what_was_learned() -> None:
    times = learned()
    for _ in range(20_000):
        times.observe(batch(1, 300), seconds(1, 301))
    assert times.predict(1, 301) == pytest.approx(seconds(1, 301), rel=0.01)
    for _ in range(40):
        step = batch(64, 500)
        times.observe(step, seconds(step.num_tokens, step.num_keys))
    assert times.predict(64, 64 * 532) == pytest.approx(seconds(64, 64 * 532), rel=0.05)


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.4])
def test_noise_in_a_long_run_of_one_shape_does_not_tilt_what_is_known_of_others(
    noise: float,
) -> None:
    times, rng = learned(), Random(2)
    for n in range(3000):
        step = batch(20, n)
        luck = rng.lognormvariate(0, noise) * (2 if rng.random() < 0.05 else 1)
        times.observe(step, seconds(step.num_tokens, step.num_keys, luck))
    for rows, keys in ((1, 300), (8, 2000), (60, 60_000), (500, 130_000)):
        assert 0.6 < times.predict(rows, keys) / seconds(rows, keys) < 1.6


def test_a_longer_step_is_never_predicted_to_be_shorter() -> None:
    times, rng = StepTime(), Random(3)
    for _ in range(200):
        step = batch(rng.randrange(1, 500), rng.randrange(3000))
        times.observe(step, rng.random())
        for rows, keys in ((1, 1), (8, 1000), (200, 30_000)):
            assert 0 <= times.predict(rows, keys) <= times.predict(2 * rows, keys)
            assert times.predict(rows, keys) <= times.predict(rows, 2 * keys)


def replying(number: int, pool: BlockPool, context: int = 100) -> Sequence:
    sequence = Sequence(number, [0] * context, context - 1)
    sequence.blocks = pool.allocate(pool.blocks_for(context))
    sequence.generation = Generation(Sampling(), 99, frozenset(), lambda _t, _w: None)
    return sequence


def test_a_long_prompt_beside_replies_is_cut_to_what_they_can_bear() -> None:
    pool = BlockPool(1000, 16)
    times = learned()
    replies = [replying(n, pool) for n in range(8)]
    prompt = Sequence(9, [1] * 8000)
    scheduler = Scheduler(pool, times)
    for _ in range(30):
        made = scheduler.schedule([*replies, prompt], 0.0)
        assert made is not None
        assert len(made.chunks) == 9
        quiet = seconds(8, 8 * 100)
        took = seconds(made.num_tokens, made.num_keys)
        longest = made.chunks[-1].count
        assert took <= 1.05 * SLOWDOWN * quiet
        assert longest >= 1
        prompt.cached += longest


def test_what_is_drawn_ahead_comes_last_and_waits_when_it_has_its_tokens() -> None:
    pool = BlockPool(100, 16)
    draft, other = replying(0, pool), replying(1, pool)
    assert draft.generation is not None
    draft.generation.pause_at = 2
    made = Scheduler(pool).schedule([draft, other], 0.0)
    assert made is not None
    assert [chunk.sequence.number for chunk in made.chunks] == [1, 0]
    draft.generation.produced = 2
    made = Scheduler(pool).schedule([draft, other], 0.0)
    assert made is not None
    assert [chunk.sequence.number for chunk in made.chunks] == [1]
    draft.generation.pause_at = None
    made = Scheduler(pool).schedule([draft, other], 0.0)
    assert made is not None
    assert len(made.chunks) == 2
