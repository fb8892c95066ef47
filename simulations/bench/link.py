"""One-way latency between two processes, session to session; and bytes per turn."""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from edge.door import door_to
from edge.tokenizer import StreamingEncoder
from shared.channel import Channel
from shared.commands import progress
from shared.errors import LinkError
from shared.frames import HelloBody, OpenBody
from shared.models import model_path
from shared.session import CloudSession, Connected, EdgeSession, Event, Greeted
from shared.session.cloud import greeting
from shared.tokenizer import Tokenizer, load_tokenizer
from simulations.bench.receiver import allow_all, nobody
from simulations.bench.show import spread
from simulations.bench.wake import bare_wake
from simulations.broker import open_broker
from simulations.dialogues import load_dialogues
from simulations.report import mqtt_bytes
from simulations.typist import Update, type_text
from simulations.vehicle import json_size

NUM_FRAMES = 1000
GAP = 0.002
"""Seconds between two frames: processors go idle in between, as while somebody types."""


async def bench_link(model: str, runs: int) -> dict[str, Any]:
    """Return one-way latencies by link, and bytes per turn against JSON text."""
    del runs
    progress("shared memory, one way")
    with tempfile.TemporaryDirectory(prefix="deltarelay-") as folder:
        shm = await _one_way(f"shm://{folder}/bench.sock", 1e6)
    floor = spread(await bare_wake(GAP), 1e6)
    progress("MQTT QoS 1, one way")
    with open_broker() as broker:
        mqtt = await _one_way(f"mqtt://{broker.host}:{broker.port}", 1e3)
    return {
        "shm": {"one_way_us": shm, "bare_wake_us": floor},
        "mqtt": {"one_way_ms": mqtt, "broker": broker.name},
        "bytes_per_turn": bytes_per_turn(_tokenizer(model)),
    }


async def _one_way(address: str, scale: float) -> dict[str, float]:
    """Send frames of a few tokens to a process that notes when its session has applied them."""
    program = [sys.executable, "-m", "simulations.bench.receiver", address, str(NUM_FRAMES)]
    pipe = asyncio.subprocess.PIPE
    receiver = await asyncio.create_subprocess_exec(*program, stdout=pipe, limit=1 << 24)
    assert receiver.stdout is not None
    try:
        await receiver.stdout.readline()
        sent = await _send(address)
        line = await asyncio.wait_for(receiver.stdout.readline(), 10)
    finally:
        if receiver.returncode is None:
            receiver.kill()
        await receiver.wait()
    arrived = json.loads(line)
    if len(arrived) != len(sent):
        raise LinkError(f"{len(sent)} frames were sent over {address}, {len(arrived)} arrived")
    return spread([b - a for a, b in zip(sent, arrived, strict=True)], scale)


async def _send(address: str) -> list[float]:
    transport = await door_to(address, fleet="bench", device="sender").open()
    session = EdgeSession(HelloBody("sender", "bench"))
    connected = asyncio.Event()

    def on_events(events: Sequence[Event]) -> None:
        if any(isinstance(event, Connected) for event in events):
            connected.set()

    channel = Channel(
        session, transport, time.monotonic, on_events=on_events, on_closed=lambda _: None
    )
    session.connect(time.monotonic())
    channel.start()
    await asyncio.wait_for(connected.wait(), 5)
    stream = session.open(OpenBody("bench"))
    channel.pump()
    await asyncio.sleep(0.1)
    sent: list[float] = []
    for n in range(NUM_FRAMES):
        await asyncio.sleep(GAP)
        now = time.monotonic()
        stream.revise(len(stream.log), (n, 1000 + n, 2000 + n), ())
        session.touch(stream, now, urgent=True)
        channel.pump()
        sent.append(now)
    await asyncio.sleep(0.2)
    channel.close()
    return sent


def _tokenizer(model: str) -> Tokenizer:
    from shared.nn.checkpoint import load_checkpoint

    return load_tokenizer(load_checkpoint(Path(model_path(model))).tokenizer)


def bytes_per_turn(tokenizer: Tokenizer) -> dict[str, float]:
    """Return mean bytes up per typed turn, as MQTT messages: relayed, and as JSON text."""
    relay = resent = once = turns = 0
    for dialogue in load_dialogues():
        for turn in dialogue.turns:
            updates = type_text(turn.text, Random(turn.text))
            relay += mqtt_bytes(*relayed_frames(tokenizer, updates))
            sizes = [json_size(update.text) for update in updates]
            resent += mqtt_bytes(sum(sizes), len(sizes))
            once += mqtt_bytes(json_size(turn.text), 1)
            turns += 1
    return {
        "relay": round(relay / turns),
        "json_resent": round(resent / turns),
        "json_once": round(once / turns),
        "turns": turns,
    }


def relayed_frames(tokenizer: Tokenizer, updates: Sequence[Update]) -> tuple[int, int]:
    """Return bytes and number of the frames that one turn sends up, in simulated time."""
    pair = Pair()
    stream = pair.edge.open(OpenBody("bench"))
    pair.exchange(0.0)
    encoder = StreamingEncoder(tokenizer)
    pair.sizes.clear()
    for update in updates:
        while (due := pair.edge.timer()) is not None and due <= update.at:
            pair.exchange(due)
        revision = encoder.revise(update.text, update.stable or None)
        urgent = stream.revise(revision.keep, revision.ids, revision.tail)
        pair.edge.touch(stream, update.at, urgent=urgent)
        pair.exchange(update.at)
    stream.end()
    pair.exchange(updates[-1].at)
    return sum(pair.sizes), len(pair.sizes)


class Pair:
    """An edge and a decoder without a link between them: frames arrive at once."""

    def __init__(self) -> None:
        self.edge = EdgeSession(HelloBody("bench", "bench"))
        self._cloud = CloudSession(allow_all)
        self.sizes: list[int] = []
        """Bytes of every frame that went up."""
        self.edge.connect(0.0)
        self.exchange(0.0)

    def exchange(self, now: float) -> None:
        """Let both ends run what is due, and hand over frames until neither has one."""
        self.edge.poll(now)
        self._cloud.poll(now)
        while up := self.edge.take_outgoing():
            self.sizes += [len(out.data) for out in up]
            for out in up:
                for event in self._cloud.receive(out.data, now):
                    if isinstance(event, Greeted):
                        self._cloud.welcome(greeting(event.hello, nobody(), 0), {})
            for out in self._cloud.take_outgoing():
                self.edge.receive(out.data, now)
            self.edge.poll(now)
