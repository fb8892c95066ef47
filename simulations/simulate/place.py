"""Broker, decoder and vehicles over both links, where chaos is played."""

import asyncio
import os
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from edge.agent import connect
from shared.child import ChildDecoder, open_decoder
from shared.commands import progress
from shared.errors import InputError
from simulations.bench.metrics import fetch_counters
from simulations.broker import Broker, free_port, open_broker
from simulations.simulate.children import ReportingProcess
from simulations.simulate.fleet import Fleet
from simulations.simulate.limits import OWN_SHARED_MEMORY, may_mount

DECODER, CLOCK = "decoder", "clock"
GAUGES = {
    "devices": "deltarelay_devices",
    "conversations": "deltarelay_conversations",
    "replies under way": "vllm:num_requests_running",
    "replies that wait": "vllm:num_requests_waiting",
    "share of blocks in use": "vllm:kv_cache_usage_perc",
}
SETTINGS = {"max-tokens": 32, "deadline": 60.0, "pace": 12.0, "pause": 0.5}
"""Of the vehicles."""


@dataclass(frozen=True, slots=True)
class Place:
    """What there is, for faults to be played on."""

    broker: Broker
    decoder: ChildDecoder
    fleet: Fleet
    folder: Path
    metrics: str
    """Address of the decoder's metrics."""
    why_not_own_memory: str
    """Why the decoder has no /dev/shm of its own; empty: it has."""

    @property
    def socket(self) -> str:
        """The decoder's Unix socket."""
        return self.decoder.address.removeprefix("shm://")

    @property
    def snapshots(self) -> Path:
        """The decoder's snapshots."""
        return self.folder / "snapshots"

    def vehicle(self, rng: Random, *, over_shm: bool | None = None) -> ReportingProcess:
        """Choose a vehicle: of one link, or of any."""
        vehicles = self.fleet.vehicles
        chosen = vehicles if over_shm is None else vehicles[over_shm::2]
        return rng.choice(chosen)

    def address_for(self, number: int) -> str:
        """Return where a vehicle connects: every other one over shared memory."""
        return (
            self.decoder.address if number % 2 else f"mqtt://{self.broker.host}:{self.broker.port}"
        )

    async def gauges(self) -> dict[str, float]:
        """Return what the decoder says of itself.

        Raises:
            LinkError: it does not answer.
        """
        names = GAUGES.values()
        values = await asyncio.to_thread(fetch_counters, self.metrics, *names)
        return dict(zip(GAUGES, values, strict=True))

    def step_clock(self, seconds: int) -> None:
        """Put the wall clock of the decoder and of all vehicles on by so much, or back."""
        clock = self.folder / CLOCK
        clock.write_text(str(int(clock.read_text()) + seconds))

    def clone_spool(self, device: str, to: Path) -> None:
        """Copy a vehicle's spool while it is in use, as an image of its disk would."""
        with (
            closing(sqlite3.connect(self.folder / device / "spool.sqlite")) as source,
            closing(sqlite3.connect(to / "spool.sqlite")) as copy,
        ):
            source.backup(copy)


@asynccontextmanager
async def open_place(
    model: str, vehicles: int, seed: int, changes: Sequence[str]
) -> AsyncGenerator[Place, None]:
    """Start everything; when the block is left, all is stopped and deleted.

    Args:
        vehicles: every other one over shared memory.
        changes: settings of the decoder.

    Raises:
        InputError: there are too few vehicles.
        LinkError: something does not start.
    """
    if vehicles < 2:
        raise InputError(f"{vehicles} vehicles: 2 at least, so that each link has one")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="deltarelay-")))
        broker = stack.enter_context(open_broker())
        url = f"mqtt://{broker.host}:{broker.port}"
        http = f"127.0.0.1:{free_port()}"
        (folder / CLOCK).write_text("0")
        clocked = own_clock(folder / CLOCK)
        why_not = may_mount()
        progress(f"decoder: loading {model}")
        settings = {"name": DECODER, "http": http, "snapshots": folder / "snapshots"}
        decoder = await stack.enter_async_context(
            open_decoder(
                model,
                listen=[url],
                changes=[
                    *(f'{name}="{value}"' for name, value in settings.items()),
                    "snapshot_every=0.5",
                    *changes,
                ],
                through=[*clocked, *(() if why_not else OWN_SHARED_MEMORY)],
            )
        )
        async with connect(url):  # fetches the tokenizer
            pass
        fleet = Fleet(stack, folder, seed)
        place = Place(broker, decoder, fleet, folder, f"http://{http}/metrics", why_not)
        for number in range(vehicles):
            device, to = f"car-{number}", place.address_for(number)
            await fleet.add(device, to, SETTINGS, through=clocked)
        yield place


def own_clock(step: Path) -> list[str]:
    """Return what runs a Python program with a wall clock that the file `step` puts on or back."""
    path = [str(Path(__file__).parent / "clock"), os.environ.get("PYTHONPATH", "")]
    return ["env", f"CLOCK_STEP={step}", f"PYTHONPATH={os.pathsep.join(filter(None, path))}"]
