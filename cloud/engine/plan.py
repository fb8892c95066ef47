"""One step being put together: who gets tokens, and whose blocks make room. No torch, no I/O."""

from collections.abc import Iterator

from cloud.engine.batch import Batch, Chunk
from cloud.engine.blocks import BlockPool
from cloud.engine.sequence import Sequence
from cloud.engine.tables import adopt, evict

SCORED_ROWS = 64
"""Tokens of a step whose logits may be asked for besides the last: of 50,000 they take 12 MB."""


class Plan:
    """The chunks of the next step.

    Room comes from idle sequences first, the coldest of them; then from busy ones that are less
    urgent than who needs it and not part of the step, the least urgent of them. That order does not
    change by being served: so the most urgent one always gets on, and nobody evicts each other in
    turns. Every victim keeps its ids and is prefilled again when it is its turn.

    Args:
        busy: sequences that want something, the most urgent first.
    """

    def __init__(self, pool: BlockPool, everyone: list[Sequence], busy: list[Sequence]) -> None:
        self._pool, self._everyone, self._busy = pool, everyone, busy
        self._counts: dict[Sequence, int] = {}
        """Tokens granted, in the order of the first ones."""
        self._scored_rows = SCORED_ROWS
        self._victims: set[Sequence] = set()
        """Who made room gets no tokens in the same step: it would take the room back."""

    @property
    def num_evictions(self) -> int:
        """Sequences that lost their blocks for this step."""
        return len(self._victims)

    def start(self, sequence: Sequence) -> int:
        """Return how many ids are in front of what is granted next; what others hold is adopted."""
        if sequence not in self._counts and sequence not in self._victims:
            adopt(self._pool, sequence)
        return len(sequence.ids) - self.left(sequence)

    def grant(self, sequence: Sequence, most: int) -> int:
        """Give a sequence up to `most` more tokens; return how many it took: 0 without room."""
        if sequence in self._victims:
            return 0
        planned = self._counts.get(sequence, 0)
        count = min(most, len(sequence.ids) - self.start(sequence))
        if sequence.is_scored:
            count = min(count, self._scored_rows)
        if count == 0 or not self._make_room(sequence, planned + count):
            return 0
        self._counts[sequence] = planned + count
        self._scored_rows -= count if sequence.is_scored else 0
        return count

    def left(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence wants that it has not been granted."""
        return sequence.remaining - self._counts.get(sequence, 0)

    def batch(self, now: float, run_numbers: Iterator[int]) -> Batch | None:
        """Return what was granted as a step; None: nothing was."""
        chunks: list[Chunk] = []
        for sequence, count in self._counts.items():
            sequence.touched, sequence.run_number = now, next(run_numbers)
            start = len(sequence.ids) - sequence.remaining
            sample = sequence.generation is not None and self.left(sequence) == 0
            chunks.append(Chunk(sequence, start, count, sample, sequence.is_scored))
        return Batch(tuple(chunks)) if chunks else None

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """See to it that the sequence has blocks for its first `count` tokens of this step."""
        end = len(sequence.ids) - sequence.remaining + count
        needed = self._pool.blocks_for(end) - len(sequence.blocks)
        while self._pool.num_free < needed:
            victim = self._victim(sequence)
            if victim is None:
                return False
            evict(self._pool, victim)
            self._victims.add(victim)
        if needed > 0:
            sequence.blocks += self._pool.allocate(needed)
        return True

    def _victim(self, sequence: Sequence) -> Sequence | None:
        idle = [s for s in self._everyone if s.blocks and s.remaining == 0]
        if idle:
            return min(idle, key=lambda s: s.touched)
        for other in reversed(self._busy):
            if other is sequence:
                return None
            if other.blocks and other not in self._counts:
                return other
        return None
