"""A device's side of MQTT: finds a decoder of its fleet, and connects to it."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection

from shared.errors import DeltarelayError, LinkError
from shared.transport.mqtt_address import Broker
from shared.transport.mqtt_client import MqttClient
from shared.transport.mqtt_topics import check_name, role_of
from shared.transport.mqtt_transport import MqttTransport

DISCOVERY = 3.0
"""Seconds a device waits for a decoder to announce itself."""
SETTLE = 0.05
"""Seconds it waits for the announcements of others: retained messages arrive one by one."""
AVOIDED = 30.0
"""Seconds during which a decoder that did not answer is only picked if there is no other."""


def choose_decoder(device: str, decoders: set[str]) -> str:
    """Return the decoder of `device` (rendezvous hashing: highest hash of the pair wins)."""
    return max(decoders, key=lambda d: hashlib.sha256(f"{device}\0{d}".encode()).digest())


class MqttDoor:
    """Where a device gets connections to one decoder or another of its fleet.

    Args:
        broker: says, for every connection anew, how to get into the broker: its files may have been
            renewed.
        decoder: the decoder to use; None: the one that rendezvous hashing picks.

    Raises:
        ConfigError: a name does not fit a topic, or the broker's files cannot be used.
    """

    def __init__(
        self,
        broker: Callable[[], Broker],
        *,
        fleet: str,
        device: str,
        decoder: str | None = None,
    ) -> None:
        broker()
        self._broker, self._wanted = broker, decoder
        self._fleet, self._device = check_name("fleet", fleet), check_name("device", device)
        self._last = ""
        self._avoided: dict[str, float] = {}

    async def open(self) -> MqttTransport:
        """Connect to a decoder.

        Raises:
            LinkError: no broker, no decoder, or a refusal.
        """
        now = time.monotonic()
        avoided = {d for d, since in self._avoided.items() if now < since + AVOIDED}
        link = _DeviceLink(self._broker(), self._fleet, self._device, avoided)
        transport = await link.open(self._wanted)
        self._last = link.decoder
        return transport

    def avoid(self) -> None:
        """The decoder of the last connection does not answer: another one may."""
        if self._last:
            self._avoided[self._last] = time.monotonic()


class _DeviceLink:
    """A device's client: finds a decoder, then carries frames."""

    def __init__(
        self, broker: Broker, fleet: str, device: str, avoided: Collection[str] = ()
    ) -> None:
        self._avoided = frozenset(avoided)
        self._root, self._device = f"dr/v1/{fleet}", device
        self._decoders: set[str] = set()
        self._found = asyncio.Event()
        self.decoder = ""
        """The one it is connected to."""
        self._failed: DeltarelayError | None = None
        self._transport: MqttTransport | None = None
        self.client = MqttClient(
            broker,
            f"dr-{fleet}-{device}",
            will_topic=f"{self._root}/{device}/presence",
            on_message=self._message,
            on_lost=self._lost,
            on_refused=lambda _topic, why: self._lost(why),
        )

    async def open(self, decoder: str | None) -> MqttTransport:
        root, client = self._root, self.client
        await client.connect()
        try:
            await client.subscribe([f"{root}/{self._device}/down", f"{root}/+/state"])
            self.decoder = await self._discover(decoder)
        except BaseException:
            client.close()
            raise
        up = f"{root}/{self.decoder}/{self._device}/up"

        def publish(payload: bytes, *, provisional: bool) -> None:
            client.publish(up, payload, provisional=provisional)

        def ended(_hang_up: bool) -> None:
            client.close()

        self._transport = MqttTransport(f"{client.broker.name}/{self.decoder}", publish, ended)
        return self._transport

    async def _discover(self, wanted: str | None) -> str:
        name = self.client.broker.name
        try:
            async with asyncio.timeout(DISCOVERY):
                return await self._choose(wanted)
        except TimeoutError:
            who = f"decoder {wanted!r} does not announce itself" if wanted else "no decoder"
            raise LinkError(
                f"{name}: {who} under {self._root}/+/state; start one with "
                f"`deltarelay cloud --listen {name}`, or check the fleet's name"
            ) from None

    async def _choose(self, wanted: str | None) -> str:
        while self._failed is None:
            if not self._decoders or (wanted and wanted not in self._decoders):
                self._found.clear()
                await self._found.wait()
            elif wanted:
                return wanted
            else:
                await asyncio.sleep(SETTLE)
                if self._decoders and self._failed is None:
                    preferred = self._decoders - self._avoided
                    return choose_decoder(self._device, preferred or self._decoders)
        raise self._failed

    def _message(self, topic: str, payload: bytes) -> None:
        if topic.endswith("/down"):
            if self._transport is not None:
                self._transport.deliver(payload)
            return
        who = topic.split("/")[-2]
        role = role_of(payload)
        if role == "decoder":
            self._decoders.add(who)
            self._found.set()
            return
        self._decoders.discard(who)
        if who == self.decoder and role != "draining" and self._transport is not None:
            self._transport.end(LinkError(f"{self._transport.name}: the decoder left"))

    def _lost(self, reason: DeltarelayError | None) -> None:
        self._failed = reason
        self._found.set()
        if self._transport is not None:
            self._transport.end(reason)


async def connect_mqtt(
    broker: Broker, *, fleet: str, device: str, decoder: str | None = None
) -> MqttTransport:
    """Connect a device to `decoder`, or to the one that rendezvous hashing picks.

    Raises:
        LinkError: no broker, no decoder, or a refusal.
        ConfigError: a name does not fit a topic.
    """
    door = MqttDoor(lambda: broker, fleet=fleet, device=device, decoder=decoder)
    return await door.open()
