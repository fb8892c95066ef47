"""Broker, decoder and vehicles as processes, with a link between, and what breaks of them.

vehicle process -- bad frames -- TcpProxy (one link a vehicle) -- broker -- decoder process
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import isinf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from edge.agent import connect
from shared.child import ChildDecoder, open_decoder
from shared.commands import progress
from simulations.broker import Broker, open_broker
from simulations.link import Direction, Impairments, TcpProxy, Traced, open_proxy
from simulations.simulate.compare import differences
from simulations.simulate.drive import Drive
from simulations.simulate.faults import Fault, most_within
from simulations.simulate.fleet import Fleet
from simulations.simulate.mqtt_watch import MqttWatch

DELAY = 0.02
"""Seconds one way, besides waiting for an opportunity."""
LOSS, DUPLICATE, REORDER = 0.05, 0.02, 0.2
"""Shares of the frames; some are overtaken only while a connection is new."""
DEADLINE = 60.0
"""Seconds that a turn may take besides the tunnel."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a world is made of. `stack` ends what is added."""

    stack: AsyncExitStack
    folder: Path
    snapshots: Path
    broker: Broker
    decoder: ChildDecoder


@asynccontextmanager
async def open_world(
    model: str, drive: Drive, seed: int, changes: Sequence[str] = ()
) -> AsyncGenerator["World", None]:
    """Start a broker and a decoder; when the block is left, all is stopped and deleted.

    Args:
        changes: settings of the decoder.

    Raises:
        LinkError: one of them does not start.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="deltarelay-")))
        broker = stack.enter_context(open_broker())
        url = f"mqtt://{broker.host}:{broker.port}"
        progress(f"broker: {broker.name} at {url}; decoder: loading {model}")
        decoder = await stack.enter_async_context(
            open_decoder(model, listen=[url], changes=[f'snapshots="{folder}/snapshots"', *changes])
        )
        async with connect(decoder.address):  # fetches the tokenizer over a good link
            pass
        yield World(Parts(stack, folder, folder / "snapshots", broker, decoder), drive, seed)


class World:
    """Broker, decoder, and vehicles behind one proxy each."""

    def __init__(self, parts: Parts, drive: Drive, seed: int) -> None:
        self._stack = parts.stack
        self._broker, self._decoder = parts.broker, parts.decoder
        self._drive, self._seed, self._snapshots = drive, seed, parts.snapshots
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._fleet = Fleet(parts.stack, parts.folder, seed)
        self._proxies: list[TcpProxy] = []
        self._watches: dict[tuple[int, int], MqttWatch] = {}
        """By vehicle and connection."""

    async def drive(self, vehicles: int, seconds: float, faults: Sequence[Fault]) -> None:
        """Let all vehicles drive, let everything break that shall, and hear the last replies.

        Raises:
            LinkError: a vehicle fails, or is not done in time.
        """
        for number in range(vehicles):
            await self._add_vehicle(number)
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                group.create_task(self._break(fault), name=str(fault))
            group.create_task(asyncio.sleep(self._until(seconds)), name="drive")
        progress(f"{seconds:g} s are over: last replies")
        await self._fleet.stop()
        await self._fleet.leave("leave")
        await asyncio.to_thread(self._decoder.stop)

    def figures(self) -> dict[str, Any]:
        """Compare what drivers, vehicles and the decoder, which has ended, have."""
        ledger, vehicles = self._fleet.ledger, len(self._fleet.vehicles)
        differing = differences(self._snapshots, ledger.talks)
        unanswered = ledger.unanswered(self._fleet.script)
        for what in (*unanswered, *ledger.contradictions, *differing):
            progress(f"broken: {what}")
        connects = [at for proxy in self._proxies for at in proxy.connected_at]
        watches = self._watches.values()
        drain = ledger.drained_after(self._began + self._drive.tunnel[1])
        return {
            "turns": len(ledger.ended),
            "answered_once": len(ledger.ended) - len(unanswered),
            "differing_logs": len(differing) + self._fleet.num_missing,
            "drain_s": None if isinf(drain) else round(drain, 2),
            "max_burst": max((watch.max_unacknowledged for watch in watches), default=0),
            "reconnects": sum(watch.was_accepted for watch in watches) - vehicles,
            "contradictions": len(ledger.contradictions),
            "connects": len(connects),
            "connects_in_a_second": most_within(connects, 1.0),
            "vehicles": vehicles,
        }

    def _until(self, seconds: float) -> float:
        return max(0.0, self._began + seconds - self._loop.time())

    async def _add_vehicle(self, number: int) -> None:
        rng = Random(f"{self._seed}/link/{number}")
        up, down = (
            Direction(
                rng,
                Impairments(delay=DELAY),
                Traced(self._drive.trace, start=self._began, offset=self._drive.offset),
            )
            for _ in range(2)
        )
        proxy = await self._stack.enter_async_context(
            open_proxy(
                self._broker.host,
                self._broker.port,
                up=up,
                down=down,
                tap=partial(self._saw, number),
            )
        )
        self._proxies.append(proxy)
        begin, end = self._drive.tunnel
        options = {
            "loss": LOSS,
            "duplicate": DUPLICATE,
            "reorder": REORDER,
            "deadline": DEADLINE + end - begin,
        }
        await self._fleet.add(f"car-{number}", f"mqtt://{proxy.host}:{proxy.port}", options)

    def _saw(self, vehicle: int, connection: int, way: str, data: bytes) -> None:
        self._watches.setdefault((vehicle, connection), MqttWatch()).see(way, data)

    async def _break(self, fault: Fault) -> None:
        await asyncio.sleep(self._until(fault.at))
        progress(f"now: {fault}")
        match fault.kind:
            case "broker":
                await asyncio.to_thread(self._broker.stop)
                await asyncio.sleep(fault.away)
                await asyncio.to_thread(self._broker.start)
            case "decoder":
                await asyncio.to_thread(self._decoder.kill)
                await asyncio.sleep(fault.away)
                await self._decoder.start()
            case "vehicle":
                await self._fleet.vehicles[fault.vehicle].crash(fault.away)
