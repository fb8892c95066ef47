"""MQTT 5 between hosts.

    dr/v1/{fleet}/{decoder}/{device}/up     frames to a decoder
    dr/v1/{fleet}/{device}/down             frames to a device
    dr/v1/{fleet}/{decoder}/state           retained while the decoder is connected
    dr/v1/{fleet}/{device}/presence         an empty message when the device leaves

A device picks one of the decoders that announce themselves by rendezvous hashing, so that it finds
the same one again and a fleet spreads evenly. However a decoder leaves, its last will clears its
state, and however a device leaves, its last will says so: then the connections with it are over. A
decoder that is about to leave says `draining` first: nobody new picks it. A decoder hangs up on one
device by an empty message. A device hears of no other device.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Callable, Collection
from random import Random

import msgspec

from shared.backoff import Backoff
from shared.errors import CapacityError, ConfigError, DeltarelayError, LinkError
from shared.transport import Transport
from shared.transport.mqtt_address import Broker
from shared.transport.mqtt_client import MqttClient
from shared.transport.mqtt_transport import MqttTransport

log = logging.getLogger(__name__)

DISCOVERY = 3.0
"""Seconds a device waits for a decoder to announce itself."""
SETTLE = 0.05
"""Seconds it waits for the announcements of others: retained messages arrive one by one."""
AVOIDED = 30.0
"""Seconds during which a decoder that did not answer is only picked if there is no other."""
MAX_DEVICES = 4096
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_VIN = re.compile(r"[A-HJ-NPR-Z0-9]{17}", re.IGNORECASE)
"""A vehicle identification number: 17 characters without I, O and Q (ISO 3779)."""


class State(msgspec.Struct, frozen=True, omit_defaults=True):
    """The retained announcement of a decoder: `decoder`, or `draining` before it leaves."""

    role: str
    boot: str = ""


def check_name(kind: str, name: str) -> str:
    """Return `name` if it can be a level of a topic.

    Raises:
        ConfigError: it cannot, or has a vehicle identification number in it. Brokers and their logs
            show topics to many, and such a number leads to a person.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{kind} {name!r}: 1..64 letters, digits, '.', '_' and '-' are allowed")
    if any(_VIN.fullmatch(part) for part in re.split("[._-]", name)):
        raise ConfigError(
            f"{kind} name looks like a vehicle identification number (17 letters and digits): it "
            "would stand in topics and logs and leads to a person; choose a name that does not"
        )
    return name


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
                    known = self._decoders - self._avoided or self._decoders
                    return choose_decoder(self._device, known)
        raise self._failed

    def _message(self, topic: str, payload: bytes) -> None:
        if topic.endswith("/down"):
            if self._transport is not None:
                self._transport.deliver(payload)
            return
        who = topic.split("/")[-2]
        role = _role(payload)
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


def _role(payload: bytes) -> str:
    try:
        return msgspec.json.decode(payload, type=State).role if payload else ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


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


class MqttListener:
    """A decoder at a broker: announces itself, makes one transport per device, reconnects."""

    def __init__(
        self, broker: Broker, *, fleet: str, decoder: str, boot: str, rng: Random | None = None
    ) -> None:
        self._broker = broker
        self._root = f"dr/v1/{check_name('fleet', fleet)}"
        self._fleet, self._decoder = fleet, check_name("decoder", decoder)
        self._boot, self._role = boot, "decoder"
        self._backoff = Backoff(rng or Random())
        self._client: MqttClient | None = None
        self._devices: dict[str, MqttTransport] = {}
        self._task: asyncio.Task[None] | None = None
        self._lost_event = asyncio.Event()

    @property
    def name(self) -> str:
        """The broker's address."""
        return self._broker.name

    async def start(self, on_connection: Callable[[Transport], None]) -> None:
        """Announce this decoder; if the broker is away, keep trying and log why."""
        self._on_connection = on_connection
        try:
            await self._connect()
        except LinkError as error:
            log.warning("%s; trying again", error)
            self._lost_event.set()
        self._task = asyncio.create_task(self._keep_connected(), name="mqtt-listener")

    def drain(self) -> None:
        """Ask devices to pick another decoder from now on; those that are here stay."""
        self._role = "draining"
        if self._client is not None:
            self._announce(self._client)

    async def close(self) -> None:
        """Withdraw the announcement and disconnect."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._end_all(None)
        if self._client is not None:
            self._client.close()

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._lost_event.wait()
            await asyncio.sleep(self._backoff.delay(loop.time()))
            try:
                await self._connect()
                log.info("%s: connected again", self.name)
            except LinkError as error:
                log.warning("%s; trying again", error)

    async def _connect(self) -> None:
        root, decoder = self._root, self._decoder
        client = MqttClient(
            self._broker,
            f"dr-{self._fleet}-{decoder}",
            will_topic=f"{root}/{decoder}/state",
            on_message=self._message,
            on_lost=self._lost,
            on_refused=self._refused,
        )
        await client.connect()
        self._client = client
        try:
            await client.subscribe([f"{root}/{decoder}/+/up", f"{root}/+/presence"])
        except LinkError:
            client.close()
            raise
        self._announce(client)
        self._lost_event.clear()
        self._backoff.connected(asyncio.get_running_loop().time())

    def _announce(self, client: MqttClient) -> None:
        state = msgspec.json.encode(State(self._role, self._boot))
        client.publish_state(f"{self._root}/{self._decoder}/state", state)

    def _lost(self, reason: DeltarelayError | None) -> None:
        self._client = None
        self._end_all(reason or LinkError(f"{self.name}: disconnected"))
        self._lost_event.set()

    def _refused(self, topic: str, why: LinkError) -> None:
        log.warning("%s", why)
        transport = self._devices.get(topic.split("/")[-2])
        if transport is not None:
            transport.end(why)

    def _end_all(self, reason: DeltarelayError | None) -> None:
        for transport in list(self._devices.values()):
            transport.end(reason)

    def _message(self, topic: str, payload: bytes) -> None:
        levels = topic.split("/")
        device = levels[-2]
        transport = self._devices.get(device)
        if levels[-1] == "presence":
            if transport is not None and not payload:
                transport.end(LinkError(f"{transport.name}: the device left"))
            return
        if transport is None:
            if len(self._devices) >= MAX_DEVICES:
                log.warning(
                    "%s: %d devices are connected, %s is ignored", self.name, MAX_DEVICES, device
                )
                return
            transport = self._new_device(device)
        transport.deliver(payload)

    def _new_device(self, device: str) -> MqttTransport:
        down = f"{self._root}/{device}/down"

        def publish(payload: bytes, *, provisional: bool) -> None:
            client = self._client
            if client is None:
                return
            if client.is_crowded_by(down):  # it costs nobody else the connection to the broker
                client.drop(down)
                why = f"{transport.name}: it takes less than is sent to it; its replies are dropped"
                transport.end(CapacityError(why), hang_up=True)
            else:
                client.publish(down, payload, provisional=provisional)

        def ended(hang_up: bool) -> None:
            self._devices.pop(device, None)
            if hang_up:
                publish(b"", provisional=False)

        transport = MqttTransport(f"{self.name}/{device}", publish, ended, peer=device)
        self._devices[device] = transport
        self._on_connection(transport)
        return transport
