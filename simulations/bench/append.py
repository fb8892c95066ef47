"""Whether an append costs what it appends: one token behind nothing, and behind 2,900."""

import statistics
import time
from random import Random

import torch

from cloud.decoder import DecoderSettings, load_brain
from cloud.engine.cache import KVCache
from cloud.engine.kernels import Kernels
from cloud.engine.plan import Plan
from cloud.engine.runner import Runner

NUM_APPENDS = 3000
WINDOW = 100


def append_growth(model: str) -> float:
    """Return the median of the last 100 of 3,000 one-token appends over that of the first 100.

    Net of attention, which reads every earlier token and so grows with them.
    """
    engine = load_brain(DecoderSettings(model=model, context=NUM_APPENDS + 1)).engine
    runner = engine.runner
    assert isinstance(runner, Runner)
    runner.kernels = watched = AttentionClock(runner.kernels)
    draw, sequence = Random(0), engine.add()
    times: list[float] = []
    for n in range(NUM_APPENDS):
        engine.splice(sequence, n, [draw.randrange(100, 40_000)])
        watched.seconds = 0.0
        result = engine.step()
        assert result is not None
        times.append(result.seconds - watched.seconds)
    return round(statistics.median(times[-WINDOW:]) / statistics.median(times[:WINDOW]), 3)


class AttentionClock:
    """Kernels that count the seconds of their attention."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.norm, self.store, self.gate = kernels.norm, kernels.store, kernels.gate
        self.seconds = 0.0

    def attend(self, layer: int, q: torch.Tensor, cache: KVCache, plan: Plan) -> torch.Tensor:
        """Attend, and count."""
        started = time.perf_counter()
        attended = self._kernels.attend(layer, q, cache, plan)
        self.seconds += time.perf_counter() - started
        return attended
