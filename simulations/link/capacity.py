"""How fast packets leave a link, one after the other. Pure: `now` is an argument, in seconds.

A link whose rate changes is a curve: the bytes that could have left up to each moment. A queue in
front of it is then one number, the bytes that have left or are promised to; what the link could
have carried while nothing waited is lost (Le Boudec and Thiran, "Network Calculus", chapter 1).
"""

from collections.abc import Sequence
from math import inf
from typing import Protocol

from shared.errors import InputError


class Capacity(Protocol):
    """The bottleneck of one direction: a queue without a bound, first in, first out."""

    def leave(self, size: int, now: float) -> float:
        """Queue a packet of `size` bytes at `now`; return when its last byte has left.

        `now` never goes back between calls.
        """
        ...


class Steady:
    """A constant rate, interrupted by outages.

    Args:
        rate: bytes a second; by default packets leave at once.
        outages: begin and end of each, in seconds of the clock of `now`, one after the other.
            What waits or comes then leaves afterwards.

    Raises:
        InputError: the rate is not above 0, or an outage ends before it or the next one begins.
    """

    def __init__(self, rate: float = inf, outages: Sequence[tuple[float, float]] = ()) -> None:
        if not rate > 0:
            raise InputError(f"rate {rate:g} bytes a second: it must be above 0")
        moments = [moment for outage in outages for moment in outage]
        if moments != sorted(moments):
            raise InputError(
                f"outages {list(outages)}: each must end after it begins, and before the next one"
            )
        self._rate, self._outages = rate, tuple(outages)
        self._free = -inf

    def leave(self, size: int, now: float) -> float:
        """Queue a packet of `size` bytes at `now`; return when its last byte has left."""
        at, left = max(now, self._free), size / self._rate
        for begin, end in self._outages:
            if at + left < begin:
                break
            if at < begin:
                left -= begin - at
            at = max(at, end)
        self._free = at + left
        return self._free


class Curve(Protocol):
    """What a link can carry since it began, in bytes by seconds."""

    def before(self, at: float) -> float:
        """Bytes that could have left before `at`."""
        ...

    def time_of(self, count: float) -> float:
        """When `count` bytes can have left, at the earliest; `count` is above 0."""
        ...


class Traced:
    """A recorded curve, from a point of the recording on; at its end it begins again.

    Args:
        start: the moment, in the clock of `now`, that is `offset` in the recording.
        offset: in seconds.

    Raises:
        InputError: the offset is negative.
    """

    def __init__(self, curve: Curve, *, start: float, offset: float = 0.0) -> None:
        if not 0 <= offset < inf:
            raise InputError(f"offset {offset:g} s: a recording begins at 0")
        self._curve, self._origin = curve, start - offset
        self._used = 0.0

    def leave(self, size: int, now: float) -> float:
        """Queue a packet of `size` bytes at `now`; return when its last byte has left."""
        self._used = max(self._used, self._curve.before(now - self._origin)) + size
        return max(now, self._origin + self._curve.time_of(self._used))
