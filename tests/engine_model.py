"""An engine whose runner is a formula: sequences, accounts and time, without a model."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cloud.engine.account import Account
from cloud.engine.backlog import Backlog, backlog_of
from cloud.engine.batch import Batch
from cloud.engine.blocks import BlockPool
from cloud.engine.scheduler import Scheduler
from cloud.engine.sequence import Generation, Lane, Sequence
from cloud.engine.steptime import StepTime
from cloud.engine.tables import evict, publish
from shared.frames import Sampling


def seconds(rows: int, keys: int) -> float:
    """Return what a step takes: a small model on a few cores."""
    return 5e-3 + 1.5e-3 * rows + 4e-7 * keys


def percentile(values: list[float], part: float) -> float:
    """Return the value that `part` of `values` do not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


@dataclass(eq=False)
class Job:
    """A prompt and its reply; `tokens` are the times of the reply's tokens."""

    sequence: Sequence
    asked_at: float
    tokens: list[float] = field(default_factory=list[float])

    @property
    def done(self) -> bool:
        return self.sequence.generation is None

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


class ModelEngine:
    """Steps in modelled time; what the real engine does to sequences, without keys and values."""

    def __init__(self, num_blocks: int = 20_000) -> None:
        self.pool, self.times = BlockPool(num_blocks, 16), StepTime()
        self.scheduler = Scheduler(self.pool, self.times)
        self.now = 0.0
        self.served: dict[Account, int] = {}
        """Tokens run."""
        self.jobs: dict[Sequence, Job] = {}
        self._fresh = 0

    def prefill(self, account: Account, count: int, lane: Lane = Lane.LIVE) -> Sequence:
        """Begin a sequence of `count` ids nobody else has."""
        sequence = Sequence(self._fresh, account=account, lane=lane)
        self.jobs[sequence] = Job(sequence, self.now)
        self.append(sequence, count)
        return sequence

    def append(self, sequence: Sequence, count: int) -> None:
        """Put new ids behind a sequence."""
        self._fresh += count + 1
        sequence.splice(len(sequence.ids), list(range(self._fresh - count, self._fresh)))

    def ask(self, sequence: Sequence, tokens: int) -> Job:
        """Ask for a reply."""
        generation = Generation(Sampling(), tokens, frozenset(), lambda _token, _why: None)
        sequence.generation, sequence.lane = generation, Lane.LIVE
        self.jobs[sequence] = job = Job(sequence, self.now)
        return job

    @property
    def backlog(self) -> Backlog:
        """What waits."""
        return backlog_of(self.jobs, self.pool, self.times)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        evict(self.pool, sequence)
        del self.jobs[sequence]

    def step(self) -> Batch | None:
        """Run a step."""
        batch = self.scheduler.schedule(list(self.jobs), self.now)
        if batch is None:
            return None
        took = seconds(batch.num_tokens, batch.num_keys)
        self.times.observe(batch, took)
        self.now += took
        for chunk in batch.chunks:
            sequence = chunk.sequence
            self.served[sequence.account] = self.served.get(sequence.account, 0) + chunk.count
            sequence.cached = chunk.start + chunk.count
            publish(self.pool, sequence)
            if chunk.sample:
                self._draw(sequence)
        return batch

    def run_until(self, end: float, each_step: Callable[[], None] = lambda: None) -> None:
        """Run steps; with nothing to do, time passes by milliseconds."""
        while self.now < end:
            each_step()
            if self.step() is None:
                self.now += 1e-3

    def _draw(self, sequence: Sequence) -> None:
        generation = sequence.generation
        assert generation is not None
        self._fresh += 1
        sequence.ids.append(self._fresh)
        generation.produced += 1
        self.jobs[sequence].tokens.append(self.now)
        if generation.produced >= generation.max_tokens:
            sequence.generation = None
