"""Waiting for news, with growing patience. Pure: `now` passed in."""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_WAIT = 16.0
"""Seconds of the longest wait."""


@dataclass(slots=True)
class _Wait:
    state: tuple[int, ...]
    until: float
    seconds: float


class Waits:
    """One wait for each of some streams.

    Args:
        seconds: of the first wait; each next one is twice as long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waits: dict[int, _Wait] = {}

    @property
    def times(self) -> Iterable[float]:
        """When each of them is over."""
        return (wait.until for wait in self._waits.values())

    def is_over(self, number: int, state: tuple[int, ...] | None, now: float) -> bool:
        """Tell whether a stream was silent for as long as it takes; then it has twice as long.

        Args:
            state: what has been heard of it so far; None: nothing is waited for.
        """
        wait = self._waits.get(number)
        if state is None:
            self._waits.pop(number, None)
        elif wait is None or wait.state != state:
            self._waits[number] = _Wait(state, now + self._seconds, self._seconds)
        elif now >= wait.until:
            wait.seconds = min(2 * wait.seconds, MAX_WAIT)
            wait.until = now + wait.seconds
            return True
        return False

    def forget(self, number: int) -> None:
        """A stream is over."""
        self._waits.pop(number, None)

    def clear(self) -> None:
        """The connection is over."""
        self._waits.clear()
