"""Whether an append costs what it appends: one token behind nothing, and behind 2,900."""

import statistics
import time
from random import Random

import torch

from cloud.decoder import load_brain
from cloud.engine.batch import Batch
from cloud.engine.cpu.runner import CpuRunner
from cloud.settings import DecoderSettings

NUM_APPENDS = 3000
WINDOW = 100


def append_growth(model: str) -> float:
    """Return the median of the last 100 of 3,000 one-token appends over that of the first 100.

    Net of attention, which reads every earlier token and so grows with them: each append's
    attention is run once more, alone, and its time taken off.
    """
    engine = load_brain(DecoderSettings(model=model, context=NUM_APPENDS + 1)).engine
    runner = engine.runner
    assert isinstance(runner, CpuRunner)
    engine.runner = watched = AttentionClock(runner)
    draw, sequence = Random(0), engine.add()
    times: list[float] = []
    for n in range(NUM_APPENDS):
        engine.splice(sequence, n, [draw.randrange(100, 40_000)])
        engine.step()
        times.append(watched.step_seconds - watched.attention_seconds)
    return round(statistics.median(times[-WINDOW:]) / statistics.median(times[:WINDOW]), 3)


class AttentionClock:
    """Runs batches, and their attention once more; counts the seconds of both."""

    def __init__(self, runner: CpuRunner) -> None:
        self._runner = runner
        self.step_seconds = self.attention_seconds = 0.0

    def run(self, batch: Batch) -> torch.Tensor:
        """Run, and count."""
        began = time.perf_counter()
        logits = self._runner.run(batch)
        ended = time.perf_counter()
        self._runner.run_attention(batch)
        self.step_seconds = ended - began
        self.attention_seconds = time.perf_counter() - ended
        return logits

    def copy_block(self, source: int, target: int) -> None:
        """Copy the keys and values of a block."""
        self._runner.copy_block(source, target)
