"""The edge's connection to its decoder: opens transports, keeps one up, tells the session."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from shared.backoff import Backoff
from shared.channel import Channel, Traffic
from shared.errors import ConfigError, DeltarelayError, LinkError
from shared.session import Connected, Disconnected, EdgeSession, Event
from shared.transport import Transport
from shared.transport.credentials import Credentials
from shared.transport.mqtt import connect_mqtt
from shared.transport.mqtt_address import parse_broker, without_secrets
from shared.transport.shm import connect_shm

log = logging.getLogger(__name__)

GREETING_TIMEOUT = 5.0


async def open_transport(
    url: str,
    *,
    fleet: str,
    device: str,
    decoder: str | None,
    credentials: Credentials | None = None,
) -> Transport:
    """Connect to `shm:///path` or `mqtt[s]://[user:password@]host[:port]`.

    Raises:
        ConfigError: the address is of another form, or credentials cannot be used.
        LinkError: nobody answers there.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "shm" and rest.startswith("/"):
        return await connect_shm(rest)
    if scheme in ("mqtt", "mqtts"):
        broker = parse_broker(url, credentials)  # files are read anew: they may have been renewed
        return await connect_mqtt(broker, fleet=fleet, device=device, decoder=decoder)
    raise ConfigError(f"{without_secrets(url)}: expected shm:///absolute/path or mqtt://host:port")


class Link:
    """Keeps `session` connected through transports that `open_one` makes.

    Args:
        on_events: gets what the session reports.
        on_lost: gets the error when the link will not come back by itself.
    """

    def __init__(
        self,
        session: EdgeSession,
        open_one: Callable[[], Awaitable[Transport]],
        *,
        on_events: Callable[[Sequence[Event]], None],
        on_lost: Callable[[DeltarelayError], None],
        rng: Random | None = None,
    ) -> None:
        self._session, self._open_one = session, open_one
        self._on_events, self._on_lost = on_events, on_lost
        self._backoff = Backoff(rng or Random())
        self._channel: Channel | None = None
        self._greeted: asyncio.Future[None] | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._closed = False
        self.num_reconnects = 0
        self.traffic = Traffic()

    async def start(self) -> None:
        """Connect for the first time.

        Raises:
            DeltarelayError: no decoder, or it refuses.
        """
        await self._connect()

    def pump(self) -> None:
        """Send what the session owes."""
        if self._channel is not None:
            self._channel.pump()

    async def close(self) -> None:
        """Hang up."""
        self._closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.gather(self._reconnecting, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()

    async def _connect(self) -> None:
        transport = await self._open_one()
        self._greeted = asyncio.get_running_loop().create_future()
        channel = Channel(
            self._session,
            transport,
            time.monotonic,
            on_events=self._take,
            on_closed=self._lost,
            traffic=self.traffic,
        )
        self._channel = channel
        self._session.connect(time.monotonic())
        channel.start()
        try:
            await asyncio.wait_for(self._greeted, GREETING_TIMEOUT)
        except TimeoutError:
            channel.close()
            raise LinkError(f"{transport.name}: no answer to HELLO") from None
        finally:
            self._greeted = None
        self._backoff.connected(time.monotonic())

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Connected():
                    if self._greeted is not None and not self._greeted.done():
                        self._greeted.set_result(None)
                case Disconnected(error, retry):
                    self._hang_up(error, retry=retry)
                case _:
                    pass
        self._on_events(events)

    def _hang_up(self, error: DeltarelayError, *, retry: bool) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close(error)
        self._after_loss(error, retry=retry)

    def _lost(self, error: DeltarelayError) -> None:
        if self._channel is not None:
            self._channel = None
            self._session.disconnect()
            self._after_loss(error, retry=True)

    def _after_loss(self, error: DeltarelayError, *, retry: bool) -> None:
        if self._greeted is not None:
            if not self._greeted.done():
                self._greeted.set_exception(error)
        elif self._closed:
            return
        elif not retry:
            self._on_lost(error)
        elif self._reconnecting is None or self._reconnecting.done():
            log.warning("%s; connecting again", error)
            self._reconnecting = asyncio.create_task(self._reconnect(), name="reconnect")

    async def _reconnect(self) -> None:
        while not self._closed:
            await asyncio.sleep(self._backoff.delay(time.monotonic()))
            try:
                await self._connect()
            except LinkError as error:
                log.info("%s; trying again", error)
            except DeltarelayError as error:
                self._on_lost(error)
                return
            else:
                self.num_reconnects += 1
                return
