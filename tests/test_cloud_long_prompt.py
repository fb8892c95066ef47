"""Replies do not starve behind a long prompt: on the real engine and the model of the demo."""

import time
from collections.abc import Callable
from random import Random

import pytest

from cloud.decoder import load_brain
from cloud.engine.engine import Engine
from cloud.engine.fairness import Account
from cloud.engine.sequence import Generation, Sequence
from cloud.settings import DecoderSettings
from shared.frames import Sampling
from shared.models import known_models
from tests.engine_model import percentile

MODEL = "smollm2-135m-instruct"
SESSIONS, WARM, QUIET, PROMPT = 8, 64, 300, 8000


def begin(engine: Engine, ids: list[int], tokens: int) -> Sequence:
    """Ask for a reply on an account of its own."""
    sequence = engine.add(account=Account())
    engine.splice(sequence, 0, ids)
    generation = Generation(Sampling(), tokens, frozenset(), lambda _token, _why: None)
    engine.generate(sequence, generation, 0.0)
    return sequence


def gaps(engine: Engine, replies: list[Sequence], goes_on: Callable[[], bool]) -> list[float]:
    """Run steps while `goes_on()`; return the seconds between two tokens of each reply."""
    seen = {s.number: (len(s.ids), time.perf_counter()) for s in replies}
    out: list[float] = []
    while goes_on():
        assert engine.step() is not None
        now = time.perf_counter()
        for sequence in replies:
            length, since = seen[sequence.number]
            if len(sequence.ids) > length:
                seen[sequence.number] = len(sequence.ids), now
                out.append(now - since)
    return out


@pytest.mark.slow
def test_eight_thousand_tokens_beside_eight_replies_leave_p99_within_three_times_quiet() -> None:
    """Quiet: the same eight replies, at the same length, with nothing else to do."""
    if not any(model.name == MODEL and model.is_pulled for model in known_models()):
        pytest.skip(f"{MODEL} is not pulled: `deltarelay models pull`")
    engine = load_brain(DecoderSettings(model=MODEL, context=8192)).engine
    rng = Random(1)
    words = [[rng.randrange(100, 40_000) for _ in range(50)] for _ in range(SESSIONS)]
    replies = [begin(engine, ids, 100_000) for ids in words]
    gaps(engine, replies, lambda: len(replies[-1].ids) < 50 + WARM)
    quiet = gaps(engine, replies, lambda: len(replies[-1].ids) < 50 + WARM + QUIET)
    prompt = begin(engine, [rng.randrange(100, 40_000) for _ in range(PROMPT)], 1)
    beside = gaps(engine, replies, lambda: prompt.generation is not None)
    print(f"quiet {percentile(quiet, 0.99):.4f} s, beside {percentile(beside, 0.99):.4f} s")
    assert percentile(beside, 0.99) <= 3 * percentile(quiet, 0.99)
