"""`deltarelay bench`: what is promised about speed and memory, measured."""

import asyncio
from collections.abc import Sequence

from shared.commands import parser, print_json, start_logging
from simulations.bench.edge import bench_edge
from simulations.bench.link import bench_link
from simulations.bench.relay import bench_relay
from simulations.bench.show import show

BENCHES = {"relay": bench_relay, "link": bench_link, "edge": bench_edge}


def bench(arguments: Sequence[str]) -> int:
    """Run one bench; progress goes to standard error, the result to standard output."""
    ask = parser("bench", "Measure speed and memory.", reports=True)
    ask.add_argument("what", choices=sorted(BENCHES))
    ask.add_argument("--model", default="smollm2-135m-instruct")
    ask.add_argument("--runs", type=int, default=15, help="repetitions of each figure")
    options = ask.parse_args(arguments)
    start_logging(options.log_level)
    result = asyncio.run(BENCHES[options.what](options.model, options.runs))
    if options.json:
        print_json(result)
    else:
        show(result)
    return 0
