"""A broker that speaks just enough MQTT 5 to misbehave on purpose. One client at a time."""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from shared.transport.mqtt_address import Broker

CONNECT, PUBLISH, SUBSCRIBE, PING, DISCONNECT = 1, 3, 8, 12, 14


class FakeBroker:
    """What it does on CONNECT and SUBSCRIBE is set beforehand; PUBACKs may wait to be asked for."""

    def __init__(self) -> None:
        self.port = 0
        self.connack = bytes((0x20, 3, 0, 0, 0))
        """The answer to CONNECT; empty: none."""
        self.suback = 0x01
        """The reason code for every topic; -1: no answer."""
        self.hang_up_on_subscribe = False
        self.acknowledge = True
        self.reads = asyncio.Event()
        """Clear it to leave what the client sends in the socket."""
        self.reads.set()
        self.published: list[tuple[int, bytes]] = []
        """QoS and payload of every PUBLISH, the retained ones aside."""
        self.retained: list[bytes] = []
        self.reasons: list[int] = []
        """Reason codes of the DISCONNECTs."""
        self.unacknowledged: list[int] = []
        self.most_unacknowledged = 0
        self._writer: asyncio.StreamWriter | None = None

    @property
    def address(self) -> Broker:
        return Broker("127.0.0.1", self.port)

    def allow(self, receive_maximum: int) -> None:
        """State a Receive Maximum in CONNACK."""
        self.connack = bytes((0x20, 6, 0, 0, 3, 0x21)) + receive_maximum.to_bytes(2, "big")

    def send(self, data: bytes) -> None:
        """Put bytes on the wire, whatever they are."""
        assert self._writer is not None
        self._writer.write(data)

    def deliver(self, topic: str, payload: bytes) -> None:
        """Publish to the client at QoS 0."""
        name = topic.encode()
        body = len(name).to_bytes(2, "big") + name + b"\0" + payload
        assert len(body) < 128
        self.send(bytes((0x30, len(body))) + body)

    def puback(self, count: int = 1) -> None:
        """Acknowledge the oldest messages."""
        for _ in range(count):
            self.send(b"\x40\x02" + self.unacknowledged.pop(0).to_bytes(2, "big"))

    def hang_up(self) -> None:
        """Close the connection."""
        assert self._writer is not None
        self._writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client."""
        self._writer = writer
        try:
            while await self.reads.wait():
                self._take(*await _packet(reader))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _take(self, kind: int, flags: int, body: bytes) -> None:
        if kind == CONNECT:
            self.send(self.connack)
        elif kind == SUBSCRIBE:
            topics = body[3:].count(b"dr/v1/")
            if self.hang_up_on_subscribe:
                self.hang_up()
            elif self.suback >= 0:
                codes = bytes([self.suback]) * topics
                self.send(bytes((0x90, 3 + topics)) + body[:2] + b"\0" + codes)
        elif kind == PUBLISH:
            self._take_publish(flags, body)
        elif kind == PING:
            self.send(b"\xd0\0")
        elif kind == DISCONNECT:
            self.reasons.append(body[0] if body else 0)

    def _take_publish(self, flags: int, body: bytes) -> None:
        at = 2 + int.from_bytes(body[:2], "big")
        qos = flags >> 1 & 3
        if qos:
            self.unacknowledged.append(int.from_bytes(body[at : at + 2], "big"))
            self.most_unacknowledged = max(self.most_unacknowledged, len(self.unacknowledged))
            at += 2
        payload = body[at + 1 + body[at] :]
        if flags & 1:
            self.retained.append(payload)
        else:
            self.published.append((qos, payload))
        if qos and self.acknowledge:
            self.puback()


async def _packet(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    first = (await reader.readexactly(1))[0]
    size = shift = 0
    more = True
    while more:
        byte = (await reader.readexactly(1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        more = byte > 0x7F
    return first >> 4, first & 0xF, await reader.readexactly(size)


@asynccontextmanager
async def fake_broker(tls: ssl.SSLContext | None = None) -> AsyncGenerator[FakeBroker, None]:
    """Run one on a free port."""
    broker = FakeBroker()
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0, ssl=tls)
    broker.port = server.sockets[0].getsockname()[1]
    try:
        yield broker
    finally:
        server.close()
        if broker._writer is not None:
            broker._writer.close()
        await asyncio.sleep(0.01)
