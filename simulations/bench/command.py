"""`deltarelay bench`: what is promised about speed, memory and quality, measured."""

import argparse
import asyncio
from collections.abc import Sequence
from importlib import import_module

from shared.commands import parser, print_json, start_logging
from simulations.bench.show import show

BENCHES = {
    "ahead": "replies drawn ahead of the end of a turn, and what they cost the others",
    "edge": "what an agent costs a vehicle",
    "fleet": "vehicles that speak at natural speed, all at once",
    "link": "latency and bytes of the links",
    "quality": "what precisions cost in quality, against an independent fp32 reference",
    "recover": "a decoder that is killed and started again",
    "relay": "from the end of a turn to the first token, relayed and whole",
    "step": "the engine alone: prefill and decode",
}
"""Each is `bench_<name>` in a module of that name, imported when it is asked for."""


def bench(arguments: Sequence[str]) -> int:
    """Run one bench; progress goes to standard error, the result to standard output."""
    options = vars(_parser().parse_args(arguments))
    what, as_json = options.pop("what"), options.pop("json")
    start_logging(options.pop("log_level"))
    run = getattr(import_module(f"simulations.bench.{what}"), f"bench_{what}")
    result = asyncio.run(run(**options))
    if as_json:
        print_json(result)
    else:
        show(result)
    return 0


def _parser() -> argparse.ArgumentParser:
    ask = argparse.ArgumentParser(
        prog="deltarelay bench", description="Measure speed, memory and quality."
    )
    kinds = ask.add_subparsers(dest="what", required=True, metavar="BENCH")
    for name, about in BENCHES.items():
        usual = parser(f"bench {name}", f"Measure {about}.", reports=True)
        kind = kinds.add_parser(
            name, help=about, description=usual.description, parents=[usual], add_help=False
        )
        kind.add_argument(
            "--model",
            default="smollm2-135m-instruct",
            help="a known model's name or a path (default: %(default)s)",
        )
        if name == "fleet":
            _add_fleet(kind)
        elif name not in ("quality", "recover"):
            kind.add_argument(
                "--runs",
                type=_count,
                default=15,
                help="repetitions of each figure (default: %(default)s)",
            )
    return ask


def _add_fleet(kind: argparse.ArgumentParser) -> None:
    kind.add_argument(
        "--vehicles", type=_count, default=16, help="how many speak at once (default: %(default)s)"
    )
    kind.add_argument(
        "--seconds",
        type=_seconds,
        default=60.0,
        help="after which no more turns end (default: %(default)s)",
    )
    kind.add_argument(
        "--link",
        choices=("shm", "mqtt"),
        default="shm",
        help="mqtt: over a broker of its own (default: %(default)s)",
    )


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{count} is too few: at least 1")
    return count


def _seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} seconds: more than 0, and finite")
    return seconds
