"""`deltarelay simulate tunnel`: vehicles drive through a tunnel; all is killed meanwhile.

Each holds two conversations. What drivers were shown, what vehicles have on disk and what the
decoder holds in the end must be the same.
"""

import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

from edge.agent import connect
from shared.child import open_decoder
from shared.commands import progress
from shared.transport.mqtt_client import MAX_WINDOW
from simulations.broker import open_broker
from simulations.simulate.drive import Drive, choose_drive
from simulations.simulate.faults import Fault, plan_faults
from simulations.simulate.leaks import Resources
from simulations.simulate.world import World

DRAINED_WITHIN = 10.0
"""Seconds after the tunnel in which all turns that ended in it are to be answered."""


async def simulate_tunnel(
    model: str, vehicles: int, seconds: float, seed: int, changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what became of all turns, and of the link's promises.

    Args:
        changes: settings of the decoder.
    """
    drive = choose_drive(seconds)
    faults = plan_faults(seconds, vehicles, drive.tunnel, Random(f"{seed}/faults"))
    progress(f"link: {drive.source}; tunnel from {drive.tunnel[0]:.1f} to {drive.tunnel[1]:.1f} s")
    for fault in faults:
        progress(f"planned: {fault}")
    before = Resources.now()
    result = await _run(drive, faults, model, vehicles, seconds, seed, changes)
    leaks = Resources.now().left_behind(before)
    result |= {"leaks": len(leaks), "link": drive.source, "seed": seed}
    result["faults"] = [str(fault) for fault in faults]
    result["broken"] = [*_broken(result), *leaks]
    return result


def _broken(result: dict[str, Any]) -> list[str]:
    """Return what was promised and not kept."""
    promises = {
        "turns": result["turns"] > 0,
        "answered_once": result["answered_once"] == result["turns"],
        "differing_logs": result["differing_logs"] == 0,
        "contradictions": result["contradictions"] == 0,
        "drain_s": result["drain_s"] is not None and result["drain_s"] <= DRAINED_WITHIN,
        "max_burst": result["max_burst"] <= MAX_WINDOW,
    }
    return [f"{name} = {result[name]}" for name, is_kept in promises.items() if not is_kept]


async def _run(
    drive: Drive,
    faults: Sequence[Fault],
    model: str,
    vehicles: int,
    seconds: float,
    seed: int,
    changes: Sequence[str],
) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltarelay-")))
        broker = stack.enter_context(open_broker())
        url = f"mqtt://{broker.host}:{broker.port}"
        progress(f"broker: {broker.name} at {url}; decoder: loading {model}")
        decoder = await stack.enter_async_context(
            open_decoder(model, listen=[url], changes=changes)
        )
        async with connect(decoder.address):  # the tokenizer, over a good link
            pass
        world = World(drive, broker, decoder, folder, seed)
        await world.drive(stack, vehicles, seconds, faults)
        return await world.figures()
