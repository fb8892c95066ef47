"""How many tokens a step may have, by the step times seen so far. No torch, no clock."""

from dataclasses import dataclass
from typing import Protocol

from cloud.engine.batch import keys_of

SLOWDOWN = 2.0
"""How much longer a step may get, by prefill, for those who are being replied to."""
TOLERABLE = 0.025
"""Seconds between two tokens that nobody minds: 40 a second are more than anybody reads or speaks.
Below that, prefill goes first."""
CROWDING = 1.2
"""How much longer it may get by more replies than are fair to everyone who is there."""
RESERVED = 8
"""Tokens of the fullest step that are kept for prefill: it goes on, however slowly."""
_MIN_STEPS = 16
"""Steps after which predictions count."""


class StepTime(Protocol):
    """Knows how long steps take."""

    @property
    def num_steps(self) -> int: ...
    def predict(self, rows: int, keys: int) -> float: ...


class Pace:
    """Bounds steps.

    Args:
        times: step times seen so far.
        step_tokens: at most so many tokens a step beside replies while `times` knows too little;
            and without replies, while others are there whose next words must not wait long.
        most_tokens: at most so many ever.
    """

    def __init__(self, times: StepTime | None, step_tokens: int, most_tokens: int) -> None:
        assert most_tokens > RESERVED, "no room for replies beside prefill"
        self._times, self._step_tokens, self._most_tokens = times, step_tokens, most_tokens

    def rows(self, wanted: int, fair: int, keys: float) -> int:
        """Return how many of `wanted` replies the next step runs.

        Args:
            fair: replies that crowd nobody (`Shares.fair_rows`).
            keys: what one reply attends to, on average.
        """
        most = min(wanted, self._most_tokens - RESERVED)
        if fair >= most:
            return most
        if (times := self._known) is None:
            return min(most, max(fair, self._step_tokens))
        seconds = CROWDING * times.predict(fair, int(fair * keys))
        low, high = fair, most
        while low < high:
            middle = (low + high + 1) // 2
            if times.predict(middle, int(middle * keys)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def prefill(self, rows: int, fair: int, keys: float, *, alone: bool) -> "Budget":
        """Return what the next step may prefill beside `rows` replies.

        Without replies it is what takes as long as a fresh prompt's first chunk: its later ones get
        smaller, so that whoever comes meanwhile never waits for longer.

        Args:
            alone: nobody else is there.
        """
        tokens = self._most_tokens - rows
        chunk = self._most_tokens if alone else self._step_tokens
        if (times := self._known) is None:
            return Budget(chunk if rows == 0 else max(0, self._step_tokens - rows))
        seconds = SLOWDOWN * times.predict(max(1, min(rows, fair)), int(min(rows, fair) * keys))
        seconds = max(seconds, TOLERABLE)
        if rows == 0:
            seconds = max(seconds, times.predict(chunk, keys_of(0, chunk)))
        return Budget(tokens, times, seconds, rows, int(rows * keys))

    @property
    def _known(self) -> StepTime | None:
        enough = self._times is not None and self._times.num_steps >= _MIN_STEPS
        return self._times if enough else None


@dataclass(slots=True)
class Budget:
    """What is left of a step for prefill."""

    tokens: int
    times: StepTime | None = None
    """None: time is no bound."""
    seconds: float = 0.0
    """What the whole step may take."""
    rows: int = 0
    keys: int = 0
    """What it runs so far, and what that attends to."""
    is_fresh: bool = True
    """Nothing has been taken of it."""
    is_spent: bool = False
    """Not even the first token of a sequence fits any more."""

    def fits(self, start: int, most: int) -> int:
        """Return how many of `most` tokens behind `start` others still fit.

        The first to ask gets one at least: behind thousands of others even that may take as long as
        all replies together.
        """
        high = min(most, self.tokens)
        if self.times is None or high <= 0:
            return max(0, high)
        low = min(high, int(self.is_fresh))
        if low == 0 and self.times.predict(self.rows + 1, self.keys + start + 1) > self.seconds:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            keys = self.keys + keys_of(start, middle)
            if self.times.predict(self.rows + middle, keys) <= self.seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def take(self, start: int, count: int) -> None:
        """`count` tokens behind `start` others are part of the step."""
        self.tokens -= count
        self.rows += count
        self.keys += keys_of(start, count)
        self.is_fresh = self.is_fresh and count == 0
        late = (
            self.times is not None
            and not self.is_fresh
            and self.times.predict(self.rows + 1, self.keys + 1) > self.seconds
        )
        self.is_spent = late or self.tokens <= 0
