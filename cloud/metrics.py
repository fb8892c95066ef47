"""What a decoder counts, for Prometheus. vLLM's names where they mean the same.

Relay and HTTP count alike: a turn of a vehicle is a request, and its first token is due when the
turn has ended. What only the engine knows is read when somebody asks, between two steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cloud.ahead import AheadCounts
from cloud.engine.engine import Engine
from cloud.snapshot.counts import SnapshotCounts

_LABEL = "model_name"
_FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0)
_LENGTHS = tuple(float(2**i) for i in range(14))


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine, seen between two steps."""

    running: int
    waiting: int
    usage: float
    evictions: int
    adopted: int
    tokens: int

    @classmethod
    def of(cls, engine: Engine) -> "EngineState":
        """Look at an engine; only its own thread may."""
        replying = [s for s in engine.sequences if s.generation is not None]
        running = sum(bool(s.blocks) for s in replying)
        used = 1 - engine.num_free_blocks / engine.num_blocks
        waiting = len(replying) - running
        return cls(
            running, waiting, used, engine.num_evictions, engine.num_adopted, engine.num_tokens
        )


@dataclass(frozen=True, slots=True)
class DecoderState:
    """A decoder, seen when its metrics are asked for."""

    engine: EngineState
    steps: int
    ahead: AheadCounts
    devices: int
    conversations: int
    snapshots: SnapshotCounts


_STATE: tuple[tuple[str, str, Callable[[DecoderState], float]], ...] = (
    ("vllm:num_requests_running", "Replies under way.", lambda s: s.engine.running),
    ("vllm:num_requests_waiting", "Replies asked for, without blocks.", lambda s: s.engine.waiting),
    ("vllm:kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", lambda s: s.engine.usage),
    ("deltarelay_devices", "Devices connected over the relay.", lambda s: s.devices),
    ("deltarelay_conversations", "Conversations held.", lambda s: s.conversations),
    (
        "deltarelay_restore_seconds",
        "That restoring took at the start.",
        lambda s: s.snapshots.restore_seconds,
    ),
)
_COUNTS: tuple[tuple[str, str, Callable[[DecoderState], float]], ...] = (
    ("vllm:num_preemptions", "Sequences that lost their blocks.", lambda s: s.engine.evictions),
    ("vllm:prefix_cache_hits", "Tokens shared, not run.", lambda s: s.engine.adopted),
    ("deltarelay_tokens_run", "Tokens that steps ran.", lambda s: s.engine.tokens),
    ("deltarelay_steps", "Steps of the engine.", lambda s: s.steps),
    ("deltarelay_turns", "Turns that ended.", lambda s: s.ahead.turns),
    ("deltarelay_drafts", "Replies drawn ahead of their turn's end.", lambda s: s.ahead.tried),
    ("deltarelay_drafts_adopted", "Of them, replies that counted.", lambda s: s.ahead.adopted),
    ("deltarelay_drafts_dropped", "Of them, for nothing.", lambda s: s.ahead.dropped),
    (
        "deltarelay_snapshot_bytes_written",
        "Bytes of logs, keys and values.",
        lambda s: s.snapshots.bytes_written,
    ),
    (
        "deltarelay_snapshot_bytes_restored",
        "Bytes of keys and values put back.",
        lambda s: s.snapshots.bytes_restored,
    ),
    (
        "deltarelay_snapshot_tokens_restored",
        "Tokens they are of.",
        lambda s: s.snapshots.tokens_restored,
    ),
    (
        "deltarelay_snapshot_files_rejected",
        "Damaged, or of another model or version.",
        lambda s: s.snapshots.files_rejected,
    ),
    (
        "deltarelay_snapshot_evictions",
        "Conversations that went for age or room.",
        lambda s: s.snapshots.evicted,
    ),
    (
        "deltarelay_snapshot_failures",
        "Snapshots that could not be written.",
        lambda s: s.snapshots.failures,
    ),
)


class _StateCollector(Collector):
    """Gives the state a decoder was in when it was last looked at."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.state: DecoderState | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        if self.state is None:
            return
        for name, about, value in _STATE:
            gauge = GaugeMetricFamily(name, about, labels=[_LABEL])
            gauge.add_metric([self._model], value(self.state))
            yield gauge
        for name, about, value in _COUNTS:
            counter = CounterMetricFamily(name, about, labels=[_LABEL])
            counter.add_metric([self._model], value(self.state))
            yield counter


class Metrics:
    """The metrics of one decoder.

    Args:
        model: the model's name, a label of everything.
        clock: seconds; only differences count.
    """

    def __init__(self, model: str, clock: Callable[[], float]) -> None:
        self.clock, self._model = clock, model
        self._registry = CollectorRegistry()
        self._state = _StateCollector(model)
        self._registry.register(self._state)
        self._first = self._histogram(
            "vllm:time_to_first_token_seconds", "From a request, or a turn's end.", _FAST
        )
        self._gap = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a reply.", _FAST
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "To the last token of a reply.", _LONG
        )
        self._lengths = self._histogram(
            "vllm:request_generation_tokens", "Tokens of a reply.", _LENGTHS
        )
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens of replies.")
        self._ended = Counter(
            "vllm:request_success",
            "Replies, by why they ended.",
            (_LABEL, "finished_reason"),
            registry=self._registry,
        )

    def reply(self, num_prompt_tokens: int) -> "ReplyTimes":
        """A reply is asked for now, to a prompt of so many tokens."""
        self._prompt.inc(num_prompt_tokens)
        return ReplyTimes(self)

    def scrape(self, state: DecoderState) -> bytes:
        """Return everything in Prometheus' text format."""
        self._state.state = state
        return generate_latest(self._registry)

    # --- what ReplyTimes tells

    def observe_token(self, seconds: float, *, first: bool) -> None:
        """A token came so long after the last one, or after its reply was asked for."""
        (self._first if first else self._gap).observe(seconds)
        self._generated.inc()

    def observe_end(self, reason: str, seconds: float, num_tokens: int) -> None:
        """A reply ended so long after it was asked for."""
        self._ended.labels(self._model, reason).inc()
        self._whole.observe(seconds)
        self._lengths.observe(num_tokens)

    # --- inside

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, about, (_LABEL,), buckets=buckets, registry=self._registry)
        return made.labels(self._model)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(name, about, (_LABEL,), registry=self._registry).labels(self._model)


class ReplyTimes:
    """Takes the times of one reply."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._asked = self._last = metrics.clock()
        self._num_tokens = 0
        self._ended = False

    def token(self) -> None:
        """A token has come."""
        now = self._metrics.clock()
        self._metrics.observe_token(now - self._last, first=self._num_tokens == 0)
        self._last = now
        self._num_tokens += 1

    def end(self, reason: str) -> None:
        """The reply has ended. What is said after the first time does not count."""
        if not self._ended:
            self._ended = True
            seconds = self._metrics.clock() - self._asked
            self._metrics.observe_end(reason, seconds, self._num_tokens)
