"""Vehicles that speak at natural speed, all at once: what the drivers of a fleet wait for.

The load is that of the peers' `fleet_load.py`, which sends whole turns to a server: the same turns
in the same order, the same silences and conversations. Here words are relayed as they are
recognized. As there, the decoder is a process of its own and all vehicles share another.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from edge.agent import Agent, connect
from edge.talk import Talk
from shared.child import open_decoder
from shared.commands import progress
from shared.errors import TurnError
from simulations.bench.metrics import fetch_counters
from simulations.bench.show import spread
from simulations.broker import free_port, open_broker
from simulations.spoken import SYSTEM, SpokenTurn, spoken_turns

START = 4.0
"""Seconds within which vehicles begin to speak, evenly drawn."""
TURNS = 4
"""Turns of a conversation."""
PAUSE = 1.0
"""Seconds between a reply and the next turn; after an error too, before another conversation."""
REPLY_TOKENS = 32
"""Most tokens of a reply."""
PATIENCE = 60.0
"""Seconds from the end of a turn to the end of its reply; what takes longer is an error."""
WITHIN = 0.5
"""Seconds to the first text that pass for an answer at once."""


@dataclass(slots=True)
class Record:
    """What all vehicles of a fleet noted, in seconds."""

    first: list[float] = field(default_factory=list[float])
    """From the end of a turn to the first text of its reply, for every turn that was answered."""
    between: list[float] = field(default_factory=list[float])
    """From one piece of a reply's text to the next."""
    late: list[float] = field(default_factory=list[float])
    """By how much words and ends of turns came later than they were due: the load's own fault."""
    errors: list[str] = field(default_factory=list[str])
    cpu_share: float = 0.0
    """Processor time of the vehicles' process over time that passed."""


async def bench_fleet(model: str, vehicles: int, seconds: float, link: str) -> dict[str, Any]:
    """Return what a fleet waited for.

    Args:
        vehicles: how many speak at once.
        seconds: how long they begin turns.
        link: `shm` or `mqtt`, on this host.
    """
    http = f"127.0.0.1:{free_port()}"
    async with _serving(model, link, http) as address:
        progress(f"{vehicles} vehicles connect over {link}")
        record = await drive_fleet(address, vehicles, seconds)
        turns, adopted = await asyncio.to_thread(
            fetch_counters,
            f"http://{http}/metrics",
            "deltarelay_turns_total",
            "deltarelay_drafts_adopted_total",
        )
    for error in record.errors[:3]:
        progress(error)
    return summarize(vehicles, record, adopted / max(turns, 1))


@asynccontextmanager
async def _serving(model: str, link: str, http: str) -> AsyncGenerator[str, None]:
    """Run a decoder, and a broker if the link needs one; give where vehicles connect."""
    async with AsyncExitStack() as stack:
        listen: list[str] = []
        if link == "mqtt":
            broker = stack.enter_context(open_broker())
            listen.append(f"mqtt://{broker.host}:{broker.port}")
        decoder = open_decoder(model, listen=listen, changes=[f'http="{http}"'])
        child = await stack.enter_async_context(decoder)
        yield listen[0] if listen else child.address


def summarize(vehicles: int, record: Record, adopted_share: float) -> dict[str, Any]:
    """Return the figures; percentiles by the peers' rule."""
    num_turns = len(record.first)
    return {
        "vehicles": vehicles,
        "ttft_ms": spread(record.first, 1e3, "exclusive"),
        "itl_ms": spread(record.between, 1e3, "exclusive"),
        "turns": num_turns,
        "within_500ms": round(sum(s <= WITHIN for s in record.first) / max(num_turns, 1), 3),
        "adopted_share": round(adopted_share, 3),
        "errors": len(record.errors),
        "driver": {
            "cpu_percent": round(record.cpu_share * 100, 1),
            "late_ms": spread(record.late, 1e3),
        },
    }


async def drive_fleet(address: str, vehicles: int, seconds: float) -> Record:
    """Connect vehicles to a decoder and let them all speak.

    Raises:
        LinkError: one cannot connect.
    """
    loop = asyncio.get_running_loop()
    record, turns = Record(), spoken_turns()
    async with AsyncExitStack() as stack:
        fleet = [
            Vehicle(
                number,
                await stack.enter_async_context(connect(address, device=f"vehicle-{number}")),
                turns,
                record,
            )
            for number in range(vehicles)
        ]
        progress(f"they speak for {seconds:g} s")
        spent, began = time.process_time(), loop.time()
        async with asyncio.TaskGroup() as group:
            for vehicle in fleet:
                group.create_task(vehicle.drive(began + seconds), name=f"vehicle-{vehicle.number}")
        record.cpu_share = (time.process_time() - spent) / (loop.time() - began)
    return record


class Vehicle:
    """Says recognized turns, one conversation after the other. Its clock is the event loop's.

    Args:
        number: seeds when it begins and what it says.
    """

    def __init__(
        self, number: int, agent: Agent, turns: Sequence[SpokenTurn], record: Record
    ) -> None:
        self.number = number
        self._agent, self._turns, self._record = agent, turns, record
        self._draw = Random(number)

    async def drive(self, until: float) -> None:
        """Speak; no turn ends after `until`, a reply under way is heard out."""
        await asyncio.sleep(self._draw.uniform(0, START))
        while _now() < until:
            try:
                await self._converse(until)
            except Exception as error:  # a failure of decoder or link is a figure, not our end
                self._record.errors.append(
                    f"vehicle {self.number}: {type(error).__name__}: {error}"
                )
                await asyncio.sleep(PAUSE)

    async def _converse(self, until: float) -> None:
        async with self._agent.conversation(system=SYSTEM, max_tokens=REPLY_TOKENS) as talk:
            for _ in range(TURNS):
                turn = self._draw.choice(self._turns)
                await self._speak(talk, turn)
                if _now() >= until:
                    return
                await self._listen(talk, turn.final)
                await asyncio.sleep(PAUSE)

    async def _speak(self, talk: Talk, turn: SpokenTurn) -> None:
        began = _now()
        for at, text in turn.updates:
            await self._wait(began + at)
            await talk.revise(text)
        await self._wait(began + turn.ends_at)

    async def _wait(self, due: float) -> None:
        await asyncio.sleep(due - _now())
        self._record.late.append(_now() - due)

    async def _listen(self, talk: Talk, text: str) -> None:
        """End the turn with its final text and note when the reply came."""
        times = [_now()]
        try:
            async with asyncio.timeout(PATIENCE):
                async for _ in talk.finish(text):
                    times.append(_now())
        except TimeoutError:
            raise TurnError(f"the reply took more than {PATIENCE:g} s") from None
        asked, *pieces = times
        if not pieces:
            raise TurnError("the reply has no text")
        self._record.first.append(pieces[0] - asked)
        self._record.between += [b - a for a, b in pairwise(pieces)]


def _now() -> float:
    return asyncio.get_running_loop().time()
