"""One direction of a bad link: packets in, the times at which they come out. Pure.

No I/O and no clock: `now` is an argument, in seconds, and chance is the caller's `Random`. The
terms are those of Linux' netem (tc-netem(8)).
"""

from dataclasses import dataclass
from math import inf
from random import Random

from shared.errors import InputError
from simulations.link.capacity import Capacity, Steady


@dataclass(frozen=True, slots=True)
class Impairments:
    """What befalls packets besides the rate of the link.

    Raises:
        InputError: a share is outside 0..1, or a time is negative.
    """

    loss: float = 0.0
    """Share of the copies that never come out."""
    duplicate: float = 0.0
    """Share of the packets of which a second copy goes in right behind the first."""
    delay: float = 0.0
    """Seconds between leaving the bottleneck and coming out."""
    jitter: float = 0.0
    """Up to so many seconds more, uniformly; order is kept."""
    reorder: float = 0.0
    """Share of the copies that are held up on their way, so that later ones overtake them."""
    reorder_delay: float = 0.05
    """Up to so many seconds, uniformly, that such a copy comes out later."""

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "reorder"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise InputError(f"{name} = {share}: a share is 0..1")
        for name in ("delay", "jitter", "reorder_delay"):
            if not 0 <= (seconds := getattr(self, name)) < inf:
                raise InputError(f"{name} = {seconds}: seconds, at least 0")


NO_IMPAIRMENTS = Impairments()


class Direction:
    """What happens to packets one way. `impairments` may be changed while it runs."""

    def __init__(
        self,
        rng: Random,
        impairments: Impairments = NO_IMPAIRMENTS,
        capacity: Capacity | None = None,
    ) -> None:
        self.impairments = impairments
        self._rng = rng
        self._capacity = capacity or Steady()
        self._last = -inf

    def send(self, size: int, now: float) -> list[float]:
        """Put in a packet of `size` bytes; return when each of its copies comes out, sorted.

        Empty: it is lost. A copy takes its part of the rate, whether it is lost or not. Who is not
        held up comes out in the order of going in. `now` never goes back between calls.
        """
        copies = 1 + (self._rng.random() < self.impairments.duplicate)
        times = [self._pass(size, now) for _ in range(copies)]
        return sorted(at for at in times if at is not None)

    def _pass(self, size: int, now: float) -> float | None:
        bad, rng = self.impairments, self._rng
        at = self._capacity.leave(size, now)
        if rng.random() < bad.loss:
            return None
        at = max(self._last, at + bad.delay + bad.jitter * rng.random())
        if rng.random() < bad.reorder:
            return at + bad.reorder_delay * rng.random()
        self._last = at
        return at
