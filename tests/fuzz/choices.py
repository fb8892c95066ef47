"""Decisions read from fuzzed bytes, so that a mutated byte is another decision. No randomness."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
EDGES = (0, 1, 2, 127, 128, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32)
LARGE = (1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1)


class Choices:
    """Reads decisions from front to back; behind the end all of them are 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def more(self) -> bool:
        """There are bytes left."""
        return self._at < len(self._data)

    def byte(self) -> int:
        """Return the next byte."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, count: int) -> int:
        """Return a number of 0..count-1, for counts up to 65536."""
        return (self.byte() if count <= 256 else self.byte() << 8 | self.byte()) % count

    def pick(self, options: Sequence[T]) -> T:
        """Return one of `options`."""
        return options[self.below(len(options))]

    def bytes(self, count: int) -> bytes:
        """Return up to `count` bytes."""
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self) -> int:
        """Return any number of 64 bits; small ones and those at an edge are likely."""
        match self.byte() % 4:
            case 0 | 1:
                return self.byte()
            case 2:
                return self.pick((*EDGES, *LARGE))
            case _:
                return int.from_bytes(self.bytes(8), "little")
