"""The faults of chaos, each played on one place; when its function returns, it is over."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from tempfile import mkdtemp

from simulations.simulate.children import ReportingProcess
from simulations.simulate.limits import disk_full, no_descriptors, shared_memory_full
from simulations.simulate.place import DECODER, SETTINGS, Place
from simulations.simulate.strangers import knock

HOUR = 3600
STRANGERS = 1000
START_WITHIN = 60.0
"""Seconds for a vehicle to start."""
LETS_GO = 0.5
"""Seconds in which the decoder lets go of what a dead vehicle had, so that it is full without."""
Mishap = Callable[[Place, Random], Awaitable[None]]
"""Plays a fault; chance has the moment, whom it hits and how long it lasts."""


async def kill_decoder(place: Place, rng: Random) -> None:
    """Kill the decoder (SIGKILL), and start it again."""
    await asyncio.to_thread(place.decoder.kill)
    await asyncio.sleep(rng.uniform(0.0, 1.0))
    await place.decoder.start()


async def freeze_decoder(place: Place, rng: Random) -> None:
    """Freeze the decoder, for shorter or longer than vehicles have patience."""
    process = place.decoder.process
    process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(rng.uniform(0.5, 4.0))
    finally:
        process.send_signal(signal.SIGCONT)


async def kill_vehicle(place: Place, rng: Random) -> None:
    """Kill a vehicle, and start it again."""
    await place.vehicle(rng).crash(rng.uniform(0.0, 1.0))


async def freeze_vehicle(place: Place, rng: Random) -> None:
    """Freeze a vehicle."""
    await place.vehicle(rng).freeze(rng.uniform(0.5, 4.0))


async def restart_broker(place: Place, rng: Random) -> None:
    """Stop the broker, and start it again without a memory."""
    await asyncio.to_thread(place.broker.stop)
    await asyncio.sleep(rng.uniform(0.1, 2.0))
    await asyncio.to_thread(place.broker.start)


async def fill_shared_memory(place: Place, rng: Random) -> None:
    """Fill /dev/shm while a vehicle of this host connects anew."""
    await _connect_while(shared_memory_full, place, rng)


async def take_descriptors(place: Place, rng: Random) -> None:
    """Leave the decoder no descriptor while a vehicle and strangers connect."""
    await _connect_while(no_descriptors, place, rng, strangers=50)


async def fill_disk_of_decoder(place: Place, rng: Random) -> None:
    """Let the decoder write to no file, so that it keeps no snapshots."""
    with disk_full(place.decoder.process.pid):
        await asyncio.sleep(rng.uniform(0.5, 2.0))


async def fill_disk_of_vehicle(place: Place, rng: Random) -> None:
    """Let a vehicle write nothing to its spool."""
    with disk_full(place.vehicle(rng).pid):
        await asyncio.sleep(rng.uniform(0.5, 2.0))


async def step_clock_forward(place: Place, _rng: Random) -> None:
    """Set every wall clock ahead by an hour, for good."""
    place.step_clock(HOUR)


async def step_clock_back(place: Place, _rng: Random) -> None:
    """Set every wall clock back by an hour, for good."""
    place.step_clock(-HOUR)


async def run_twin(place: Place, rng: Random) -> None:
    """Run a second agent from a copy of a vehicle's disk, and end it; the vehicle stays.

    It holds the same conversations. Who comes last supersedes the other, which ends: a vehicle that
    did is started again, as a supervisor would.
    """
    number = rng.randrange(len(place.fleet.vehicles))
    vehicle = place.fleet.vehicles[number]
    spool = Path(mkdtemp(prefix="twin-", dir=place.folder))
    place.clone_spool(vehicle.name, spool)
    options = {"to": place.address_for(number), "device": vehicle.name, "spool": spool}
    arguments = [f"--{name}={value}" for name, value in {**options, **SETTINGS}.items()]
    program = [sys.executable, "-m", "simulations.traveller", *arguments]
    is_there = asyncio.Event()
    twin = ReportingProcess("twin", program, spool / "log", lambda _report: is_there.set())
    await twin.start()
    try:
        await asyncio.wait_for(is_there.wait(), START_WITHIN)
        await asyncio.sleep(rng.uniform(1.0, 4.0))
    finally:
        await twin.close()
    await vehicle.revive()


async def receive_strangers(place: Place, rng: Random) -> None:
    """Let a thousand clients connect and hang up, most of them in the middle of a word."""
    broker = place.broker.host, place.broker.port
    await knock(STRANGERS, place.socket, broker, DECODER, rng)


MISHAPS: dict[str, Mishap] = {
    "decoder killed": kill_decoder,
    "decoder frozen": freeze_decoder,
    "vehicle killed": kill_vehicle,
    "vehicle frozen": freeze_vehicle,
    "broker restarted": restart_broker,
    "shared memory full": fill_shared_memory,
    "no descriptors": take_descriptors,
    "decoder's disk full": fill_disk_of_decoder,
    "vehicle's disk full": fill_disk_of_vehicle,
    "clock forward": step_clock_forward,
    "clock back": step_clock_back,
    "twin": run_twin,
    "strangers": receive_strangers,
}
"""By what happens."""


async def _connect_while(
    limited: Callable[[int], AbstractContextManager[None]],
    place: Place,
    rng: Random,
    strangers: int = 0,
) -> None:
    """Have a vehicle connect over shared memory while the decoder is limited."""
    broker = place.broker.host, place.broker.port
    vehicle = place.vehicle(rng, over_shm=True)
    await vehicle.close()
    await asyncio.sleep(LETS_GO)
    with limited(place.decoder.process.pid):
        await vehicle.start()
        await knock(strangers, place.socket, broker, DECODER, rng)
        await asyncio.sleep(rng.uniform(0.5, 2.0))
