"""What one step runs. No torch, no I/O."""

from dataclasses import dataclass

from cloud.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Ids `start..start + count` of a sequence; `sample`: a token is drawn behind the last.

    `scored`: logits are wanted behind every one of them.
    """

    sequence: Sequence
    start: int
    count: int
    sample: bool
    scored: bool = False

    @property
    def num_logits(self) -> int:
        """Rows at its end that logits are wanted of."""
        return self.count if self.scored else int(self.sample)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: chunks of different sequences, run as one flat batch of tokens."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the flat batch."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def num_keys(self) -> int:
        """Keys that all rows together attend to."""
        return sum(keys_of(chunk.start, chunk.count) for chunk in self.chunks)


def keys_of(start: int, count: int) -> int:
    """Return how many keys the tokens `start..start + count` of a sequence attend to."""
    return count * start + count * (count + 1) // 2
