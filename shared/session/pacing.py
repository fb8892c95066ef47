"""When a stream's changes are flushed: at its pace, which the decoder's load slows. Pure."""

from collections.abc import Iterable

from shared.frames import Load

PACE = 0.030
"""Seconds between two flushes of one stream."""
SLOWER = {Load.GREEN: 1, Load.YELLOW: 4, Load.RED: 16}
"""How much longer between two flushes; under red no tails at all: the end of the turn has them."""
LOAD_LASTS = 2.0
"""Seconds a load counts unless an acknowledgement repeats it."""


class Pacing:
    """The flushes of one session's streams."""

    def __init__(self, pace: float = PACE) -> None:
        self._pace = pace
        self.load, self._load_until = Load.GREEN, 0.0
        """What the decoder said last of how busy it is."""
        self._flush_at: dict[int, float] = {}
        self._flushed: dict[int, float] = {}

    @property
    def times(self) -> Iterable[float]:
        """When each stream that has changed is to be flushed."""
        return self._flush_at.values()

    def touch(self, number: int, now: float, *, urgent: bool) -> None:
        """A stream has changed: flush it at once if `urgent` or it was quiet, else at its pace."""
        pace = self._pace * SLOWER[self.load_at(now)]
        due = self._flushed.get(number, -pace) + pace
        self._flush_at[number] = now if urgent else max(now, due)

    def take_due(self, now: float) -> list[int]:
        """Return the streams that are flushed now."""
        due = [number for number, at in self._flush_at.items() if at <= now]
        for number in due:
            del self._flush_at[number]
            self._flushed[number] = now
        return due

    def hear(self, load: int, now: float) -> None:
        """An acknowledgement says how busy the decoder is."""
        self.load, self._load_until = Load(min(load, Load.RED)), now + LOAD_LASTS

    def load_at(self, now: float) -> Load:
        """Return how busy the decoder is, as far as it is known."""
        return self.load if now < self._load_until else Load.GREEN

    def forget(self, number: int) -> None:
        """A stream is over."""
        self._flush_at.pop(number, None)
        self._flushed.pop(number, None)

    def forget_load(self) -> None:
        """The connection is over: the next decoder has a load of its own."""
        self._load_until = 0.0
