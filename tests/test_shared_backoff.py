"""Full jitter within doubling bounds; kicks are forgiven only after a healthy while."""

from random import Random

import pytest

from shared.backoff import Backoff


class Highest(Random):
    """Draws the upper bound, so that a test sees the bounds themselves."""

    def uniform(self, a: float, b: float) -> float:
        assert a == 0
        return b


def test_the_bound_doubles_from_the_base_up_to_the_cap() -> None:
    backoff = Backoff(Highest(), base=0.5, out_of_reach=5.0)
    assert [backoff.delay(float(n)) for n in range(6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_every_delay_is_spread_over_the_whole_bound() -> None:
    draws = []
    for seed in range(400):
        backoff = Backoff(Random(seed), base=1.0)
        draws.append([backoff.delay(0.0), backoff.delay(0.0)])
    for column, bound in zip(zip(*draws, strict=True), (1.0, 2.0), strict=True):
        assert 0 <= min(column) < bound / 10
        assert bound * 0.9 < max(column) <= bound
        assert bound * 0.4 < sum(column) / len(column) < bound * 0.6


def test_a_connection_that_is_kicked_soon_after_success_forgives_nothing() -> None:
    backoff, now = Backoff(Highest(), base=0.25, healthy=30.0), 100.0
    delays = []
    for _ in range(8):
        backoff.connected(now)
        delays.append(backoff.delay(now + 4.9))
        now += 4.9 + delays[-1]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    backoff.connected(now)
    assert backoff.delay(now + 29.9) == 30.0, "kicks are forgotten after a healthy while only"
    backoff.connected(now)
    assert backoff.delay(now + 30.0) == 0.25


def test_whoever_was_out_of_reach_is_soon_back_and_then_starts_from_the_base() -> None:
    backoff = Backoff(Highest(), base=0.25)
    assert [backoff.delay(float(n)) for n in range(7)] == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.connected(100.0)
    assert backoff.delay(110.0) == 0.25


def test_a_healthy_while_starts_the_waits_anew() -> None:
    backoff = Backoff(Highest(), base=0.25, healthy=30.0)
    for _ in range(5):
        backoff.delay(0.0)
    backoff.connected(10.0)
    assert backoff.delay(40.0) == 0.25
    assert backoff.delay(400.0) == 0.5, "a failed try is no healthy while"


def test_a_year_of_failures_neither_overflows_nor_exceeds_the_cap() -> None:
    backoff = Backoff(Highest())
    assert max(backoff.delay(float(n)) for n in range(100_000)) == 5.0
    for n in range(100_000):
        backoff.connected(float(n))
        assert backoff.delay(float(n)) <= 30.0


def test_two_clients_with_one_identity_soon_take_turns_slowly() -> None:
    a, b = Backoff(Random(1)), Backoff(Random(2))
    now, swaps = 0.0, 0
    while now < 300.0:
        for mine in (a, b):  # each takes the other's place, and is kicked at its return
            mine.connected(now)
            now += mine.delay(now + 0.01)
            swaps += 1
    assert swaps < 60


@pytest.mark.parametrize("failures", [0, 1, 1_000])
def test_a_delay_is_never_negative(failures: int) -> None:
    backoff = Backoff(Random(3))
    for _ in range(failures):
        backoff.delay(0.0)
    assert backoff.delay(0.0) >= 0.0
