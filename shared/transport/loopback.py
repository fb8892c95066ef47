"""Two ends in one event loop: the reference transport, and the double of tests and simulations."""

import asyncio
from collections import deque

from shared.errors import CapacityError, DeltarelayError, LinkError
from shared.transport import MAX_PENDING, OnClosed, OnFrame


class LoopbackTransport:
    """One end of a pair made by `loopback_pair`.

    Args:
        peer: the device at the other end, if it is to be vouched for.
    """

    def __init__(self, name: str, peer: str = "") -> None:
        self.name, self.peer = name, peer
        self._peer: LoopbackTransport | None = None
        self._on_frame: OnFrame | None = None
        self._on_closed: OnClosed | None = None
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._over: DeltarelayError | None = None
        """Why the connection ends, once the inbox is empty."""
        self._scheduled = False

    def start(self, on_frame: OnFrame, on_closed: OnClosed) -> None:
        """Begin to deliver frames."""
        self._on_frame, self._on_closed = on_frame, on_closed
        self._wake()

    def send(self, frame: bytes, *, provisional: bool = False) -> None:
        """Hand a frame to the peer in the next turn of the event loop."""
        peer = self._peer
        if peer is None or (provisional and peer._inbox_bytes > MAX_PENDING // 2):
            return
        peer._inbox.append(bytes(frame))
        peer._inbox_bytes += len(frame)
        if peer._inbox_bytes > MAX_PENDING:
            waiting = f"{self.name}: {peer._inbox_bytes} bytes wait for a slow peer"
            self._hang_up(CapacityError(waiting))
        else:
            peer._wake()

    def close(self) -> None:
        """End the connection for both ends."""
        self._hang_up(None)

    def _hang_up(self, reason: DeltarelayError | None) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            peer._peer, peer._over = None, LinkError(f"{self.name}: peer closed")
            peer._wake()
        self._end(reason)

    def _wake(self) -> None:
        due = self._inbox or self._over is not None
        if self._on_frame is not None and due and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        while self._inbox and self._on_frame is not None:
            frame = self._inbox.popleft()
            self._inbox_bytes -= len(frame)
            self._on_frame(frame)
        if self._over is not None:
            self._end(self._over)

    def join(self, peer: "LoopbackTransport") -> None:
        """Become the two ends of one connection."""
        self._peer, peer._peer = peer, self

    def _end(self, reason: DeltarelayError | None) -> None:
        self._inbox.clear()
        on_closed, self._on_closed, self._on_frame = self._on_closed, None, None
        if on_closed is not None:
            on_closed(reason)


def loopback_pair(peer: str = "") -> tuple[LoopbackTransport, LoopbackTransport]:
    """Return the two ends of a connection within this event loop; `peer`: who is at the first."""
    a, b = LoopbackTransport("loopback:a"), LoopbackTransport("loopback:b", peer)
    a.join(b)
    return a, b
