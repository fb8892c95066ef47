"""The decoder service: lets devices in, knows who is connected, starts and ends in good order.

A device's fault ends its own connection only. What they hold is in `conversations`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Sequence

from cloud.access.admission import Admission
from cloud.access.gate import Gate
from cloud.access.registry import Registry
from cloud.connection import Connection
from cloud.conversations import MAX_CONVERSATIONS, Conversations
from cloud.decoder import Brain, default_name, make_voice
from cloud.engine.engine import Engine
from cloud.metrics import DecoderState, EngineState
from cloud.settings import DecoderSettings
from cloud.snapshot.counts import SnapshotCounts
from cloud.snapshot.keeper import Snapshots
from cloud.worker import Worker
from shared.errors import (
    AccessError,
    CapacityError,
    ConfigError,
    ModelError,
    RemoteProtocolError,
    TokenizerMismatchError,
)
from shared.frames import DRAINING, HelloBody, Load, WelcomeBody
from shared.session.cloud import CREDIT, greeting
from shared.transport import Listener, Transport
from shared.transport.mqtt_address import parse_broker, without_secrets
from shared.transport.mqtt_listener import MqttListener
from shared.transport.shm_listener import ShmListener

log = logging.getLogger(__name__)

SLOW_CREDIT = 1
"""Reliable frames at a time from a device over its limit."""
_LOOK = 0.05
"""Seconds between two looks whether a draining decoder has nothing more to do."""
_HANG_UP = 1.0
"""Seconds that devices get to hang up once no reply is under way."""
_SWEEP = 30.0
"""Seconds between two looks for conversations nobody came back to."""
_FORGET_WITHIN = 5.0
"""Seconds that the engine may take until it drops cached blocks."""


class Decoder:
    """The decoder service on one event loop.

    Args:
        registry: keys and devices besides those of the settings; the caller closes it.
    """

    def __init__(
        self, brain: Brain, settings: DecoderSettings, registry: Registry | None = None
    ) -> None:
        self.brain = brain
        self.boot = secrets.token_hex(8)
        self.name = settings.name or default_name()
        self.model = settings.model
        self.adapter_updates = settings.adapter_updates
        self.started = int(time.time())
        """When, in seconds since 1970: a hint for people."""
        self._settings = settings
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.worker = Worker(brain.engine, on_failed=self._fail)
        self.voice = make_voice(brain, self.worker, settings)
        self.admission = Admission(settings.admission)
        registered = settings.admission.require_devices
        self.gate = Gate(self, self.admission, registry, registered=registered)
        self._control = frozenset(brain.tokenizer.header.control)
        self.conversations = Conversations(
            self.voice, self.admission, self.check_ids, self._forgotten
        )
        self.snapshots: Snapshots | None = None
        if settings.snapshots:
            self.snapshots = Snapshots(self.conversations, brain, self.worker, settings)
        self._connections: dict[str, Connection] = {}
        self._listeners: list[Listener] = []
        self.draining = False
        """It is about to leave: nobody new is let in."""
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, addresses: Sequence[str]) -> None:
        """Begin to serve at `addresses`.

        Raises:
            LinkError: an address cannot be used.
            ConfigError, CapacityError: the registry cannot be read.
        """
        self.gate.open()  # first: who may come in, and to which tenant a device belongs
        if self.snapshots is not None:
            self.snapshots.restore(self.conversations.resume, MAX_CONVERSATIONS)
            self.snapshots.start()
        self.worker.start()
        for address in addresses:
            listener = self._listener(address)
            await listener.start(self.connect)
            self._listeners.append(listener)
            log.info("listening at %s", listener.name)
        self._sweep()

    async def run(self) -> None:
        """Serve until cancelled, or until the engine fails."""
        await asyncio.shield(self._failed)

    async def drain(self, seconds: float) -> None:
        """Before `close`: let nobody new in, ask devices to go elsewhere, let replies end.

        Devices hang up when no reply is under way. Whoever is still here after `seconds` finds its
        conversations at another decoder, or here after a restart.
        """
        self.draining = True
        for listener in self._listeners:
            listener.drain()
        for connection in list(self._connections.values()):
            connection.notice(DRAINING, f"decoder {self.name} is about to leave")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not await self.worker.ask(_is_replying, seconds + 1.0):
                until = min(until, time.monotonic() + _HANG_UP)
                if not self._connections:
                    return
            await asyncio.sleep(_LOOK)
        log.warning("hanging up on %d devices that are still connected", len(self._connections))

    async def close(self) -> None:
        """Hang up on everybody and stop the engine; whoever comes meanwhile is sent away."""
        self.draining = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.gate.close()
        for listener in self._listeners:
            await listener.close()
        for connection in list(self._connections.values()):
            connection.close()
        if self.snapshots is not None:
            await self.snapshots.close()
        await self.worker.close()

    def connect(self, transport: Transport) -> None:
        """Take a new connection."""
        Connection(self, transport).start()

    async def state(self, patience: float) -> DecoderState:
        """Return what metrics say of this moment.

        Raises:
            CapacityError: the engine does not answer within `patience` seconds.
        """
        engine = await self.worker.ask(EngineState.of, patience)
        return DecoderState(
            engine,
            self.worker.num_steps,
            self.voice.ahead_counts,
            len(self._connections),
            len(self.conversations),
            self.snapshots.counts if self.snapshots is not None else SnapshotCounts(),
        )

    # --- what connections ask

    def greet(self, connection: Connection, hello: HelloBody) -> WelcomeBody:
        """Admit a device; an older connection of it is superseded.

        Raises:
            TokenizerMismatchError, ModelError: it cannot be served here.
            CapacityError: this decoder is about to leave.
            RemoteProtocolError, AccessError: it may not come in.
        """
        if self.draining:
            raise CapacityError(f"decoder {self.name} is about to leave: connect to another one")
        self.gate.check(hello.device, connection.peer)
        self._admit(hello)
        previous = self._connections.get(hello.device)
        if previous is not None and previous is not connection:
            previous.supersede()
        self._connections[hello.device] = connection
        tokenizer, checkpoint = self.brain.tokenizer, self.brain.checkpoint
        body = WelcomeBody(
            decoder=self.name,
            boot=self.boot,
            epoch=0,
            tokenizer=tokenizer.digest,
            golden=tokenizer.golden,
            model=self._settings.model,
            model_digest=checkpoint.digest,
            template=self.brain.template.digest,
            vocabulary=tokenizer.header.vocabulary,
            context=self.voice.longest_turn,
            clock_us=int(time.monotonic() * 1e6),
        )
        body = greeting(hello, body, self.conversations.epoch_of(hello.device))
        self.conversations.grant(hello.device, body.epoch)
        return body

    @property
    def devices(self) -> Iterable[str]:
        """The devices that are connected."""
        return self._connections

    def expel(self, device: str, error: AccessError) -> None:
        """Hang up on a device that may not stay, and drop its conversations."""
        connection = self._connections.get(device)
        if connection is not None:
            connection.refuse(error)
        for name in self.conversations.of_device(device):
            self.conversations.forget(device, name)

    async def forget_device(self, device: str) -> int:
        """Drop all that is held of a device; return how many conversations that were.

        A device that is connected has to connect again, and what it says then is held as ever:
        revoke it first to be rid of it. Its cached blocks cannot be told from others of its tenant
        that nobody uses at the moment, so all of those go: who comes next runs its prefix again.

        Raises:
            CapacityError: the engine does not answer; the conversations are gone already.
        """
        connection = self._connections.get(device)
        if connection is not None:
            connection.close()
        count, tenants = self.conversations.forget_device(device)
        tenants.add(self.admission.tenant_of_device(device))
        if self.snapshots is not None:
            await self.snapshots.forget_device(device)
        self.admission.forget(device)
        await self.worker.ask(lambda engine: engine.drop_idle(tenants), _FORGET_WITHIN)
        return count

    def leave(self, connection: Connection, device: str) -> None:
        """A connection is gone."""
        if self._connections.get(device) is connection:
            del self._connections[device]
        self.conversations.detach(connection)

    def terms_of(self, device: str) -> tuple[int, Load]:
        """Return the credit and the load that a device is told."""
        tenant = self.admission.tenant_of_device(device)
        standing = self.admission.standing(device, tenant, self.voice.clock())
        return CREDIT if standing.admitted else SLOW_CREDIT, self.worker.load

    def blob_of(self, digest: str) -> bytes | None:
        """Return a blob that devices may fetch."""
        known = self.brain.tokenizer.digest
        return self.brain.checkpoint.tokenizer if digest == known else None

    def check_ids(self, ids: Sequence[int], *, reply: bool = False) -> None:
        """Refuse ids that no text gives.

        Raises:
            RemoteProtocolError: an id is out of the vocabulary, or a control id in a user's text.
        """
        vocabulary = self.brain.tokenizer.header.vocabulary
        if ids and max(ids) >= vocabulary:
            raise RemoteProtocolError(
                f"token id {max(ids)}: the vocabulary has 0..{vocabulary - 1}"
            )
        if not reply and not self._control.isdisjoint(ids):
            bad = sorted(self._control.intersection(ids))
            raise RemoteProtocolError(f"control token ids {bad} in a user's turn are refused")

    # --- inside

    def _forgotten(self, device: str, name: str) -> None:
        if self.snapshots is not None:
            self.snapshots.forget(device, name)

    def _admit(self, hello: HelloBody) -> None:
        tokenizer = self.brain.tokenizer
        if hello.tokenizer and hello.tokenizer != tokenizer.digest:
            raise TokenizerMismatchError(
                f"tokenizer of device {hello.device} {hello.tokenizer}, of decoder {self.name} "
                f"{tokenizer.digest}: connect with the decoder's (it can be fetched)"
            )
        if hello.golden and hello.golden != tokenizer.golden:
            raise TokenizerMismatchError(
                f"tokenizer {tokenizer.digest}: golden vectors of device {hello.device} "
                f"{hello.golden}, of decoder {self.name} {tokenizer.golden}: "
                "install the same tokenizer library versions"
            )
        if hello.model and hello.model != self._settings.model:
            raise ModelError(
                f"model {hello.model!r} was asked for; decoder {self.name} serves "
                f"{self._settings.model!r}"
            )

    def _listener(self, address: str) -> Listener:
        scheme, _, rest = address.partition("://")
        if scheme == "shm" and rest.startswith("/"):
            return ShmListener(rest, allow_uids=self._settings.allow_uids)
        if scheme in ("mqtt", "mqtts"):
            broker = parse_broker(address, self._settings.credentials)
            fleet = self._settings.fleet
            return MqttListener(broker, fleet=fleet, decoder=self.name, boot=self.boot)
        shown = without_secrets(address)
        raise ConfigError(f"{shown}: expected shm:///absolute/path or mqtt://host:port")

    def _sweep(self) -> None:
        since = self.voice.clock() - self._settings.keep_seconds
        self.conversations.sweep(since, self._connections)
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(_SWEEP, self._sweep)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)


def _is_replying(engine: Engine) -> bool:
    """Tell whether replies are under way that somebody waits for."""
    return any(s.generation is not None and not s.is_ahead for s in engine.sequences)
