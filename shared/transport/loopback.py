"""Two ends in one event loop: the reference transport, and the double that tests and simulations use."""

import asyncio
from collections import deque

from shared.errors import DeltarelayError, LinkError
from shared.transport import OnClosed, OnFrame


class LoopbackTransport:
    """One end of a pair made by `loopback_pair`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._peer: LoopbackTransport | None = None
        self._on_frame: OnFrame | None = None
        self._on_closed: OnClosed | None = None
        self._inbox: deque[bytes] = deque()
        self._scheduled = False

    def start(self, on_frame: OnFrame, on_closed: OnClosed) -> None:
        """Begin to deliver frames."""
        self._on_frame, self._on_closed = on_frame, on_closed
        self._wake()

    def send(self, frame: bytes, *, provisional: bool = False) -> None:
        """Hand a frame to the peer in the next turn of the event loop."""
        if self._peer is not None:
            self._peer._inbox.append(bytes(frame))
            self._peer._wake()

    def close(self) -> None:
        """End the connection for both ends."""
        peer, self._peer = self._peer, None
        self._end(None)
        if peer is not None:
            peer._peer = None
            asyncio.get_running_loop().call_soon(peer._end, LinkError(f"{self.name}: peer closed"))

    def _wake(self) -> None:
        if self._on_frame is not None and self._inbox and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        while self._inbox and self._on_frame is not None:
            self._on_frame(self._inbox.popleft())

    def _end(self, reason: DeltarelayError | None) -> None:
        self._deliver()
        on_closed, self._on_closed, self._on_frame = self._on_closed, None, None
        if on_closed is not None:
            on_closed(reason)


def loopback_pair() -> tuple[LoopbackTransport, LoopbackTransport]:
    """Return the two ends of a connection within this event loop."""
    a, b = LoopbackTransport("loopback:a"), LoopbackTransport("loopback:b")
    a._peer, b._peer = b, a
    return a, b
