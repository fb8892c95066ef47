"""The other process of the link bench: a decoder's session that notes arrival times."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence

from shared.channel import Channel
from shared.child import die_with_parent
from shared.frames import WelcomeBody
from shared.session import CloudSession, Event, Greeted, Revised
from shared.session.cloud import greeting
from shared.transport import Listener, Transport
from shared.transport.mqtt_address import parse_broker
from shared.transport.mqtt_listener import MqttListener
from shared.transport.shm_listener import ShmListener


def allow_all(ids: Sequence[int], *, reply: bool = False) -> None:
    """Every id is welcome here."""


def nobody() -> WelcomeBody:
    """Return the welcome of a decoder that serves nothing."""
    return WelcomeBody("bench", "bench", 0, "", "", "", "", vocabulary=1 << 20)


async def receive(address: str, count: int) -> None:
    """Serve one sender until `count` revisions have arrived, then print their times."""
    arrived: list[float] = []
    done = asyncio.Event()

    def connect(transport: Transport) -> None:
        session = CloudSession(allow_all)

        def on_events(events: Sequence[Event]) -> None:
            for event in events:
                match event:
                    case Greeted(hello):
                        session.welcome(greeting(hello, nobody(), 0), {})
                    case Revised():
                        arrived.append(time.monotonic())
                    case _:
                        pass
            if len(arrived) >= count:
                done.set()

        channel = Channel(
            session, transport, time.monotonic, on_events=on_events, on_closed=lambda _: None
        )
        channel.start()

    listener: Listener
    if address.startswith("shm://"):
        listener = ShmListener(address.removeprefix("shm://"))
    else:
        broker = parse_broker(address)
        listener = MqttListener(broker, fleet="bench", decoder="bench", boot="bench")
    await listener.start(connect)
    print("ready", flush=True)
    await done.wait()
    print(json.dumps(arrived), flush=True)
    await asyncio.sleep(1)
    await listener.close()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(receive(sys.argv[1], int(sys.argv[2])))
