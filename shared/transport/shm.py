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
import stat
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

from shared.errors import CapacityError, DeltarelayError, LinkError, RemoteProtocolError
from shared.transport import MAX_PENDING, OnClosed, OnFrame, Transport
from shared.transport.handover import peer_of, receive_memory, send_memory, send_refusal
from shared.transport.ring import SLOTS
from shared.transport.segment import Segment, create_memory

_WAIT = 2.0
"""Seconds a client waits for its memory."""
_WAKE = b"w"
_BURST = 256
"""Frames, or wake-ups, taken before the event loop may do something else."""
_TURN = 0.005
"""Seconds that frames may take before it may: what a frame asks for can be much."""
_ACCEPT_PAUSE = 0.2
"""Seconds without accepting after no descriptor was left for a client."""


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


class ShmListener:
    """Accepts vehicles of this host at a Unix socket.

    Args:
        path: the socket; its folder must exist and should belong to this user alone.
        allow_uids: users besides our own who may connect; they get sealed memory.
    """

    def __init__(self, path: str | Path, *, allow_uids: Collection[int] = ()) -> None:
        self._path = Path(path)
        self._allow = frozenset(allow_uids)
        self._socket: socket.socket | None = None
        self._file = (0, 0)
        """Device and inode of our socket file."""
        self._transports: set[ShmTransport] = set()

    @property
    def name(self) -> str:
        """The address clients use."""
        return f"shm://{self._path}"

    async def start(self, on_connection: Callable[[Transport], None]) -> None:
        """Listen, after removing the socket file that a dead decoder may have left.

        Raises:
            LinkError: a living decoder has this socket, or the path cannot be used.
        """
        self._remove_stale()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            previous = os.umask(0o177 if not self._allow else 0o111)
            try:
                listening.bind(str(self._path))
            finally:
                os.umask(previous)
            listening.listen(128)
            self._file = self._file_now()
        except OSError as error:
            listening.close()
            raise LinkError(f"{self.name}: cannot listen: {error.strerror or error}") from None
        listening.setblocking(False)
        self._socket, self._on_connection = listening, on_connection
        self._watch()

    def drain(self) -> None:
        """Let nobody new in, and leave the path to a decoder to come."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            with contextlib.suppress(FileNotFoundError):
                if self._file_now() == self._file:  # not a later decoder's
                    self._path.unlink()

    async def close(self) -> None:
        """Stop, hang up on everybody and remove the socket file."""
        self.drain()
        for transport in list(self._transports):
            transport.close()

    def _file_now(self) -> tuple[int, int]:
        status = self._path.lstat()
        return status.st_dev, status.st_ino

    def _remove_stale(self) -> None:
        try:
            mode = self._path.stat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise LinkError(f"{self.name}: the path exists and is no socket; choose another")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self._path))
            except ConnectionRefusedError:
                self._path.unlink(missing_ok=True)
                return
            except BlockingIOError:  # its queue is full: it lives
                pass
            except OSError as error:
                raise LinkError(f"{self.name}: {error.strerror}") from None
        raise LinkError(
            f"{self.name}: another decoder listens here; stop it or choose another path"
        )

    def _watch(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        try:
            control, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client is gone again
            return
        except OSError:  # no descriptor is left: the waiting client would wake us for ever
            loop.remove_reader(self._socket.fileno())
            loop.call_later(_ACCEPT_PAUSE, self._watch)
            return
        control.setblocking(False)
        try:
            transport = self._hand_over(control)
        except (DeltarelayError, OSError) as error:
            with contextlib.suppress(OSError):
                send_refusal(control, str(error))
            control.close()
            return
        self._transports = {t for t in self._transports if t.is_open}
        self._transports.add(transport)
        self._on_connection(transport)

    def _hand_over(self, control: socket.socket) -> ShmTransport:
        pid, uid = peer_of(control)
        own = uid == os.getuid()
        if not own and uid not in self._allow:
            raise LinkError(f"user {uid} may not connect: add it to the decoder's allow_uids")
        memory = create_memory(sealed=not own)
        segment = Segment(memory, server=True, sealed=not own)
        try:
            send_memory(control, memory, sealed=not own)
        except OSError:
            segment.close()
            raise
        return ShmTransport(f"{self.name}#{pid}", control, segment)
