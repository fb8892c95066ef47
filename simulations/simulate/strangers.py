"""Clients that connect, maybe say the beginning of something, and are gone."""

import asyncio
import contextlib
import os
import socket
from mmap import mmap
from random import Random

from shared import frames
from shared.errors import DeltarelayError
from shared.frames import HelloBody
from shared.transport.handover import receive_memory
from shared.transport.ring import Producer
from shared.transport.segment import SIZE

AT_ONCE = 16
"""Strangers at a time."""
NAMES = 50
"""Devices that they say they are."""
PATIENCE = 2.0
"""Seconds for which a stranger waits for anything."""


async def knock(count: int, path: str, broker: tuple[str, int], decoder: str, rng: Random) -> None:
    """Connect `count` times and hang up: at once, after half a HELLO, or after a whole one.

    Args:
        path: the decoder's Unix socket.
        broker: host and port of its MQTT broker.
        decoder: its name there.
    """
    free = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        device = f"stranger-{number % NAMES}"
        hello = HelloBody(device, f"boot-{number}", clock_us=number)
        data = frames.encode(frames.Hello(frames.CONNECTION, 0, hello))
        said = data[: rng.choice((0, len(data) // 2, len(data)))]
        async with free:
            with contextlib.suppress(OSError, TimeoutError, DeltarelayError):
                async with asyncio.timeout(PATIENCE):
                    if number % 2:
                        await _knock_at_socket(path, said)
                    else:
                        await _knock_at_broker(broker, decoder, device, said)

    await asyncio.gather(*map(one, range(count)))


async def _knock_at_socket(path: str, said: bytes) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.setblocking(False)
        await loop.sock_connect(control, path)
        if not said:
            return
        await _readable(control)
        fd, _ = receive_memory(control)
        try:
            with mmap(fd, SIZE) as memory, memoryview(memory)[: SIZE // 2] as up:
                producer = Producer(up)
                producer.write(said)
                producer.release()
        finally:
            os.close(fd)
        control.send(b"w")


async def _readable(control: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(control, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(control)


async def _knock_at_broker(broker: tuple[str, int], decoder: str, device: str, said: bytes) -> None:
    """Say CONNECT with the will of a device, and PUBLISH at QoS 0; never DISCONNECT.

    The packets are those of MQTT 5 (OASIS standard, sections 3.1 and 3.3).
    """
    will = _text(f"dr/v1/fleet/{device}/presence") + _text("")
    connect = _packet(0x10, b"\0\4MQTT\5\x06\0\x0a\0" + _text(f"dr-fleet-{device}") + b"\0" + will)
    publish = _packet(0x30, _text(f"dr/v1/fleet/{decoder}/{device}/up") + b"\0" + said)
    reader, writer = await asyncio.open_connection(*broker)
    try:
        writer.write(connect if said else connect[: len(connect) // 2])
        if said:
            await reader.readexactly(5)
            writer.write(publish)
        await writer.drain()
    finally:
        writer.transport.abort()


def _text(value: str) -> bytes:
    data = value.encode()
    return len(data).to_bytes(2, "big") + data


def _packet(first: int, body: bytes) -> bytes:
    """Return a packet of fewer than 16,384 bytes."""
    low, high = len(body) & 0x7F, len(body) >> 7
    return bytes([first, low | 0x80, high] if high else [first, low]) + body
