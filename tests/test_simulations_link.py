"""What a bad link does to packets: the core, without a clock."""

from bisect import bisect_left
from itertools import pairwise
from math import sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InputError
from simulations.link import Direction, Impairments, Opportunities, RateSteps, Steady, Traced

PACKET = 1500


def arrivals(direction: Direction, count: int, gap: float, size: int = 100) -> list[list[float]]:
    return [direction.send(size, index * gap) for index in range(count)]


def once(direction: Direction, size: int, now: float) -> float:
    [at] = direction.send(size, now)
    return at


class EveryMillisecond:
    """A link that looks at its queue every millisecond: the naive twin of a traced capacity."""

    def __init__(self, budget: list[float]) -> None:
        self._budget = budget
        """Bytes that may leave in each millisecond; it loops."""

    def leave_all(self, packets: list[tuple[int, int]]) -> list[int]:
        """Take (millisecond, size) of each packet; return when each has left."""
        out: list[int] = []
        queue: list[float] = []
        coming = list(packets)
        now = 0
        while coming or queue:
            while coming and coming[0][0] <= now:
                queue.append(coming.pop(0)[1])
            budget = self._budget[now % len(self._budget)]
            while queue and budget > 0:
                sent = min(budget, queue[0])
                budget, queue[0] = budget - sent, queue[0] - sent
                if queue[0] <= 1e-6:
                    queue.pop(0)
                    out.append(now)
            now += 1
        return out


PACKETS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 4000)), min_size=1, max_size=12
).map(lambda gaps: [(sum(g for g, _ in gaps[: i + 1]), size) for i, (_, size) in enumerate(gaps)])


@given(PACKETS, st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 45))
def test_a_mahimahi_trace_lets_packets_leave_as_a_queue_served_every_millisecond_does(
    packets: list[tuple[int, int]], times: list[int], length: int
) -> None:
    trace = sorted({*(t for t in times if t < length), length})
    budget = [0.0] * length
    for at in trace:  # the last millisecond of a loop is the first of the next one
        budget[at % length] += PACKET
    later = [(at + length, size) for at, size in packets]  # before the first loop none has ended
    capacity = Traced(Opportunities(trace), start=0.0)
    left = [capacity.leave(size, (at - 0.5) / 1e3) for at, size in later]
    assert [round(at * 1e3) for at in left] == EveryMillisecond(budget).leave_all(later)


@given(PACKETS, st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_steps_of_rate_let_packets_leave_as_a_queue_served_every_millisecond_does(
    packets: list[tuple[int, int]], rates: list[int]
) -> None:
    rates = [*rates, 2]
    budget = [rate * 500.0 for rate in rates for _ in range(10)]  # bytes in each millisecond
    steps = RateSteps([n / 100 for n in range(len(rates) + 1)], [r * 5e5 for r in rates])
    capacity = Traced(steps, start=0.0)
    left = [capacity.leave(size, at / 1e3) for at, size in packets]
    expected = EveryMillisecond(budget).leave_all(packets)
    for got, late in zip(left, expected, strict=True):  # served at the end of a millisecond
        assert late - 1e-6 <= got * 1e3 <= late + 1 + 1e-6


def test_small_packets_share_an_opportunity_and_long_ones_take_several() -> None:
    capacity = Traced(Opportunities([10, 20, 30, 40]), start=0.0)
    assert [round(capacity.leave(size, 0.0) * 1e3) for size in (500, 900, 200, 3000)] == [
        10,
        10,
        20,
        40,
    ]


def test_opportunities_that_nobody_uses_are_gone() -> None:
    capacity = Traced(Opportunities([10, 20, 30, 40]), start=0.0)
    assert capacity.leave(PACKET, 0.025) == pytest.approx(0.03)
    assert capacity.leave(PACKET, 0.0255) == pytest.approx(0.04)


def test_a_trace_begins_at_its_offset_and_loops() -> None:
    capacity = Traced(Opportunities([10, 20, 100]), start=1000.0, offset=0.05)
    left = [capacity.leave(PACKET, 1000.0) for _ in range(4)]
    assert left == pytest.approx([1000.05, 1000.06, 1000.07, 1000.15])


def test_a_steady_rate_carries_just_that_many_bytes() -> None:
    direction = Direction(Random(1), capacity=Steady(10_000))
    times = [once(direction, 500, 0.0) for _ in range(100)]
    assert times[-1] == pytest.approx(100 * 500 / 10_000)
    assert all(b - a == pytest.approx(0.05) for a, b in pairwise(times))
    assert once(direction, 500, 60.0) == pytest.approx(60.05), "an idle link saves nothing up"


@given(PACKETS, st.lists(st.integers(1, 40), min_size=1, max_size=10))
def test_no_span_of_time_lets_more_through_than_the_trace_has(
    packets: list[tuple[int, int]], gaps: list[int]
) -> None:
    times = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    capacity = Traced(Opportunities(times), start=0.0)
    left = [(round(capacity.leave(size, at / 1e3) * 1e3), size) for at, size in packets]
    horizon = left[-1][0] + 1
    loops = [t + n * times[-1] for n in range(horizon // times[-1] + 1) for t in times]
    for begin in (0, *(at for at, _ in left)):
        through = sum(size for at, size in left if begin < at)
        first = next((size for at, size in left if begin < at), 0)  # may have begun before
        room = PACKET * (bisect_left(loops, horizon) - bisect_left(loops, begin))
        assert through <= room + first


def test_during_an_outage_nothing_comes_out_and_everything_does_afterwards() -> None:
    for rate in (50_000.0, float("inf")):
        direction = Direction(Random(1), capacity=Steady(rate, [(1.0, 3.0), (4.0, 4.5)]))
        times = [once(direction, 100, n / 100) for n in range(600)]
        assert not [at for at in times if 1.0 <= at < 3.0 or 4.0 <= at < 4.5]
        assert times == sorted(times)
        assert once(direction, 100, 99.0) == pytest.approx(99.0 + 100 / rate)


def test_a_packet_that_an_outage_interrupts_goes_on_where_it_was() -> None:
    capacity = Steady(1000, [(1.0, 3.0)])
    assert capacity.leave(2000, 0.5) == pytest.approx(4.5)


def test_a_link_without_faults_passes_everything_at_once() -> None:
    assert arrivals(Direction(Random(1)), 50, 0.1) == [[n * 0.1] for n in range(50)]


@pytest.mark.parametrize("loss", [0.05, 0.5])
def test_the_share_that_is_lost_is_within_five_deviations(loss: float) -> None:
    count = 20_000
    gone = arrivals(Direction(Random(7), Impairments(loss=loss)), count, 0.01).count([])
    assert abs(gone - count * loss) <= 5 * sqrt(count * loss * (1 - loss))


def test_the_share_that_comes_twice_is_within_five_deviations() -> None:
    count, share = 20_000, 0.02
    times = arrivals(Direction(Random(7), Impairments(duplicate=share)), count, 0.01)
    twice = sum(len(each) == 2 for each in times)
    assert abs(twice - count * share) <= 5 * sqrt(count * share * (1 - share))
    assert {len(each) for each in times} == {1, 2}


def test_copies_and_lost_packets_take_their_part_of_the_rate() -> None:
    bad = Impairments(duplicate=1.0)
    assert Direction(Random(1), bad, Steady(1000)).send(500, 0.0) == pytest.approx([0.5, 1.0])
    direction = Direction(Random(1), Impairments(loss=1.0), Steady(1000))
    assert direction.send(500, 0.0) == []
    direction.impairments = Impairments()
    assert once(direction, 500, 0.0) == pytest.approx(1.0)


def test_order_is_kept_under_delay_and_jitter() -> None:
    direction = Direction(Random(3), Impairments(delay=0.1, jitter=0.5))
    times = [once(direction, 100, n / 1000) for n in range(2000)]
    assert times == sorted(times)
    assert all(0.1 <= at - n / 1000 <= 0.6 + 1e-9 for n, at in enumerate(times))


def test_only_reordering_lets_packets_overtake_and_they_are_late_by_its_delay_at_most() -> None:
    bad = Impairments(reorder=0.3, reorder_delay=0.05)
    times = [once(Direction(Random(3), bad), 100, n / 1000) for n in range(3)]
    direction = Direction(Random(3), bad)
    times = [once(direction, 100, n / 1000) for n in range(2000)]
    assert times != sorted(times)
    late = [at - n / 1000 for n, at in enumerate(times) if at > n / 1000]
    assert abs(len(late) - 600) <= 5 * sqrt(2000 * 0.3 * 0.7)
    assert max(late) <= 0.05


def test_a_seed_reproduces_a_run_and_another_one_does_not() -> None:
    bad = Impairments(loss=0.2, duplicate=0.2, jitter=0.1, reorder=0.2)
    runs = [arrivals(Direction(Random(seed), bad), 200, 0.01) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (lambda: Impairments(loss=1.5), r"loss = 1.5: a share is 0\.\.1"),
        (lambda: Impairments(delay=-1), "delay = -1: seconds, at least 0"),
        (lambda: Impairments(jitter=float("nan")), "jitter = nan: seconds, at least 0"),
        (lambda: Steady(0), "rate 0 bytes a second: it must be above 0"),
        (lambda: Steady(1, [(2, 1)]), "must end after it begins"),
        (lambda: Steady(1, [(1, 3), (2, 4)]), "before the next one"),
        (lambda: Traced(Opportunities([1]), start=0, offset=-1), "a recording begins at 0"),
    ],
)
def test_what_no_link_can_be_is_refused(made: object, complaint: str) -> None:
    assert callable(made)
    with pytest.raises(InputError, match=complaint):
        made()
