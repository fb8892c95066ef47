"""A process of its own at the other end: `python -m tests.conformance.peer ROLE WHERE [FLEET]`.

It says `ready` when it is connected or listens, sends one frame to whoever is there, and lives on
until it is killed.
"""

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from shared.transport import Transport
from shared.transport.mqtt_address import parse_broker
from shared.transport.mqtt_door import connect_mqtt
from shared.transport.mqtt_listener import MqttListener
from shared.transport.shm import connect_shm
from shared.transport.shm_listener import ShmListener

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def spawned(*arguments: str) -> AsyncGenerator[Process, None]:
    """Start a peer and wait until it is ready; it is killed at the end if not before."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.conformance.peer", *arguments),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def greet(transport: Transport) -> None:
    """Be somebody who is there."""
    transport.start(lambda _frame: None, lambda _reason: None)
    transport.send(b"from the other process")


async def live(role: str, where: str, fleet: str = "") -> None:
    """Play `role` until killed."""
    if where.startswith("mqtt"):
        broker = parse_broker(where)
        if role == "device":
            greet(await connect_mqtt(broker, fleet=fleet, device="car"))
        else:
            await MqttListener(broker, fleet=fleet, decoder="d1", boot="b").start(greet)
    elif role == "device":
        greet(await connect_shm(where))
    else:
        await ShmListener(where).start(greet)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(live(*sys.argv[1:]))
