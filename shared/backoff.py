"""Full-jitter exponential back-off that forgets only after a healthy while. Pure: `now` passed in.

The delay before try n is uniform in 0..min(bound, base * 2^n) (Brooker, "Exponential Backoff and
Jitter"). There are two counts. Nobody was reached: the bound is low, because whoever leaves a
tunnel should not wait for long. A connection was kicked right after it succeeded: the bound is
high, and success does not reset the count; that is how two clients with one identity would
otherwise take each other's place for ever at full speed.
"""

from random import Random

BRIEF = 5.0
"""Seconds within which a connection that ends was kicked."""


class Backoff:
    """The waits of one reconnecting client.

    Args:
        base: bound of the first delay, in seconds.
        out_of_reach: highest bound while nobody is reached.
        kicked: highest bound for connections that are kicked.
        healthy: seconds a connection must stand before kicks are forgotten.
    """

    def __init__(
        self,
        rng: Random,
        *,
        base: float = 0.25,
        out_of_reach: float = 5.0,
        kicked: float = 30.0,
        healthy: float = 30.0,
    ) -> None:
        self._rng, self._base, self._healthy = rng, base, healthy
        self._out_of_reach, self._kicked = out_of_reach, kicked
        self._failures = self._kicks = 0
        self._since: float | None = None

    def connected(self, now: float) -> None:
        """A connection stands since `now`."""
        self._since = now

    def delay(self, now: float) -> float:
        """Return how long to wait before the next try, in seconds."""
        if self._since is not None:
            stood, self._since = now - self._since, None
            self._failures = 0
            if stood >= self._healthy:
                self._kicks = 0
            elif stood < BRIEF:
                self._kicks += 1
        bound = max(
            min(self._out_of_reach, self._base * 2.0 ** min(self._failures, 30)),
            min(self._kicked, self._base * 2.0 ** min(self._kicks, 30)),
        )
        self._failures += 1
        return self._rng.uniform(0, bound)
