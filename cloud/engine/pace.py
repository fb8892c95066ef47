"""How many tokens a step may have, by the step times seen so far. No torch, no clock."""

from typing import Protocol

from cloud.engine.batch import keys_of

SLOWDOWN = 2.0
"""How much longer a step may get, by prefill, for those who are being replied to."""
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

    def prefill(self, rows: int, fair: int, keys: float, start: int, *, alone: bool) -> int:
        """Return how many tokens the next step may prefill beside `rows` replies.

        Args:
            start: ids that are cached of the sequence that is prefilled first.
            alone: nobody else is there.
        """
        if rows == 0 and alone:
            return self._most_tokens
        if (times := self._known) is None:
            return max(0, self._step_tokens - rows)
        if rows == 0:
            return max(self._step_tokens, self._beside(times, 0, 1, 0.0, start))
        return self._beside(times, rows, min(rows, fair), keys, start)

    def _beside(self, times: StepTime, rows: int, fair: int, keys: float, start: int) -> int:
        """Return the largest chunk that fits beside `rows` replies; `fair` of them count.

        It is one token at least: behind thousands of others, even a few take as long as all replies
        together.
        """
        seconds = SLOWDOWN * times.predict(fair, int(fair * keys))
        held = int(rows * keys)
        low, high = 1, self._most_tokens - rows
        while low < high:
            middle = (low + high + 1) // 2
            if times.predict(rows + middle, held + keys_of(start, middle)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def _known(self) -> StepTime | None:
        enough = self._times is not None and self._times.num_steps >= _MIN_STEPS
        return self._times if enough else None
