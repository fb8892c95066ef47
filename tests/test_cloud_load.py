"""The colour of a decoder's load follows what waits for its engine."""

import pytest

from cloud.engine.account import Account
from cloud.engine.backlog import Backlog
from cloud.engine.sequence import Lane
from cloud.load import ENTER, LEAVE, LoadGauge
from shared.frames import Load
from tests.engine_model import ModelEngine, seconds

CALM = Backlog(0.0, 0.0)


@pytest.mark.parametrize("what", ["seconds", "held"])
@pytest.mark.parametrize("load", [Load.YELLOW, Load.RED])
def test_a_colour_is_entered_at_one_bound_and_left_at_a_lower_one(what: str, load: Load) -> None:
    def backlog(bound: Backlog, part: float) -> Backlog:
        value = getattr(bound, what) * part
        return Backlog(value, 0.0) if what == "seconds" else Backlog(0.0, value)

    gauge = LoadGauge()
    assert gauge.read(backlog(ENTER[load], 0.99)) < load
    assert gauge.read(backlog(ENTER[load], 1.0)) is load
    assert gauge.read(backlog(LEAVE[load], 1.0)) is load
    assert gauge.read(backlog(LEAVE[load], 0.99)) < load
    assert gauge.read(backlog(ENTER[load], 0.99)) < load, "it is entered at the upper bound again"
    assert gauge.read(CALM) is Load.GREEN


def test_the_time_that_waiting_tokens_take_is_predicted_from_the_steps_so_far() -> None:
    engine = ModelEngine()
    sequence = engine.ask(engine.prefill(Account(), 300), 100).sequence
    while len(sequence.ids) < 360:
        engine.step()
    assert engine.backlog.seconds == 0, "a reply under way does not wait"
    engine.prefill(Account(), 1000)
    engine.prefill(Account(), 200, Lane.BULK)
    engine.prefill(Account(), 5000, Lane.AHEAD)
    one_by_one = sum(seconds(64, 64 * (64 * n + 32)) for n in range(16)) + 3 * seconds(64, 6400)
    assert engine.backlog.seconds == pytest.approx(one_by_one, rel=0.3)


def test_blocks_of_idle_sequences_do_not_count_as_held() -> None:
    engine = ModelEngine(num_blocks=100)
    engine.prefill(Account(), 800)
    while engine.step():
        pass
    assert engine.backlog.held == 0
    engine.ask(engine.prefill(Account(), 400), 50)
    for _ in range(10):
        engine.step()
    assert engine.backlog.held == pytest.approx(0.26, abs=0.02)
