"""What an outbox holds, and what can be done to it. Plain values."""

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum


class Kind(IntEnum):
    """What an item is. Under pressure the last of these goes first."""

    WORDS = 0  # conversations: what a driver said, and the replies
    SUMMARY = 1  # what a vehicle has learned
    FEATURES = 2  # what it heard and saw
    TELEMETRY = 3


@dataclass(frozen=True, slots=True)
class Item:
    """A payload at place `seq` of its stream."""

    kind: Kind
    stream: str
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Put:
    """Write an item, in place of what may be there."""

    item: Item


@dataclass(frozen=True, slots=True)
class Cut:
    """Delete the items of a stream from place `seq` on."""

    stream: str
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Remember:
    """Keep one value under a name, in place of an earlier one."""

    name: str
    value: bytes


Change = Put | Cut | Remember


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an outbox may take."""

    num_bytes: int = 64 << 20
    """Payloads in the file."""
    age: float = 7 * 86400.0
    """Seconds an item is kept; a stream of words goes as a whole, when its newest item is older."""
    memory: int = 8 << 20
    """Payloads that wait in memory while the disk takes nothing."""


@dataclass(slots=True)
class Counts:
    """What has happened so far."""

    written: int = 0
    """Changes that are in the file."""
    dropped: Counter[Kind] = field(default_factory=Counter[Kind])
    """Items that had to go undelivered."""
    bad_files: int = 0
    failures: int = 0
    """Tries that the disk refused."""


def num_bytes(changes: tuple[Change, ...]) -> int:
    """Return the bytes of the payloads in some changes."""
    return sum(len(c.item.payload) for c in changes if isinstance(c, Put))
