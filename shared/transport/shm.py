"""POSIX shared memory between two processes of one host.

A Unix socket (SOCK_SEQPACKET, mode 0600, the peer's uid checked) hands over the memory of a segment
and then stays open: one byte wakes the other side, its end-of-file is how either learns of the
other's death. Frames go through the rings, wake-ups through the event loop; nothing polls. There
are no eventfds: whoever holds one may make it blocking for both, and its write never return.
"""

import asyncio
import contextlib
import os
import socket
from collections import deque
from pathlib import Path

from shared.errors import CapacityError, DeltarelayError, LinkError, RemoteProtocolError
from shared.transport import MAX_PENDING, OnClosed, OnFrame
from shared.transport.handover import peer_of, receive_memory
from shared.transport.ring import SLOTS
from shared.transport.segment import Segment

_WAIT = 2.0
"""Seconds a client waits for its memory."""
_WAKE = b"w"
_BURST = 256
"""Frames, or wake-ups, taken before the event loop may do something else."""
_TURN = 0.005
"""Seconds that frames may take before it may: what a frame asks for can be much."""


class ShmTransport:
    """One end of a connection through shared memory."""

    peer = ""
    """The kernel vouches for a process's user, not for its device's name."""

    def __init__(self, name: str, control: socket.socket, segment: Segment) -> None:
        self.name = name
        self._control = control
        self._segment = segment
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._on_frame: OnFrame | None = None
        self._on_closed: OnClosed | None = None
        self._reason: DeltarelayError | None = None
        self.is_open = True

    def start(self, on_frame: OnFrame, on_closed: OnClosed) -> None:
        """Begin to deliver frames."""
        self._loop = asyncio.get_running_loop()
        if not self.is_open:
            self._loop.call_soon(on_closed, self._reason)
            return
        self._on_frame, self._on_closed = on_frame, on_closed
        self._loop.add_reader(self._control.fileno(), self._readable)
        self._loop.call_soon(self._wake)

    def send(self, frame: bytes, *, provisional: bool = False) -> None:
        """Write a frame into the ring, or keep it until the peer makes room."""
        if not self.is_open:
            return
        try:
            if not self._pending and self._segment.producer.write(frame):
                self._wake_peer()
                return
        except DeltarelayError as error:
            self._end(error)
            return
        if provisional:
            return
        self._pending.append(bytes(frame))
        self._pending_bytes += len(frame)
        if self._pending_bytes > MAX_PENDING:
            waiting = f"{self.name}: {self._pending_bytes} bytes wait for a slow peer"
            self._end(CapacityError(waiting))

    def close(self) -> None:
        """End the connection."""
        self._end(None)

    def _wake(self) -> None:
        if not self.is_open:
            return
        try:
            self._write_pending()
            if self._read(_BURST):
                self._loop.call_soon(self._wake)
        except DeltarelayError as error:
            self._end(error)

    def _write_pending(self) -> None:
        wrote = False
        while self._pending and self._segment.producer.write(self._pending[0]):
            self._pending_bytes -= len(self._pending.popleft())
            wrote = True
        if wrote:
            self._wake_peer()

    def _read(self, most: int) -> bool:
        """Deliver up to `most` frames, for a moment; return whether there may be more."""
        frame: bytes | None = b""
        until = self._loop.time() + _TURN
        while frame is not None and most and self.is_open and self._on_frame is not None:
            if self._loop.time() > until:
                break
            frame = self._segment.consumer.read()
            if frame is not None:
                self._on_frame(frame)
                most -= 1
        if self.is_open and self._segment.consumer.space_wanted():
            self._wake_peer()
        return frame is not None

    def _wake_peer(self) -> None:
        """Tell the peer that there is something to read, or room to write."""
        with contextlib.suppress(OSError):  # it has wake-ups to read, or is gone: we hear of it
            self._control.send(_WAKE, socket.MSG_DONTWAIT)

    def _readable(self) -> None:
        """Take the wake-ups before looking into the rings."""
        said = _WAKE
        try:
            for _ in range(_BURST):
                said = self._control.recv(16)
                if said != _WAKE:
                    break
        except BlockingIOError:
            pass
        except OSError:
            said = b""
        if said == _WAKE:
            self._wake()
        elif said:
            self._end(RemoteProtocolError(f"{self.name}: {said!r} on the control socket"))
        else:
            self._hang_up()

    def _hang_up(self, turns: int = SLOTS) -> None:
        """The peer is gone: read what it wrote before it left, no more than a ring has, and end."""
        if not self.is_open:
            return
        self._loop.remove_reader(self._control.fileno())
        try:
            if turns and self._read(_BURST):
                self._loop.call_soon(self._hang_up, turns - 1)
                return
        except DeltarelayError as error:
            self._end(error)
            return
        self._end(LinkError(f"{self.name}: the peer is gone"))

    def _end(self, reason: DeltarelayError | None) -> None:
        if not self.is_open:
            return
        self.is_open, self._reason = False, reason
        if self._on_frame is not None:
            self._loop.remove_reader(self._control.fileno())
        self._control.close()
        self._segment.close()
        on_closed, self._on_closed, self._on_frame = self._on_closed, None, None
        if on_closed is not None:
            on_closed(reason)


async def connect_shm(path: str | Path) -> ShmTransport:
    """Connect to the decoder that listens at `path`.

    Raises:
        LinkError: nobody listens there, it is not a socket of ours, or the decoder refused.
        RemoteProtocolError: what it handed over is not what it should be.
    """
    with contextlib.ExitStack() as undo:
        control = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        control.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(control, str(path))
            await asyncio.wait_for(_readable(control), _WAIT)
            memory, sealed = receive_memory(control)
            foreign = peer_of(control)[1] != os.getuid()
            segment = Segment(memory, server=False, sealed=sealed or foreign)
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or str(error) or "no answer"
            hint = f"start a decoder there with `deltarelay cloud --listen shm://{path}`"
            if isinstance(error, PermissionError):
                hint = "may this user connect (the decoder's allow_uids), and enter the folder?"
            raise LinkError(f"shm://{path}: {why}; {hint}") from None
        undo.pop_all()
    return ShmTransport(f"shm://{path}", control, segment)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock.fileno(), lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
