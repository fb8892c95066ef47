"""Session × transport × clock: the only place where they meet."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.errors import DeltarelayError, LinkError, ProtocolError
from shared.session.events import Event, Outgoing
from shared.transport import Transport

Clock = Callable[[], float]


class Session(Protocol):
    """What a channel drives: either end's session."""

    def receive(self, data: bytes, now: float) -> list[Event]: ...
    def poll(self, now: float) -> list[Event]: ...
    def timer(self) -> float | None: ...
    def take_outgoing(self) -> list[Outgoing]: ...


@dataclass(slots=True)
class Traffic:
    """Counts frames and their bytes, without what the transport adds."""

    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0

    def sent(self, data: bytes) -> None:
        """Count a frame sent."""
        self.frames_sent += 1
        self.bytes_sent += len(data)

    def received(self, data: bytes) -> None:
        """Count a frame received."""
        self.frames_received += 1
        self.bytes_received += len(data)


class Channel:
    """Runs one session over one transport until either ends.

    Args:
        on_events: called with what the session reports, within the event loop.
        on_closed: called once, with the reason, after the transport is gone.
    """

    def __init__(
        self,
        session: Session,
        transport: Transport,
        clock: Clock,
        *,
        on_events: Callable[[Sequence[Event]], None],
        on_closed: Callable[[DeltarelayError], None],
        traffic: Traffic | None = None,
    ) -> None:
        self._session, self._transport, self._clock = session, transport, clock
        self._on_events, self._on_closed = on_events, on_closed
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at: float | None = None
        self._open = True
        self.traffic = traffic if traffic is not None else Traffic()

    def start(self) -> None:
        """Let frames in, and send what the session owes."""
        self._transport.start(self._receive, self._ended)
        self.pump()

    def pump(self) -> None:
        """Run what is due and send what is owed. Call it after touching the session."""
        if not self._open:
            return
        try:
            events = self._session.poll(self._clock())
        except ProtocolError as error:
            self._fail(error)
            return
        self._send_owed()
        if events and self._report(events):
            self._send_owed()
        self._set_alarm()

    def close(self, reason: DeltarelayError | None = None) -> None:
        """Send what is owed and end the connection."""
        if self._open:
            self._send_owed()
            self._finish(reason or LinkError(f"{self._transport.name}: closed here"))

    def _receive(self, data: bytes) -> None:
        if not self._open:
            return
        self.traffic.received(data)
        try:
            events = self._session.receive(data, self._clock())
        except ProtocolError as error:
            self._fail(error)
            return
        if self._report(events):
            self.pump()

    def _report(self, events: Sequence[Event]) -> bool:
        """Tell the owner; return whether it, too, thinks that the peer keeps to the protocol."""
        try:
            if events:
                self._on_events(events)
        except ProtocolError as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: ProtocolError) -> None:
        if not self._open:
            return
        refuse = getattr(self._session, "refuse", None)
        if refuse is not None:
            refuse(error)
        self._send_owed()
        self._finish(error)

    def _send_owed(self) -> None:
        for data, provisional in self._session.take_outgoing():
            self.traffic.sent(data)
            self._transport.send(data, provisional=provisional)

    def _set_alarm(self) -> None:
        at = self._session.timer() if self._open else None
        if at == self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._alarm_at = at
        if at is not None:
            self._alarm = self._loop.call_later(max(0.0, at - self._clock()), self._ring)

    def _ring(self) -> None:
        self._alarm = self._alarm_at = None
        self.pump()

    def _ended(self, reason: DeltarelayError | None) -> None:
        if self._open:
            self._finish(reason or LinkError(f"{self._transport.name}: closed"))

    def _finish(self, reason: DeltarelayError) -> None:
        self._open = False
        if self._alarm is not None:
            self._alarm.cancel()
        self._transport.close()
        self._on_closed(reason)
