"""How much may flow: token bucket × sliding window. Pure; `now` is an argument, in seconds.

A `Limit` is asked before something is spent, or told of what was spent without asking; what is owed
then has to be waited for. A cost above a bound is let through once nothing else counts: it is paid
off afterwards, nothing waits for ever. A clock that steps back stands still.
"""

from collections import deque
from collections.abc import Iterable
from math import floor, isfinite
from typing import Protocol

from shared.errors import InputError

SLICES = 12
"""Slices of a window: it counts what it has seen for at most a slice too long."""
_SLACK = 1e-9
"""Part of a burst that rounding may take."""
_LATER = 1e-6
"""Seconds added to what a window says, so that rounding does not make it too early."""


class Meter(Protocol):
    """One bound."""

    def wait(self, cost: float, now: float) -> float:
        """Return seconds until `cost` fits; 0: now. Nothing is spent."""
        ...

    def spend(self, cost: float, now: float) -> None:
        """Count `cost`, whether it fits or not."""
        ...

    def refund(self, cost: float, now: float) -> None:
        """Take back what was counted and not used."""
        ...


class TokenBucket:
    """Holds up to `burst`, and fills by `rate` a second (Turner 1986, the leaky bucket as a meter).

    Over any time t it lets through at most `burst + rate * t`, and one cost above `burst`.

    Raises:
        InputError: a bound is not above 0.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = _bound("rate", rate), _bound("burst", burst)
        self._level = self._burst
        """What may be spent; below 0: what is owed."""
        self._at = float("-inf")

    def wait(self, cost: float, now: float) -> float:
        """Return seconds until `cost` fits; 0: now."""
        self._fill(now)
        missing = min(_cost(cost), self._burst) - self._level
        return 0.0 if missing <= _SLACK * self._burst else missing / self._rate

    def spend(self, cost: float, now: float) -> None:
        """Count `cost`, whether it fits or not."""
        self._fill(now)
        self._level -= _cost(cost)

    def refund(self, cost: float, now: float) -> None:
        """Take back what was counted and not used."""
        self._fill(now)
        self._level = min(self._burst, self._level + _cost(cost))

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._burst, self._level + self._rate * (now - self._at))
            self._at = now


class SlidingWindow:
    """At most `most` within any `seconds`, and one cost above `most` when nothing else counts.

    Costs are added up by slices, `SLICES` to a window, and a slice counts until all of it is out of
    the window: never more than `most` is let through, and nothing waits more than a slice longer
    than if every cost were remembered.

    Raises:
        InputError: a bound is not above 0.
    """

    def __init__(self, most: float, seconds: float) -> None:
        self._most = _bound("most", most)
        self._width = _bound("seconds", seconds) / SLICES
        self._slices: deque[tuple[int, float]] = deque()
        """Number of a slice and what it counts, oldest first; slice n begins at n * width."""
        self._at = float("-inf")

    def wait(self, cost: float, now: float) -> float:
        """Return seconds until `cost` fits; 0: now."""
        self._drop(now)
        over = sum(spent for _, spent in self._slices) + min(_cost(cost), self._most) - self._most
        until = float("-inf")
        for number, spent in self._slices:
            if over <= 0:
                break
            over -= spent
            until = self._gone(number)
        return max(0.0, until - self._at + _LATER)

    def spend(self, cost: float, now: float) -> None:
        """Count `cost`, whether it fits or not."""
        self._drop(now)
        number = floor(self._at / self._width)
        before = self._slices.pop()[1] if self._slices and self._slices[-1][0] == number else 0.0
        self._slices.append((number, before + _cost(cost)))

    def refund(self, cost: float, now: float) -> None:
        """Take back what was counted and not used, the newest first."""
        self._drop(now)
        left = _cost(cost)
        while left > 0 and self._slices:
            number, spent = self._slices.pop()
            if spent > left:
                self._slices.append((number, spent - left))
            left -= spent

    def _gone(self, number: int) -> float:
        """Return when all of a slice is out of the window."""
        return (number + 1 + SLICES) * self._width

    def _drop(self, now: float) -> None:
        self._at = max(self._at, now)
        while self._slices and self._gone(self._slices[0][0]) <= self._at:
            self._slices.popleft()


class Limit:
    """Several bounds at once: a cost is let through when all of them have room for it."""

    def __init__(self, meters: Iterable[Meter] = ()) -> None:
        self._meters = tuple(meters)

    def wait(self, cost: float, now: float) -> float:
        """Return seconds until `cost` fits; 0: now. A cost of 0 waits for what is owed."""
        return max((meter.wait(cost, now) for meter in self._meters), default=0.0)

    def ask(self, cost: float, now: float) -> float:
        """Spend `cost` if it fits now, and return 0; else return the seconds to wait.

        Raises:
            InputError: `cost` is negative or no number.
        """
        wait = self.wait(cost, now)
        if wait == 0:
            self.spend(cost, now)
        return wait

    def spend(self, cost: float, now: float) -> None:
        """Count `cost`, whether it fits or not."""
        for meter in self._meters:
            meter.spend(cost, now)

    def refund(self, cost: float, now: float) -> None:
        """Take back what was counted and not used."""
        for meter in self._meters:
            meter.refund(cost, now)


def _cost(cost: float) -> float:
    if not (isfinite(cost) and cost >= 0):
        raise InputError(f"a cost of {cost}: give a finite number of at least 0")
    return cost


def _bound(name: str, value: float) -> float:
    if not (isfinite(value) and value > 0):
        raise InputError(f"{name} = {value}: give a finite number above 0, or leave the bound out")
    return value
