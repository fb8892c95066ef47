"""The decoder's load as vehicles are told it: green, yellow, red. Pure.

A colour is entered at one bound and left at a lower one, so that it does not flicker.
"""

from cloud.engine.backlog import Backlog
from shared.frames import Load

ENTER = {Load.YELLOW: Backlog(seconds=1.0, held=0.80), Load.RED: Backlog(seconds=4.0, held=0.95)}
LEAVE = {Load.YELLOW: Backlog(seconds=0.5, held=0.70), Load.RED: Backlog(seconds=2.0, held=0.85)}


class LoadGauge:
    """Remembers the colour."""

    def __init__(self) -> None:
        self.load = Load.GREEN

    def read(self, backlog: Backlog) -> Load:
        """Return the colour for what waits now."""
        for load in (Load.RED, Load.YELLOW):
            bound = (LEAVE if self.load >= load else ENTER)[load]
            if backlog.seconds >= bound.seconds or backlog.held >= bound.held:
                self.load = load
                return load
        self.load = Load.GREEN
        return self.load
