"""Decides what the next step runs. No torch, no clock; the decision is a value.

Order: replies under way (one token each), then live turns by deadline, then bulk prefill, then what
is run ahead of an end of turn. While replies are under way a step may take `SLOWDOWN` times what
they take alone, by the step times seen so far. Room comes from idle sequences first (coldest
first), then from the least urgent of the busy ones; every victim keeps its ids and is prefilled
again when it is its turn.
"""

from collections.abc import Iterable
from typing import Protocol

from cloud.engine.batch import Batch, Chunk, keys_of
from cloud.engine.blocks import BlockPool
from cloud.engine.sequence import Sequence
from cloud.engine.tables import adopt, evict

SLOWDOWN = 2.0
"""How much longer a step may get for those who are being replied to."""
_MIN_STEPS = 16
"""Steps after which predictions count."""
SCORED_ROWS = 64
"""Rows of logits that a chunk may ask for: with 50,000 tokens they take 12 MB."""
MIN_CHUNK = 8
"""Tokens beside replies that a step always has room for: prefill goes on, however slowly."""


class StepTime(Protocol):
    """Knows how long steps take."""

    @property
    def num_steps(self) -> int: ...
    def predict(self, rows: int, keys: int) -> float: ...


class Scheduler:
    """Chooses chunks and sees to it that they have blocks.

    Args:
        times: step times seen so far.
        step_tokens: at most so many tokens a step beside replies while `times` knows too little.
        idle_step_tokens: at most so many ever.
    """

    def __init__(
        self,
        pool: BlockPool,
        times: StepTime | None = None,
        *,
        step_tokens: int = 64,
        idle_step_tokens: int = 512,
    ) -> None:
        self._pool, self._times = pool, times
        self._step_tokens, self._idle_step_tokens = step_tokens, idle_step_tokens
        self.num_evictions = 0

    def schedule(self, sequences: Iterable[Sequence], now: float) -> Batch | None:
        """Return the next step, or None if nothing is wanted."""
        everyone = list(sequences)
        busy = sorted((s for s in everyone if s.remaining > 0), key=_urgency)
        if not busy:
            return None
        budget = self._budget(busy)
        chunks: list[Chunk] = []
        planned: set[int] = set()
        for sequence in busy:
            if budget <= 0:
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

    def _budget(self, busy: list[Sequence]) -> int:
        """Return the tokens of the next step."""
        replies = [s for s in busy if s.decoding and not s.is_ahead]
        if not replies:
            return self._idle_step_tokens
        rows, keys = len(replies), sum(len(s.ids) for s in replies)
        if self._times is None or self._times.num_steps < _MIN_STEPS:
            return max(self._step_tokens, rows)
        most = SLOWDOWN * self._times.predict(rows, keys)
        start = next((s.cached for s in busy if not s.decoding), 0)
        low, high = MIN_CHUNK, max(MIN_CHUNK, self._idle_step_tokens - rows)
        while low < high:  # the largest chunk that is still in time
            middle = (low + high + 1) // 2
            if self._times.predict(rows + middle, keys + keys_of(start, middle)) <= most:
                low = middle
            else:
                high = middle - 1
        return rows + low

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        end = len(sequence.ids)
        start = min(sequence.cached, end - 1) if sequence.generation else sequence.cached
        scored = sequence.is_scored
        count = min(end - start, max(budget, 1), SCORED_ROWS if scored else end)
        sample = sequence.generation is not None and start + count == end
        return Chunk(sequence, start, count, sample, scored)

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
        0 if sequence.decoding and not sequence.is_ahead else 1,
        int(sequence.lane),
        sequence.deadline,
        sequence.number,
    )
