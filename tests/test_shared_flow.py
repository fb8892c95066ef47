"""Limits against naive twins that remember every cost."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InputError
from shared.flow import SLICES, Limit, Meter, SlidingWindow, TokenBucket

WINDOW = 60.0
events = st.lists(
    st.tuples(
        st.floats(0, 20, allow_subnormal=False),  # seconds since the one before
        st.integers(0, 150),  # cost; the bound is 100
        st.sampled_from(["ask", "spend"]),
    ),
    max_size=60,
)


class NaiveBucket:
    """Knows all costs, and works the level out from the first on."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self.spent: list[tuple[float, float]] = []

    def level(self, now: float) -> float:
        level, at = self.burst, 0.0
        for when, cost in self.spent:
            level = min(self.burst, level + self.rate * (when - at)) - cost
            at = when
        return min(self.burst, level + self.rate * (now - at))

    def wait(self, cost: float, now: float) -> float:
        return max(0.0, (min(cost, self.burst) - self.level(now)) / self.rate)


class NaiveWindow:
    """Knows all costs, and when each of them leaves the window."""

    def __init__(self, most: float, seconds: float) -> None:
        self.most, self.seconds = most, seconds
        self.spent: list[tuple[float, float]] = []

    def counted(self, now: float) -> float:
        return sum(cost for when, cost in self.spent if when + self.seconds > now)

    def wait(self, cost: float, now: float) -> float:
        ends = [now, *(when + self.seconds for when, _ in self.spent if when + self.seconds > now)]
        return min(t for t in ends if self.counted(t) + min(cost, self.most) <= self.most) - now


@given(events)
def test_a_bucket_says_what_one_says_that_remembers_every_cost(
    history: list[tuple[float, int, str]],
) -> None:
    bucket, naive, now = TokenBucket(7, 100), NaiveBucket(7, 100), 0.0
    for pause, cost, how in history:
        now += pause
        wait = bucket.wait(cost, now)
        assert wait == pytest.approx(naive.wait(cost, now), abs=1e-6)
        if how == "spend" or wait == 0:
            bucket.spend(cost, now)
            naive.spent.append((now, cost))


@given(events)
def test_a_window_never_lets_more_through_and_waits_at_most_a_slice_longer(
    history: list[tuple[float, int, str]],
) -> None:
    window, naive, now = SlidingWindow(100, WINDOW), NaiveWindow(100, WINDOW), 0.0
    for pause, cost, how in history:
        now += pause
        wait, exact = window.wait(cost, now), naive.wait(cost, now)
        assert exact <= wait + 1e-9
        assert wait <= exact + WINDOW / SLICES + 1e-5
        if how == "spend" or wait == 0:
            window.spend(cost, now)
            naive.spent.append((now, cost))


def limits() -> list[Limit]:
    bucket, window = TokenBucket(7, 100), SlidingWindow(100, WINDOW)
    return [Limit([bucket]), Limit([window]), Limit([TokenBucket(7, 100), SlidingWindow(60, 9)])]


@given(events)
def test_whoever_waits_as_long_as_was_said_is_admitted(
    history: list[tuple[float, int, str]],
) -> None:
    for limit in limits():
        now = 1e5
        for pause, cost, how in history:
            now += pause
            if how == "spend":
                limit.spend(cost, now)
            elif wait := limit.ask(cost, now):
                now += wait
                assert limit.ask(cost, now) == 0


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 100)), max_size=60))
def test_a_limit_lets_through_no_more_than_each_of_its_bounds(
    asks: list[tuple[float, int]],
) -> None:
    limit = Limit([TokenBucket(7, 100), SlidingWindow(150, WINDOW)])
    let: list[tuple[float, int]] = []
    now = 0.0
    for pause, cost in asks:
        now += pause
        if limit.ask(cost, now) == 0:
            let.append((now, cost))
    for i, (since, _) in enumerate(let):
        for until, _ in let[i:]:
            spent = sum(cost for when, cost in let if since <= when <= until)
            assert spent <= 100 + 7 * (until - since) + 1e-6
            assert spent <= 150 or until - since >= WINDOW


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 90)), max_size=30))
def test_what_is_refunded_was_never_spent(asks: list[tuple[float, int]]) -> None:
    for limit, untouched in zip(limits(), limits(), strict=True):
        now = 0.0
        for pause, cost in asks:
            now += pause
            if limit.ask(cost, now) == 0:
                limit.refund(cost, now)
            assert limit.wait(100, now) == pytest.approx(untouched.wait(100, now), abs=1e-5)


def test_a_cost_above_the_bound_is_admitted_when_nothing_else_counts_and_paid_off_after() -> None:
    bucket = Limit([TokenBucket(10, 100)])
    assert bucket.ask(250, 0.0) == 0
    assert bucket.wait(0, 0.0) == pytest.approx(15)
    assert bucket.wait(1, 0.0) == pytest.approx(15.1)
    window = Limit([SlidingWindow(100, WINDOW)])
    assert window.ask(250, 0.0) == 0
    assert WINDOW <= window.wait(1, 0.0) <= WINDOW + WINDOW / SLICES + 1e-5


def test_without_bounds_everything_is_admitted() -> None:
    limit = Limit()
    assert limit.ask(1e12, 0.0) == 0
    limit.spend(1, 0.0)
    limit.refund(1, 0.0)


def test_a_clock_that_steps_back_gives_nothing_away() -> None:
    for limit in limits():
        limit.spend(100, 50.0)
        before = limit.wait(50, 50.0)
        for now in (40.0, 0.0, -1e9, 45.0):
            assert limit.wait(50, now) >= before - 1e-9
        assert limit.wait(50, 50.0) == pytest.approx(before)


@pytest.mark.parametrize("cost", [-1, -1e-9, math.nan, math.inf, -math.inf])
def test_a_cost_that_is_no_amount_is_refused_and_changes_nothing(cost: float) -> None:
    for limit in limits():
        for act in (limit.ask, limit.spend, limit.refund):
            with pytest.raises(InputError, match="cost"):
                act(cost, 1.0)
        assert limit.ask(60, 1.0) == 0


@pytest.mark.parametrize("bad", [0, -5, math.nan, math.inf])
def test_a_bound_that_is_none_is_refused_by_name(bad: float) -> None:
    makers: list[tuple[str, Callable[[], Meter]]] = [
        ("rate", lambda: TokenBucket(bad, 1)),
        ("burst", lambda: TokenBucket(1, bad)),
        ("most", lambda: SlidingWindow(bad, 1)),
        ("seconds", lambda: SlidingWindow(1, bad)),
    ]
    for name, make in makers:
        with pytest.raises(InputError, match=name):
            make()
