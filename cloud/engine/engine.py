"""The whole hot loop: schedule, run, commit. One thread owns it; nothing here does I/O."""

from collections.abc import Callable, Collection, Hashable, Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import torch

from cloud.engine.account import Account
from cloud.engine.backlog import Backlog, backlog_of
from cloud.engine.batch import Batch
from cloud.engine.blocks import BlockPool
from cloud.engine.sampler import Sampler
from cloud.engine.scheduler import Scheduler
from cloud.engine.sequence import Generation, Lane, LoadedAdapter, Sequence, namespace_of
from cloud.engine.steptime import StepTime
from cloud.engine.tables import evict, publish, restore, truncate
from shared.frames import Reason


class BatchRunner(Protocol):
    """Owns the cache; runs a batch; returns the logits it asks for, one row behind the other."""

    def run(self, batch: Batch) -> torch.Tensor: ...
    def copy_block(self, source: int, target: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token of a reply; `stop` says why the reply ends here. A stop token is not part of it."""

    generation: Generation
    token: int
    stop: str = ""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did."""

    num_tokens: int
    seconds: float
    drawn: list[Drawn] = field(default_factory=list[Drawn])


class Engine:
    """Sequences on one model.

    Args:
        clock: seconds; only differences count.
        times: learns from every step; the scheduler may ask it.
    """

    def __init__(
        self,
        runner: BatchRunner,
        pool: BlockPool,
        scheduler: Scheduler,
        sampler: Sampler,
        clock: Callable[[], float],
        times: StepTime | None = None,
    ) -> None:
        self.runner, self._pool = runner, pool
        self._scheduler, self._sampler, self._clock = scheduler, sampler, clock
        self._times = times if times is not None else StepTime()
        self._sequences: dict[int, Sequence] = {}
        self._numbers = count()
        self.num_tokens = 0
        """Tokens run so far."""
        self._account = Account()

    @property
    def sequences(self) -> Iterable[Sequence]:
        """All sequences."""
        return self._sequences.values()

    @property
    def num_evictions(self) -> int:
        """Sequences that lost their blocks so far."""
        return self._scheduler.num_evictions

    @property
    def num_adopted(self) -> int:
        """Tokens whose keys and values were shared rather than run so far."""
        return self._pool.num_adopted

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._pool.num_blocks

    @property
    def backlog(self) -> Backlog:
        """What waits for the engine."""
        return backlog_of(self._sequences.values(), self._pool, self._times)

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds."""
        return self._pool.num_free

    def add(
        self,
        namespace: Hashable = "",
        account: Account | None = None,
        adapter: LoadedAdapter | None = None,
    ) -> Sequence:
        """Begin a sequence.

        Adapters are told apart by content: another one under the same name shares nothing.

        Args:
            namespace: it shares prefixes with others of the same, and of the same adapter.
            account: whose share of the steps it runs on; None: one for all that have none.
        """
        sequence = Sequence(
            next(self._numbers),
            touched=self._clock(),
            namespace=namespace_of(namespace, adapter),
            account=account if account is not None else self._account,
            adapter=adapter,
        )
        self._sequences[sequence.number] = sequence
        return sequence

    def splice(
        self, sequence: Sequence, keep: int, ids: Ids[int], settled: int | None = None
    ) -> None:
        """Keep the first `keep` ids of a sequence that is not generating, and append `ids`.

        Args:
            settled: leading ids that are no tail; all of them by default.
        """
        assert sequence.generation is None
        sequence.splice(keep, ids, settled)
        copy = truncate(self._pool, sequence)
        if copy is not None:
            self.runner.copy_block(*copy)
        sequence.touched = self._clock()

    def generate(self, sequence: Sequence, generation: Generation, deadline: float) -> None:
        """Draw tokens behind the sequence's ids until a stop id or the reply's bound."""
        assert sequence.ids, "an empty sequence has nothing to go on from"
        ahead = generation.pause_at is not None
        sequence.generation, sequence.lane = generation, Lane.AHEAD if ahead else Lane.ENDED
        sequence.deadline, sequence.parked = deadline, False

    def release(self, sequence: Sequence, generation: Generation, deadline: float) -> None:
        """The turn has ended as a reply ahead of it assumed: it goes on, if it has not ended."""
        generation.pause_at = None
        if sequence.generation is generation:
            sequence.lane, sequence.deadline, sequence.parked = Lane.ENDED, deadline, False

    def cancel(self, sequence: Sequence) -> None:
        """Stop generating."""
        sequence.generation = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks."""
        sequence.generation = None
        evict(self._pool, sequence)
        del self._sequences[sequence.number]

    def restore(self, namespace: Hashable, ids: Ids[int], write: Callable[[int, int], None]) -> int:
        """Let sequences to come find the full blocks of `ids` (`tables.restore`).

        Args:
            namespace: as `Sequence.namespace`.
        """
        return restore(self._pool, namespace, ids, write)

    def drop_idle(self, namespaces: Collection[Hashable]) -> None:
        """Drop what is kept for prefixes to come, of these namespaces and whatever adapter.

        What a sequence holds at the moment stays, also if it began as another's.
        """
        self._pool.drop_idle(lambda of: isinstance(of, tuple) and of[0] in namespaces)

    def step(self) -> StepResult | None:
        """Run one step; None if nothing is wanted."""
        started = self._clock()
        batch = self._scheduler.schedule(self._sequences.values(), started)
        if batch is None:
            return None
        logits = self.runner.run(batch)
        drawn = self._commit(batch, logits)
        seconds = self._clock() - started
        self._times.observe(batch, seconds)
        self.num_tokens += batch.num_tokens
        return StepResult(batch.num_tokens, seconds, drawn)

    def check(self) -> None:
        """Assert that every block is accounted for."""
        self._pool.check(s.blocks for s in self._sequences.values())

    def _commit(self, batch: Batch, logits: torch.Tensor) -> list[Drawn]:
        for chunk in batch.chunks:
            chunk.sequence.cached = chunk.start + chunk.count
            publish(self._pool, chunk.sequence)
        last: list[int] = []  # rows behind which a token is drawn
        row = 0
        for chunk in batch.chunks:
            if chunk.scored and (scores := chunk.sequence.scores) is not None:
                scores.take(chunk.start, chunk.sequence.ids, logits[row : row + chunk.count])
            row += chunk.num_logits
            last += [row - 1] if chunk.sample else []
        sampling = [chunk.sequence for chunk in batch.chunks if chunk.sample]
        if not sampling:
            return []
        tokens = self._sampler.draw(logits if len(last) == row else logits[last], sampling)
        return [self._advance(s, token) for s, token in zip(sampling, tokens, strict=True)]

    def _advance(self, sequence: Sequence, token: int) -> Drawn:
        generation = sequence.generation
        assert generation is not None
        if token in generation.stop_ids:
            sequence.generation = None
            return Drawn(generation, token, Reason.STOP)
        sequence.ids.append(token)
        if generation.constraint is not None:
            generation.constraint.advance((token,))
        generation.produced += 1
        if generation.produced >= generation.max_tokens:
            sequence.generation = None
            return Drawn(generation, token, Reason.LENGTH)
        return Drawn(generation, token)
