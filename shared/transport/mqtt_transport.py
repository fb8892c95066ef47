"""One end of a connection over MQTT: what a device and the decoder's side of it have in common."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from shared.errors import CapacityError, DeltarelayError, LinkError
from shared.transport import MAX_PENDING, OnClosed, OnFrame


class Publish(Protocol):
    """Put a message on the transport's outward topic."""

    def __call__(self, payload: bytes, *, provisional: bool) -> None: ...


class MqttTransport:
    """A device's end, or the decoder's end for one device.

    Args:
        peer: the device that the broker lets publish to us under its name; empty on a device.
        ended: called when the connection is over; `hang_up`: the peer does not know.
    """

    def __init__(
        self, name: str, publish: Publish, ended: Callable[[bool], None], *, peer: str = ""
    ) -> None:
        self.name, self.peer = name, peer
        self._publish, self._ended = publish, ended
        self._on_frame: OnFrame | None = None
        self._on_closed: OnClosed | None = None
        self._early: list[bytes] = []
        self._is_open = True
        self._reason: DeltarelayError | None = None

    def start(self, on_frame: OnFrame, on_closed: OnClosed) -> None:
        """Begin to deliver frames."""
        if not self._is_open:
            asyncio.get_running_loop().call_soon(on_closed, self._reason)
            return
        self._on_frame, self._on_closed = on_frame, on_closed
        early, self._early = self._early, []
        for frame in early:
            self.deliver(frame)

    def send(self, frame: bytes, *, provisional: bool = False) -> None:
        """Publish a frame."""
        if self._is_open:
            self._publish(frame, provisional=provisional)

    def close(self) -> None:
        """End this connection."""
        self.end(None, hang_up=True)

    def deliver(self, frame: bytes) -> None:
        """Take a message from the client."""
        if not frame:
            self.end(LinkError(f"{self.name}: the peer hung up"))
        elif self._on_frame is not None:
            self._on_frame(frame)
        elif self._is_open:
            self._early.append(frame)
            if sum(map(len, self._early)) > MAX_PENDING:
                self.end(CapacityError(f"{self.name}: too much arrived before the start"))

    def end(self, reason: DeltarelayError | None, *, hang_up: bool = False) -> None:
        """The connection is over."""
        if not self._is_open:
            return
        self._is_open, self._reason = False, reason
        on_closed, self._on_closed, self._on_frame = self._on_closed, None, None
        self._ended(hang_up)
        if on_closed is not None:
            on_closed(reason)
