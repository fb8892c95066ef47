"""`deltarelay bench`: what is promised about speed and memory, measured."""

import asyncio
from collections.abc import Sequence
from importlib import import_module

from shared.commands import parser, print_json, start_logging
from simulations.bench.show import show

BENCHES = ("ahead", "edge", "link", "relay", "step")
"""Each is `bench_<name>` in a module of that name, imported when it is asked for."""


def bench(arguments: Sequence[str]) -> int:
    """Run one bench; progress goes to standard error, the result to standard output."""
    ask = parser("bench", "Measure speed and memory.", reports=True)
    ask.add_argument("what", choices=BENCHES)
    ask.add_argument("--model", default="smollm2-135m-instruct")
    ask.add_argument("--runs", type=int, default=15, help="repetitions of each figure")
    options = ask.parse_args(arguments)
    start_logging(options.log_level)
    run = getattr(import_module(f"simulations.bench.{options.what}"), f"bench_{options.what}")
    result = asyncio.run(run(options.model, options.runs))
    if options.json:
        print_json(result)
    else:
        show(result)
    return 0
