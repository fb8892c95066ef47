"""`deltarelay simulate tunnel`: vehicles drive through a tunnel; all is killed meanwhile.

Each holds two conversations. What drivers were shown, what vehicles have on disk and what the
decoder holds in the end must be the same.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from shared.commands import progress
from shared.transport.mqtt_window import MAX_WINDOW
from simulations.simulate.drive import choose_drive
from simulations.simulate.faults import plan_faults
from simulations.simulate.leaks import Resources
from simulations.simulate.world import open_world

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
    async with open_world(model, drive, seed, changes) as world:
        await world.drive(vehicles, seconds, faults)
        result = world.figures()
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
