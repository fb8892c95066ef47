"""Seeded mutations of valid inputs, for short runs without coverage. Pure."""

from collections.abc import Iterator, Sequence
from random import Random

_WORDS = (0, 1, 0x7F, 0x80, 0xFF, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)


def mutants(seeds: Sequence[bytes], count: int, rng: Random) -> Iterator[bytes]:
    """Yield `count` inputs, each one of `seeds` with one to four changes."""
    for _ in range(count):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2, 4))):
            _mutate(data, seeds, rng)
        yield bytes(data)


def _mutate(data: bytearray, seeds: Sequence[bytes], rng: Random) -> None:
    at = rng.randint(0, len(data))
    end = min(len(data), at + rng.choice((1, 2, 8, 64, 1024)))
    match rng.randrange(8):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        case 1 if at < len(data):
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        case 2:
            width = rng.choice((1, 2, 4, 8))
            word = rng.choice(_WORDS) & (1 << 8 * width) - 1
            data[at : at + width] = word.to_bytes(width, "little")
        case 3:
            del data[at:end]
        case 4:
            data[at:at] = data[at:end] * rng.choice((1, 2, 100))
        case 5:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 16)))
        case 6:
            del data[at:]
        case _:
            other = rng.choice(seeds)
            start = rng.randint(0, len(other))
            data[at:end] = other[start : start + rng.choice((1, 8, 64, 1024))]
