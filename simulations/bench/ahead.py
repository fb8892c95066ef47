"""Replies drawn ahead: how often they are adopted, and what they cost those who are replied to.

One vehicle speaks recognized turns, four others are replied to all the time. Windows with and
without drawing ahead take turns.
"""

import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import torch

from cloud.access.admission import DEFAULT_TENANT
from cloud.decoder import load_brain
from cloud.engine.account import Account
from cloud.engine.batch import Batch
from cloud.engine.engine import BatchRunner
from cloud.server import Decoder
from cloud.settings import DecoderSettings
from edge.agent import Agent, connect
from shared.commands import progress
from simulations.bench.show import spread
from simulations.spoken import SYSTEM, SpokenTurn, spoken_turns

OTHERS = 4
WINDOW = 20.0
"""Seconds."""
STORY = "Tell me a long story about a road trip, with every town and every meal on the way."


async def bench_ahead(model: str, runs: int) -> dict[str, Any]:
    """Return what became of drafts, and the others' inter-token times with them over without."""
    settings = DecoderSettings(model=model)
    decoder = Decoder(load_brain(settings), settings)
    engine, ahead = decoder.brain.engine, decoder.voice.ahead
    speaking = decoder.admission.account("speaker", DEFAULT_TENANT)
    engine.runner = prefilled = PrefillCount(engine.runner, speaking)
    tokens, turns, final_tokens = ahead.tokens, 0, 0
    between: dict[bool, list[float]] = {True: [], False: []}
    spoken, draw = spoken_turns(), Random(0)
    with tempfile.TemporaryDirectory(prefix="deltarelay-") as folder:
        address = f"shm://{folder}/bench.sock"
        await decoder.start([address])
        async with connect(address, device="speaker") as speaker, _others(address) as others:
            for window in range(2 * max(3, runs // 3)):
                on = window % 2 == 0
                progress(f"window {window + 1}: {'with' if on else 'without'} drawing ahead")
                ahead.tokens, prefilled.counting = tokens if on else 0, on
                others.times = between[on]
                until = time.monotonic() + WINDOW
                while time.monotonic() < until:
                    length = await _speak(speaker, draw.choice(spoken))
                    turns, final_tokens = turns + on, final_tokens + length * on
        await decoder.close()
    counts = decoder.voice.ahead_counts
    p50, p95 = (_percentile(between[True], p) / _percentile(between[False], p) for p in (50, 95))
    return {
        "adopted_share": round(counts.adopted / max(turns, 1), 3),
        "adopted_ms": spread(list(counts.seconds), 1e3),
        "dropped": counts.dropped,
        "prefilled_per_final_token": round(prefilled.tokens / max(final_tokens, 1), 2),
        "others_itl_ratio": {"p50": round(p50, 3), "p95": round(p95, 3)},
        "turns": turns,
    }


class PrefillCount:
    """Runs batches; counts an account's tokens, but for those of replies under way."""

    def __init__(self, runner: BatchRunner, account: Account) -> None:
        self._runner, self._account = runner, account
        self.tokens = 0
        self.counting = False

    def run(self, batch: Batch) -> torch.Tensor:
        """Run, and count."""
        if self.counting:
            own = [c for c in batch.chunks if c.sequence.account is self._account]
            self.tokens += sum(c.count for c in own if c.sequence.is_ahead or c.count > c.sample)
        return self._runner.run(batch)

    def copy_block(self, source: int, target: int) -> None:
        """Copy the keys and values of a block."""
        self._runner.copy_block(source, target)


async def _speak(agent: Agent, turn: SpokenTurn) -> int:
    """Say one turn at natural speed and hear two tokens of the reply; return the turn's tokens."""
    async with agent.conversation(system=SYSTEM, max_tokens=2) as talk:
        began = time.monotonic()
        for at, text in turn.updates:
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            await talk.revise(text)
        await asyncio.sleep(max(0.0, began + turn.ends_at - time.monotonic()))
        async for _ in talk.finish(turn.final):
            pass
    return len(agent.tokenizer.encode(turn.final))


class _Times:
    """Where the seconds between two tokens go."""

    def __init__(self) -> None:
        self.times: list[float] = []


@asynccontextmanager
async def _others(address: str) -> AsyncGenerator[_Times, None]:
    """Have some agents that are always being replied to."""
    kept = _Times()
    async with contextlib.AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        agents = [
            await stack.enter_async_context(connect(address, device=f"other-{n}"))
            for n in range(OTHERS)
        ]
        tasks = [group.create_task(_listen(agent, kept)) for agent in agents]
        yield kept
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listen(agent: Agent, kept: _Times) -> None:
    for number in itertools.count():
        async with agent.conversation(max_tokens=200) as talk:
            last = None
            async for _ in talk.finish(f"{number}. {STORY}"):
                now = time.monotonic()
                if last is not None:
                    kept.times.append(now - last)
                last = now


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
