"""The agent process that the edge bench looks at: it imports what an agent imports."""

import asyncio
import json
import resource
import sys
import time

from edge.agent import connect

TEXT = "Find a charging station near the office and tell me how long it takes to get there. "
SPEED = 12.0
"""Characters a second."""


async def probe(address: str, seconds: float) -> None:
    """Connect, type, and print what it cost."""
    async with connect(address) as agent:
        connected_at = time.monotonic()
        async with agent.conversation(max_tokens=1) as talk:
            before, began = time.process_time(), time.monotonic()
            text = ""
            for n in range(round(seconds * SPEED)):
                text = text[-400:] + TEXT[n % len(TEXT)] if len(text) < 400 else TEXT[0]
                await talk.revise(text)
                await asyncio.sleep(1 / SPEED)
            spent = time.process_time() - before
            share = spent / max(time.monotonic() - began, 1e-9) if seconds else 0.0
    print(
        json.dumps(
            {
                "connected_at": connected_at,
                "rss_mb": round(_resident_mb(), 1),
                "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1),
                "cpu_percent": round(share * 100, 2),
                "heavy": any(name in sys.modules for name in ("torch", "flwr")),
            }
        )
    )


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


if __name__ == "__main__":
    asyncio.run(probe(sys.argv[1], float(sys.argv[2])))
