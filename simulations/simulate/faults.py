"""What breaks when. Pure: chance is the caller's `Random`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import Literal

Kind = Literal["broker", "decoder", "vehicle"]
LONG = 120.0
"""Seconds from which a simulation has each fault twice."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something is killed and started again."""

    at: float
    """Seconds since the beginning."""
    kind: Kind
    vehicle: int = -1
    """Which one, if it is a vehicle."""
    away: float = 0.0
    """Seconds until it is started again."""

    def __str__(self) -> str:
        what = self.kind if self.vehicle < 0 else f"vehicle {self.vehicle}"
        return f"{self.at:.1f} s: {what}, away for {self.away:.1f} s"


def plan_faults(
    seconds: float, vehicles: int, outage: tuple[float, float], rng: Random
) -> tuple[Fault, ...]:
    """Return what breaks before, during and after an outage, in order.

    Nothing breaks right after the outage, where the backlog is watched, nor at the end; so in a
    short run nothing does after it.
    """
    begin, end = outage
    before = 0.1 * begin, 0.9 * begin
    during = begin + 0.1 * (end - begin), begin + 0.6 * (end - begin)
    faults = [_fault("broker", before, rng), _fault("decoder", during, rng)]
    if seconds < LONG:
        faults.append(_kill(vehicles, during, rng))
    else:
        after = end + 0.4 * (seconds - end), end + 0.65 * (seconds - end)
        faults += [_fault("broker", after, rng), _fault("decoder", before, rng)]
        windows = cycle((during, before, after))
        faults += [_kill(vehicles, next(windows), rng) for _ in range(vehicles)]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _fault(kind: Kind, window: tuple[float, float], rng: Random) -> Fault:
    return Fault(rng.uniform(*window), kind, away=rng.uniform(0.1, 1.0))


def _kill(vehicles: int, window: tuple[float, float], rng: Random) -> Fault:
    away = rng.uniform(0.1, 1.0)
    return Fault(rng.uniform(*window), "vehicle", rng.randrange(vehicles), away)


def most_within(times: Sequence[float], span: float) -> int:
    """Return the largest number of `times` within `span`."""
    ordered = sorted(times)
    most = begin = 0
    for index, at in enumerate(ordered):
        while at - ordered[begin] > span:
            begin += 1
        most = max(most, index - begin + 1)
    return most
