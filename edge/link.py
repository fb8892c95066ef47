"""The edge's connection to its decoder: opens transports, keeps one up, tells the session."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from random import Random

from edge.door import Door
from shared import frames
from shared.backoff import Backoff
from shared.channel import Channel, Traffic
from shared.errors import DeltarelayError, LinkError
from shared.frames import DRAINING
from shared.session import Connected, Disconnected, EdgeSession, Event, Noticed

log = logging.getLogger(__name__)

GREETING_TIMEOUT = 5.0


class Link:
    """Keeps `session` connected through transports that `door` opens.

    Args:
        on_events: gets what the session reports.
        on_lost: gets the error when the link will not come back by itself.
    """

    def __init__(
        self,
        session: EdgeSession,
        door: Door,
        *,
        on_events: Callable[[Sequence[Event]], None],
        on_lost: Callable[[DeltarelayError], None],
        rng: Random | None = None,
    ) -> None:
        self._session, self._door = session, door
        self._on_events, self._on_lost = on_events, on_lost
        self._backoff = Backoff(rng or Random())
        self._channel: Channel | None = None
        self._greeted: asyncio.Future[None] | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._closed = False
        self._moving = False
        """The decoder wants to leave: find another as soon as no reply is under way."""
        self.num_reconnects = 0
        self.traffic = Traffic()

    async def start(self) -> None:
        """Connect for the first time.

        Raises:
            DeltarelayError: no decoder, or it refuses.
        """
        await self._connect()

    def start_alone(self, error: DeltarelayError) -> None:
        """Nobody answered at the start: keep trying."""
        self._after_loss(error, retry=True)

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
        transport = await self._door.open()
        self._moving = False
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
            self._door.avoid()
            channel.close()
            raise LinkError(f"{transport.name}: no answer to HELLO") from None
        finally:
            self._greeted = None
        if self._channel is not channel:  # lost before we came to know of the answer
            raise LinkError(f"{transport.name}: lost right behind the answer to HELLO")
        self._backoff.connected(time.monotonic())

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Connected():
                    if self._greeted is not None and not self._greeted.done():
                        self._greeted.set_result(None)
                case Disconnected(error, retry):
                    self._door.avoid()
                    self._hang_up(error, retry=retry)
                case Noticed(frames.CONNECTION, topic, _) if topic == DRAINING:
                    self._moving = True
                case _:
                    pass
        self._on_events(events)
        if self._moving and not self._session.awaits_reply:
            self._door.avoid()
            self._hang_up(LinkError("the decoder is about to leave"), retry=True)

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
