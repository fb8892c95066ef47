"""The engine alone: prefill by tokens and decode by batch, beside what the machine allows.

Same work and same keys as the peers' scripts: random token ids, a context of 256 before decoding.
"""

import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from random import Random
from typing import Any

import torch

from cloud.decoder import load_brain
from cloud.engine.cpu.limits import read_rate
from cloud.engine.cpu.runner import CpuRunner
from cloud.engine.engine import Engine
from cloud.engine.sequence import Generation, Sequence
from cloud.settings import DecoderSettings
from shared.commands import progress
from shared.frames import Sampling
from shared.nn.llama import LlamaConfig

CONTEXT = 256
PREFILLS = (8, 32, 128, 512)
BATCHES = (1, 2, 4, 8, 16, 32)
GEMM = 1024
"""Rows, columns and depth of the product that gives the machine's rate of arithmetic."""


async def bench_step(model: str, runs: int) -> dict[str, Any]:
    """Return milliseconds of prefills and decode steps, and the limits they run against."""
    brain = load_brain(DecoderSettings(model=model))
    engine, draw = brain.engine, Random(0)
    progress(f"prefill of {', '.join(map(str, PREFILLS))} tokens")
    prefill = {count: _prefill(engine, draw, count, max(5, runs // 3)) for count in PREFILLS}
    progress(f"decode of {', '.join(map(str, BATCHES))} replies at a context of {CONTEXT}")
    decode = {batch: _decode(engine, draw, batch, runs) for batch in BATCHES}
    runner = engine.runner
    assert isinstance(runner, CpuRunner)
    limits = _limits(brain.checkpoint.config, runner)
    return {
        "peer": f"deltarelay {version('deltarelay')}",
        "prefill_ms": _milliseconds(prefill),
        "decode_ms": _milliseconds(decode),
        "ttft_ms": _milliseconds(prefill),
        "limits": limits,
        "ratio": {
            "decode": {b: round(t * 1e3 / limits["read_weights_ms"], 2) for b, t in decode.items()},
            "prefill": {
                n: round(t * 1e3 / (n * limits["arithmetic_ms_per_token"]), 2)
                for n, t in prefill.items()
            },
        },
    }


def _prefill(engine: Engine, draw: Random, count: int, runs: int) -> float:
    return statistics.median(_first_token(engine, _ids(draw, count)) for _ in range(runs))


def _first_token(engine: Engine, ids: list[int]) -> float:
    sequence = engine.add()
    engine.splice(sequence, 0, ids)
    _generate(engine, sequence, 1)
    began = time.perf_counter()
    engine.step()
    took = time.perf_counter() - began
    engine.remove(sequence)
    return took


def _decode(engine: Engine, draw: Random, batch: int, runs: int) -> float:
    sequences = [engine.add() for _ in range(batch)]
    for sequence in sequences:
        engine.splice(sequence, 0, _ids(draw, CONTEXT))
    while engine.step() is not None:
        pass
    for sequence in sequences:
        _generate(engine, sequence, runs + 2)
    engine.step()
    times: list[float] = []
    for _ in range(runs):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    for sequence in sequences:
        engine.remove(sequence)
    return statistics.median(times)


def _generate(engine: Engine, sequence: Sequence, tokens: int) -> None:
    generation = Generation(Sampling(), tokens, frozenset(), lambda _token, _why: None)
    engine.generate(sequence, generation, 0.0)


def _ids(draw: Random, count: int) -> list[int]:
    return [draw.randrange(100, 40_000) for _ in range(count)]


def _limits(config: LlamaConfig, runner: CpuRunner) -> dict[str, Any]:
    """Return what reading all weights once takes, and the arithmetic of a token."""
    progress("the machine's own rates")
    bytes_per_second = read_rate(runner.team)
    torch.set_num_threads(runner.team.size)
    rates = {name: _gemm_rate(kind) for name, kind in _KINDS.items()}
    torch.set_num_threads(1)
    per_layer = sum(
        config.shapes()[f"layers.0.{part}"][0] * config.shapes()[f"layers.0.{part}"][1]
        for part in ("q", "k", "v", "o", "gate", "up", "down")
    )
    flops = 2 * config.layers * per_layer
    return {
        "read_gb_s": round(bytes_per_second / 1e9, 1),
        "weights_mb": round(runner.weight_bytes / 1e6, 1),
        "read_weights_ms": round(runner.weight_bytes / bytes_per_second * 1e3, 2),
        "gemm_gflops": {name: round(rate / 1e9) for name, rate in rates.items()},
        "arithmetic_ms_per_token": round(flops / max(rates.values()) * 1e3, 3),
    }


_KINDS = {"bf16": torch.bfloat16, "f32": torch.float32}


def _gemm_rate(kind: torch.dtype) -> float:
    a, b = (torch.randn(GEMM, GEMM).to(kind) for _ in range(2))
    return 2 * GEMM**3 / min(_seconds(lambda: a @ b) for _ in range(4))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _milliseconds(seconds: dict[int, float]) -> dict[int, float]:
    return {key: round(value * 1e3, 3) for key, value in seconds.items()}
