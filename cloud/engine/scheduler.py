"""Decides what the next step runs. No torch, no clock; the decision is a value.

Order: replies under way (one token each), then live turns by deadline, then bulk prefill, within a
bound of tokens a step. Room comes from idle sequences first (coldest first), then from the least
urgent of the busy ones; every victim keeps its ids and is prefilled again when it is its turn.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cloud.engine.blocks import BlockPool
from cloud.engine.sequence import Sequence
from cloud.engine.tables import adopt, evict


@dataclass(frozen=True, slots=True)
class Chunk:
    """Ids `start..start + count` of a sequence; `sample`: a token is drawn behind the last."""

    sequence: Sequence
    start: int
    count: int
    sample: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: chunks of different sequences, run as one flat batch of tokens."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the flat batch."""
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Chooses chunks and sees to it that they have blocks.

    Args:
        step_tokens: at most so many tokens a step while replies are under way.
        idle_step_tokens: at most so many otherwise.
    """

    def __init__(
        self, pool: BlockPool, *, step_tokens: int = 64, idle_step_tokens: int = 512
    ) -> None:
        self._pool = pool
        self._step_tokens, self._idle_step_tokens = step_tokens, idle_step_tokens
        self.num_evictions = 0

    def schedule(self, sequences: Iterable[Sequence], now: float) -> Batch | None:
        """Return the next step, or None if nothing is wanted."""
        everyone = list(sequences)
        busy = sorted((s for s in everyone if s.remaining > 0), key=_urgency)
        if not busy:
            return None
        budget = self._step_tokens if busy[0].decoding else self._idle_step_tokens
        chunks: list[Chunk] = []
        planned: set[int] = set()
        for sequence in busy:
            if budget <= 0 and (not sequence.decoding or len(chunks) >= self._idle_step_tokens):
                break
            adopt(self._pool, sequence)
            if sequence.remaining == 0:
                continue
            chunk = self._chunk(sequence, budget)
            planned.add(sequence.number)
            if not self._make_room(chunk, everyone, busy, planned):
                planned.discard(sequence.number)
                break  # the more urgent ones go on and make room
            sequence.touched = now
            chunks.append(chunk)
            budget -= chunk.count
        return Batch(tuple(chunks)) if chunks else None

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        end = len(sequence.ids)
        start = min(sequence.cached, end - 1) if sequence.generation else sequence.cached
        count = min(end - start, max(budget, 1))
        sample = sequence.generation is not None and start + count == end
        return Chunk(sequence, start, count, sample)

    def _make_room(
        self, chunk: Chunk, everyone: list[Sequence], busy: list[Sequence], planned: set[int]
    ) -> bool:
        sequence = chunk.sequence
        needed = self._pool.blocks_for(chunk.start + chunk.count) - len(sequence.blocks)
        while self._pool.num_free < needed:
            victim = self._victim(everyone, busy, planned)
            if victim is None:
                return False
            evict(self._pool, victim)
            self.num_evictions += 1
        if needed > 0:
            sequence.blocks += self._pool.allocate(needed)
        return True

    @staticmethod
    def _victim(
        everyone: list[Sequence], busy: list[Sequence], planned: set[int]
    ) -> Sequence | None:
        idle = [s for s in everyone if s.blocks and s.remaining == 0]
        if idle:
            return min(idle, key=lambda s: s.touched)
        return next((s for s in reversed(busy) if s.blocks and s.number not in planned), None)


def _urgency(sequence: Sequence) -> tuple[int, int, float, int]:
    return (
        0 if sequence.decoding else 1,
        int(sequence.lane),
        sequence.deadline,
        sequence.number,
    )
