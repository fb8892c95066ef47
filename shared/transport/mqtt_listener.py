"""A decoder's side of MQTT: announces it, and makes one connection per device."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from random import Random

import msgspec

from shared.backoff import Backoff
from shared.errors import CapacityError, DeltarelayError, LinkError
from shared.transport import Transport
from shared.transport.mqtt_address import Broker
from shared.transport.mqtt_client import MqttClient
from shared.transport.mqtt_topics import State, check_name
from shared.transport.mqtt_transport import MqttTransport

log = logging.getLogger(__name__)

MAX_DEVICES = 4096


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
            if client.window.is_crowded_by(
                down
            ):  # it costs nobody else the connection to the broker
                client.window.drop(down)
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
