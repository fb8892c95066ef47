"""Broker, decoder and vehicles as processes, with a link between, and what breaks of them.

vehicle process -- bad frames -- TcpProxy (one link a vehicle) -- broker -- decoder process
"""

import asyncio
import sys
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
from simulations.simulate.children import ReportingProcess
from simulations.simulate.compare import differing_talks
from simulations.simulate.drive import Drive
from simulations.simulate.faults import Fault, most_within
from simulations.simulate.ledger import Ledger
from simulations.simulate.mqtt_watch import MqttWatch
from simulations.traveller import TALKS, scripted_turn

DELAY = 0.02
"""Seconds one way, besides waiting for an opportunity."""
LOSS, DUPLICATE = 0.05, 0.02
"""Shares of the frames."""
DEADLINE = 60.0
"""Seconds that a turn may take besides the tunnel."""
LAST_REPLIES = 90.0
"""Seconds in which a vehicle must be done when it is told to stop."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a world is made of. `stack` ends what is added."""

    stack: AsyncExitStack
    folder: Path
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
            open_decoder(model, listen=[url], changes=changes)
        )
        async with connect(decoder.address):  # fetches the tokenizer over a good link
            pass
        yield World(Parts(stack, folder, broker, decoder), drive, seed)


class World:
    """Broker, decoder, and vehicles behind one proxy each."""

    def __init__(self, parts: Parts, drive: Drive, seed: int) -> None:
        self._stack, self._folder = parts.stack, parts.folder
        self._broker, self._decoder = parts.broker, parts.decoder
        self._drive, self._seed = drive, seed
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._ledger = Ledger()
        self._vehicles: list[ReportingProcess] = []
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
        for vehicle in self._vehicles:
            await vehicle.tell("stop")
        await asyncio.gather(*(vehicle.ended(LAST_REPLIES) for vehicle in self._vehicles))

    async def figures(self) -> dict[str, Any]:
        """Compare what drivers, vehicles and decoder have."""
        differing: list[str] = []
        for vehicle in self._vehicles:
            talks = {
                talk.conversation: talk.turns
                for (device, _), talk in self._ledger.talks.items()
                if device == vehicle.name
            }
            differing += await differing_talks(self._socket, vehicle.name, talks)
        connects = [at for proxy in self._proxies for at in proxy.connected_at]
        watches = self._watches.values()
        ledger = self._ledger
        unanswered = ledger.unanswered(partial(scripted_turn, self._seed))
        for what in (*unanswered, *ledger.contradictions, *differing):
            progress(f"broken: {what}")
        drain = ledger.drained_after(self._began + self._drive.tunnel[1])
        accepted = sum(watch.was_accepted for watch in watches)
        return {
            "turns": len(ledger.ended),
            "answered_once": len(ledger.ended) - len(unanswered),
            "differing_logs": len(differing) + self._num_missing(),
            "drain_s": None if isinf(drain) else round(drain, 2),
            "max_burst": max((watch.max_unacknowledged for watch in watches), default=0),
            "reconnects": accepted - len(self._vehicles),
            "contradictions": len(ledger.contradictions),
            "connects": len(connects),
            "connects_in_a_second": most_within(connects, 1.0),
            "vehicles": len(self._vehicles),
        }

    @property
    def _socket(self) -> str:
        return self._decoder.address.removeprefix("shm://")

    def _num_missing(self) -> int:
        """Conversations that their vehicles have not reported."""
        return len(self._vehicles) * len(TALKS) - len(self._ledger.talks)

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
        device = f"car-{number}"
        vehicle = ReportingProcess(
            device,
            self._program(device, proxy),
            self._folder / f"{device}.log",
            lambda report: self._ledger.take(device, report, self._loop.time()),
        )
        self._stack.push_async_callback(vehicle.close)
        self._vehicles.append(vehicle)
        await vehicle.start()

    def _program(self, device: str, proxy: TcpProxy) -> list[str]:
        begin, end = self._drive.tunnel
        settings = {
            "to": f"mqtt://{proxy.host}:{proxy.port}",
            "device": device,
            "spool": self._folder / device,
            "loss": LOSS,
            "duplicate": DUPLICATE,
            "deadline": DEADLINE + end - begin,
            "seed": self._seed,
        }
        options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        return [sys.executable, "-m", "simulations.traveller", *options]

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
                await self._vehicles[fault.vehicle].crash(fault.away)
