"""`deltarelay simulate`: what is promised about faults, shown with real processes."""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from shared.commands import parser, print_json, start_logging
from simulations.bench.show import show


@dataclass(frozen=True, slots=True)
class Simulation:
    """`simulate_<name>` in a module of its name, imported when it is asked for.

    It returns figures, and under `broken` what of its promises was not kept.
    """

    about: str
    vehicles: int
    """How many there are by default."""
    seconds: float
    """How long faults are played by default."""


SIMULATIONS = {
    "tunnel": Simulation(
        "vehicles that lose their link for a while, and all that can break meanwhile", 8, 180.0
    ),
    "failover": Simulation(
        "vehicles whose decoder is killed, frozen and restarted, and which go on at another",
        4,
        120.0,
    ),
    "chaos": Simulation("one fault after the other, of every kind, by chance", 4, 600.0),
}


def simulate(arguments: Sequence[str]) -> int:
    """Run one simulation; the exit status is 1 if a promise was broken."""
    options = vars(_parser().parse_args(arguments))
    what, as_json = options.pop("what"), options.pop("json")
    start_logging(options.pop("log_level"))
    run = getattr(import_module(f"simulations.simulate.{what}"), f"simulate_{what}")
    result = asyncio.run(run(**options))
    if as_json:
        print_json(result)
    else:
        show(result)
    return int(bool(result["broken"]))


def _parser() -> argparse.ArgumentParser:
    ask = argparse.ArgumentParser(
        prog="deltarelay simulate", description="Play faults with real processes."
    )
    kinds = ask.add_subparsers(dest="what", required=True, metavar="SIMULATION")
    for name, simulation in SIMULATIONS.items():
        about = simulation.about
        usual = parser(f"simulate {name}", f"Play {about}.", reports=True)
        kind = kinds.add_parser(
            name, help=about, description=usual.description, parents=[usual], add_help=False
        )
        kind.add_argument(
            "--model",
            default="smollm2-135m-instruct",
            help="a known model's name or a path (default: %(default)s)",
        )
        kind.add_argument(
            "--set",
            dest="changes",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="change one setting of the decoder (a.b=c); may be repeated",
        )
        kind.add_argument(
            "--seed", type=int, default=1, help="of all that is chosen at random (default: 1)"
        )
        kind.add_argument(
            "--vehicles",
            type=_vehicles,
            default=simulation.vehicles,
            help="how many (default: %(default)s)",
        )
        length = kind.add_mutually_exclusive_group()
        length.add_argument(
            "--seconds",
            type=_seconds,
            default=simulation.seconds,
            help="after which nothing more begins (default: %(default)g)",
        )
        length.add_argument("--minutes", dest="seconds", type=_minutes, help="the same, in minutes")
    return ask


def _vehicles(text: str) -> int:
    if not 1 <= (count := int(text)) <= 64:
        raise argparse.ArgumentTypeError(f"{count} vehicles: 1..64 are processes of this machine")
    return count


def _seconds(text: str) -> float:
    if not 15 <= (seconds := float(text)) <= 3600:
        raise argparse.ArgumentTypeError(f"{text} seconds: 15..3600, so that all faults fit")
    return seconds


def _minutes(text: str) -> float:
    return _seconds(str(60 * float(text)))
