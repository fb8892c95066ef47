"""A decoder that is killed with SIGKILL and started again: what it takes up, and how fast.

The decoders are processes of their own, and what they did is read from their counters: tokens that
sequences found in the pool, tokens that steps ran. Only the pause of decoding is measured in a
decoder of this process, between the steps of its engine.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cloud.decoder import load_brain
from cloud.engine.batch import Batch
from cloud.engine.engine import BatchRunner, Engine
from cloud.server import Decoder
from cloud.settings import DecoderSettings
from cloud.snapshot.format import decode_head
from cloud.worker import Worker
from edge.agent import Agent, connect
from edge.talk import Talk
from shared.child import ChildDecoder, open_decoder
from shared.commands import progress
from shared.errors import LinkError
from simulations.bench.metrics import fetch_counters
from simulations.bench.relay import text_of
from simulations.broker import free_port

SESSIONS, TOKENS, MORE = 32, 512, 64
"""Sessions, tokens of each, and of one more turn."""
OVERHEAD = 24
"""Tokens of a session and of a turn that are the template's and the reply's."""
EVERY = 0.5
"""Seconds between two looks for what has changed."""
QUIET = 1.5
"""Seconds without a change after which nothing more is expected."""
PATIENCE = 300.0
TALKERS = 4
"""Who is replied to all the time while pauses are measured."""
STORY = "Tell me a long story about a road trip, with every town and every meal on the way."


async def bench_recover(model: str) -> dict[str, Any]:
    """Return what came back after a kill, at which rate, and what snapshots cost while serving."""
    result = await measure_recovery(model, SESSIONS, TOKENS)
    progress(f"{TALKERS} replies under way while {SESSIONS} sessions are written")
    result["pause_ms_p99"] = round(await _pause(model) * 1e3, 3)
    return result


async def measure_recovery(
    model: str, sessions: int, tokens: int, changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Kill a decoder that holds `sessions` of about `tokens` tokens, and start it again.

    Args:
        changes: settings of the decoders.

    Raises:
        LinkError: a session did not answer again.
    """
    with tempfile.TemporaryDirectory(prefix="deltarelay-recover-") as root:
        place = _Place(model, Path(root), free_port(), tuple(changes))
        async with AsyncExitStack() as stack:
            talks, ratio, warm_up = await _fill(place, stack, sessions, tokens)
            progress("it is started again")
            warm, counters = await _restart(place, talks, warm_up)
        progress("it is started without its keys and values")
        for path in place.snapshots.glob("*/*/kv-*"):
            path.unlink()
        cold = await _start_cold(place)
    hits, run, megabytes, seconds = counters
    return {
        "sessions": len(talks),
        "restored_share": round(hits / (hits + run), 4),
        "restore_mb_s": round(megabytes / seconds),
        "restore_speedup": round(cold / warm, 1),
        "bytes_ratio": round(ratio, 3),
    }


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the decoders of a bench, one after the other, listen and write."""

    model: str
    root: Path
    port: int
    changes: tuple[str, ...]

    @property
    def address(self) -> str:
        """Where vehicles connect."""
        return f"shm://{self.root}/decoder.sock"

    @property
    def snapshots(self) -> Path:
        """The folder of the snapshots."""
        return self.root / "snapshots"

    @asynccontextmanager
    async def decoder(self) -> AsyncGenerator[ChildDecoder, None]:
        """Start a decoder; it has taken up what there is when the block begins."""
        changes = (
            f'http="127.0.0.1:{self.port}"',
            f'snapshots="{self.snapshots}"',
            f"snapshot_every={EVERY}",
            "ahead_tokens=0",
            *self.changes,
        )
        async with open_decoder(self.model, listen=[self.address], changes=changes) as child:
            yield child

    async def counters(self, *names: str) -> list[float]:
        """Return counters of the decoder that runs."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return await asyncio.to_thread(fetch_counters, url, *names)
            except LinkError:  # HTTP comes up behind the relay
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.02)

    async def quiet(self, name: str) -> tuple[float, float]:
        """Wait until a counter stands; return it, and when it changed last."""
        last, changed = -1.0, time.monotonic()
        while time.monotonic() < changed + QUIET:
            [value] = await self.counters(name)
            if value != last:
                last, changed = value, time.monotonic()
            await asyncio.sleep(0.02)
        return last, changed


RUN, HITS = "deltarelay_tokens_run_total", "vllm:prefix_cache_hits_total"
WRITTEN = "deltarelay_snapshot_bytes_written_total"
BYTES = "deltarelay_snapshot_bytes_restored_total"
SECONDS = "deltarelay_restore_seconds"


async def _fill(
    place: _Place, stack: AsyncExitStack, sessions: int, tokens: int
) -> tuple[list[Talk], float, float]:
    """Fill a decoder and kill it.

    Returns:
        The talks, which outlive it; bytes that one more turn of each wrote, over those of its keys
        and values; tokens that a decoder runs to warm up.
    """
    async with place.decoder() as child:
        [warm_up] = await place.counters(RUN)
        progress(f"{sessions} sessions of {tokens} tokens")
        talks: list[Talk] = []
        agents: list[Agent] = []
        for number in range(sessions):
            agent = await stack.enter_async_context(
                connect(place.address, device=f"vehicle-{number}")
            )
            agents.append(agent)
            talks.append(await stack.enter_async_context(agent.conversation(max_tokens=4)))
        length = tokens - MORE - 2 * OVERHEAD
        first = [text_of(a.tokenizer, length - n % 16, n) for n, a in enumerate(agents)]
        await _all_answer(talks, first)  # of all lengths: blocks end anywhere in the next turn
        before, _ = await place.quiet(WRITTEN)
        [run] = await place.counters(RUN)
        progress(f"one more turn of {MORE} tokens each")
        length = MORE - OVERHEAD
        await _all_answer(
            talks, [text_of(a.tokenizer, length, 100 + n) for n, a in enumerate(agents)]
        )
        after, _ = await place.quiet(WRITTEN)
        [run_after] = await place.counters(RUN)
        child.process.kill()  # SIGKILL
        await asyncio.to_thread(child.process.wait)
    due = (run_after - run) / 16 * _block_bytes(place.snapshots)
    return talks, (after - before) / due, warm_up


async def _restart(
    place: _Place, talks: list[Talk], warm_up: float
) -> tuple[float, tuple[float, float, float, float]]:
    """Start the decoder again, and have every session answer.

    Returns:
        Seconds until it has all keys and values; tokens that were found and that were run until
        then, megabytes restored, and seconds that took.
    """
    async with place.decoder():
        began = time.monotonic()
        run, idle_at = await place.quiet(RUN)
        hits, restored, seconds = await place.counters(HITS, BYTES, SECONDS)
        await _all_answer(talks, ["And then home?"] * len(talks))
        return seconds + idle_at - began, (hits, run - warm_up, restored / 1e6, seconds)


async def _start_cold(place: _Place) -> float:
    """Return the seconds in which a decoder that has only the logs prefills them."""
    async with place.decoder():
        began = time.monotonic()
        _, idle_at = await place.quiet(RUN)
        [seconds] = await place.counters(SECONDS)
        return seconds + idle_at - began


async def _all_answer(talks: Sequence[Talk], texts: Sequence[str]) -> None:
    async def ask(talk: Talk, text: str) -> None:
        async for _ in talk.finish(text):
            pass
        if talk.reply is None or not talk.reply.ids:
            raise LinkError("a session gave no reply")

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        for talk, text in zip(talks, texts, strict=True):
            group.create_task(ask(talk, text))


def _block_bytes(snapshots: Path) -> int:
    path = next(iter(snapshots.glob("*/*/kv-*")))
    data = path.read_bytes()
    return decode_head(data, len(data), str(path)).block_bytes


# --- the pause of decoding


class _Gaps:
    """Runs batches; keeps the seconds between them, with a snapshot's copying and without."""

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner
        self._ended = 0.0
        self.copying = False
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        """Of gaps in which replies wait: with copying and without."""

    def run(self, batch: Batch) -> torch.Tensor:
        """Run, and note when."""
        if any(chunk.sequence.decoding for chunk in batch.chunks):
            self.seconds[self.copying].append(time.perf_counter() - self._ended)
        self.copying = False
        logits = self._runner.run(batch)
        self._ended = time.perf_counter()
        return logits

    def copy_block(self, source: int, target: int) -> None:
        """Copy the keys and values of a block."""
        self._runner.copy_block(source, target)


def _watch(worker: Worker, gaps: _Gaps) -> None:
    """Have the gaps between steps know when a snapshot copied in them."""
    submit = worker.submit_chore

    def submit_and_note(chore: Callable[[Engine], None]) -> None:
        def noted(engine: Engine) -> None:
            gaps.copying = True
            chore(engine)

        submit(noted)

    worker.submit_chore = submit_and_note  # type: ignore[method-assign]


async def _pause(model: str) -> float:
    """Return the 99th percentile of the seconds that a snapshot puts between two steps.

    A gap between steps is there without a snapshot, too: the median of those is taken off.
    """
    with tempfile.TemporaryDirectory(prefix="deltarelay-recover-") as folder:
        settings = DecoderSettings(
            model=model, snapshots=f"{folder}/snapshots", snapshot_every=EVERY, ahead_tokens=0
        )
        decoder = Decoder(load_brain(settings), settings)
        gaps = decoder.brain.engine.runner = _Gaps(decoder.brain.engine.runner)
        _watch(decoder.worker, gaps)
        address = f"shm://{folder}/bench.sock"
        await decoder.start([address])
        try:
            async with AsyncExitStack() as stack:
                await _talk_all_the_time(stack, address)
                agent = await stack.enter_async_context(connect(address, device="writer"))
                talks = [
                    await stack.enter_async_context(agent.conversation(max_tokens=1))
                    for _ in range(SESSIONS)
                ]
                texts = [text_of(agent.tokenizer, TOKENS, n) for n in range(SESSIONS)]
                await _all_answer(talks, texts)
                await _until_written(decoder)
        finally:
            await decoder.close()
    usual = statistics.median(gaps.seconds[False])
    return statistics.quantiles(gaps.seconds[True], n=100, method="inclusive")[98] - usual


async def _talk_all_the_time(stack: AsyncExitStack, address: str) -> None:
    """Have some agents that are always being replied to, until the stack is left."""

    async def listen(agent: Agent, number: int) -> None:
        while True:
            async with agent.conversation(max_tokens=200) as talk:
                async for _ in talk.finish(f"{number}. {STORY}"):
                    pass

    group = await stack.enter_async_context(asyncio.TaskGroup())
    agents = [
        await stack.enter_async_context(connect(address, device=f"talker-{n}"))
        for n in range(TALKERS)
    ]
    tasks = [group.create_task(listen(agent, n)) for n, agent in enumerate(agents)]

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    stack.push_async_callback(stop)


async def _until_written(decoder: Decoder) -> None:
    """Wait until keys and values of all sessions are in files."""
    assert decoder.snapshots is not None
    due = SESSIONS * TOKENS // 16 * decoder.brain.cache.block_bytes
    until = time.monotonic() + PATIENCE
    while decoder.snapshots.counts.bytes_written < due:
        if time.monotonic() > until:
            raise LinkError(f"{due} bytes of snapshots were not written in {PATIENCE:g} s")
        await asyncio.sleep(EVERY)
