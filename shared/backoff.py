"""Full-jitter exponential back-off that forgets only after a healthy while. Pure: `now` passed in.

The delay before try n is uniform in 0..min(cap, base * 2^n) (Brooker, "Exponential Backoff and
Jitter"). A connection that is kicked right after it succeeded does not reset it: that is how two
clients with one identity would otherwise take each other's place forever at full speed.
"""

from random import Random


class Backoff:
    """The waits of one reconnecting client.

    Args:
        base, cap: bounds of the delay, in seconds.
        healthy: seconds a connection must stand before failures are forgotten.
    """

    def __init__(
        self, rng: Random, *, base: float = 0.25, cap: float = 5.0, healthy: float = 30.0
    ) -> None:
        self._rng, self._base, self._cap, self._healthy = rng, base, cap, healthy
        self._failures = 0
        self._since: float | None = None

    def connected(self, now: float) -> None:
        """A connection stands since `now`."""
        self._since = now

    def delay(self, now: float) -> float:
        """Return how long to wait before the next try, in seconds."""
        if self._since is not None and now - self._since >= self._healthy:
            self._failures = 0
        self._since = None
        bound = min(self._cap, self._base * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return self._rng.uniform(0, bound)
