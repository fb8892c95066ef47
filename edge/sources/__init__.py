"""Where words come from: the whole text of the turn so far, again and again, revised."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reading:
    """What a source says at one moment."""

    text: str
    """The whole text of the turn so far."""
    stable: int = 0
    """Leading characters that the source promises not to change."""
    ended: bool = False
    """The turn ends here; `text` is final."""


class Source(Protocol):
    """Something that people talk or type into."""

    def readings(self) -> AsyncIterator[Reading]:
        """Yield readings, turn after turn, until the source is exhausted."""
        ...
