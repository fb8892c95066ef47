"""Carries frames between the two ends of one connection. Knows nothing of what they mean.

Every transport passes the same conformance suite (`tests/conformance`). All run on one asyncio
event loop and hand frames over by callback, so that a frame is parsed in the turn that received it.
"""

from collections.abc import Callable
from typing import Protocol

from shared.errors import DeltarelayError

OnFrame = Callable[[bytes], None]
OnClosed = Callable[[DeltarelayError | None], None]
"""Called once when the connection ends: None after `close`, else why."""

MAX_PENDING = 4 * 1024 * 1024
"""Bytes that may wait for a slow peer; beyond them the connection is given up, to be resumed."""


class Transport(Protocol):
    """One end of one connection."""

    @property
    def name(self) -> str:
        """Where it leads, for messages: `shm:///run/...`, `mqtt://host:port`."""
        ...

    @property
    def peer(self) -> str:
        """Which device is at the other end, where the transport can vouch for that; else empty."""
        ...

    def start(self, on_frame: OnFrame, on_closed: OnClosed) -> None:
        """Begin to deliver frames. Called once, from within the event loop."""
        ...

    def send(self, frame: bytes, *, provisional: bool = False) -> None:
        """Queue a frame; order is kept among frames that are not provisional.

        A provisional frame may be dropped when the peer is slow. After the connection has ended
        nothing happens: the owner learns of the end by `on_closed`.
        """
        ...

    def close(self) -> None:
        """End the connection; frames already queued are sent if the peer takes them at once."""
        ...


class Listener(Protocol):
    """Where a decoder waits for devices."""

    @property
    def name(self) -> str:
        """The address devices connect to."""
        ...

    async def start(self, on_connection: Callable[[Transport], None]) -> None:
        """Begin to accept. `on_connection` must call `Transport.start` before it returns."""
        ...

    def drain(self) -> None:
        """Let nobody new in; whoever is connected stays."""
        ...

    async def close(self) -> None:
        """Stop accepting and end every connection."""
        ...
