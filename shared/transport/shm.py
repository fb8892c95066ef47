"""POSIX shared memory between two processes of one host.

A Unix socket (SOCK_SEQPACKET, mode 0600, the peer's uid checked) hands over the descriptors of a segment and
then stays open: its end-of-file is how either side learns of the other's death. Frames go through the rings,
wake-ups through eventfds in the event loop; nothing polls.
"""

import array
import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

from shared.errors import CapacityError, DeltarelayError, LinkError, RemoteProtocolError
from shared.transport import MAX_PENDING, OnClosed, OnFrame, Transport
from shared.transport.segment import Descriptors, Segment, create_descriptors

_GREETING = struct.Struct("<4sBB")
_MAGIC, _VERSION = b"DRSM", 1
_WAIT = 2.0
"""Seconds a client waits for its descriptors."""


class ShmTransport:
    """One end of a connection through shared memory."""

    def __init__(self, name: str, control: socket.socket, segment: Segment) -> None:
        self.name = name
        self._control = control
        self._segment = segment
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._on_frame: OnFrame | None = None
        self._on_closed: OnClosed | None = None
        self._open = True

    def start(self, on_frame: OnFrame, on_closed: OnClosed) -> None:
        """Begin to deliver frames."""
        self._on_frame, self._on_closed = on_frame, on_closed
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._segment.wake_fd, self._wake)
        self._loop.add_reader(self._control.fileno(), self._hang_up)
        self._loop.call_soon(self._wake)

    def send(self, frame: bytes, *, provisional: bool = False) -> None:
        """Write a frame into the ring, or keep it until the peer makes room."""
        if not self._open:
            return
        try:
            if not self._pending and self._segment.producer.write(frame):
                self._segment.wake_peer()
                return
        except DeltarelayError as error:
            self._end(error)
            return
        if provisional:
            return
        self._pending.append(bytes(frame))
        self._pending_bytes += len(frame)
        if self._pending_bytes > MAX_PENDING:
            self._end(
                CapacityError(f"{self.name}: {self._pending_bytes} bytes wait for a slow peer")
            )

    def close(self) -> None:
        """End the connection."""
        self._end(None)

    def _wake(self) -> None:
        if not self._open:
            return
        self._segment.clear_wake()
        try:
            self._write_pending()
            self._read_all()
        except DeltarelayError as error:
            self._end(error)

    def _write_pending(self) -> None:
        wrote = False
        while self._pending and self._segment.producer.write(self._pending[0]):
            self._pending_bytes -= len(self._pending.popleft())
            wrote = True
        if wrote:
            self._segment.wake_peer()

    def _read_all(self) -> None:
        while self._open and self._on_frame is not None:
            frame = self._segment.consumer.read()
            if frame is None:
                break
            self._on_frame(frame)
        if self._open and self._segment.consumer.space_wanted():
            self._segment.wake_peer()

    def _hang_up(self) -> None:
        try:
            gone = self._control.recv(16) == b""
        except BlockingIOError:
            return
        except OSError:
            gone = True
        if gone:
            self._wake()  # what it wrote before it left
            self._end(LinkError(f"{self.name}: the peer is gone"))

    def _end(self, reason: DeltarelayError | None) -> None:
        if not self._open:
            return
        self._open = False
        if self._on_frame is not None:
            self._loop.remove_reader(self._segment.wake_fd)
            self._loop.remove_reader(self._control.fileno())
        self._control.close()
        on_closed, self._on_closed, self._on_frame = self._on_closed, None, None
        self._segment.close()
        if on_closed is not None:
            on_closed(reason)


async def connect_shm(path: str | Path) -> ShmTransport:
    """Connect to the decoder that listens at `path`.

    Raises:
        LinkError: nobody listens there, it is not a socket of ours, or the decoder refused.
    """
    loop = asyncio.get_running_loop()
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.setblocking(False)
    try:
        await loop.sock_connect(control, str(path))
        await asyncio.wait_for(_readable(control), _WAIT)
        descriptors, sealed = _receive_descriptors(control)
    except (OSError, TimeoutError) as error:
        control.close()
        why = getattr(error, "strerror", None) or "no answer"
        raise LinkError(
            f"shm://{path}: {why}; start a decoder there with `deltarelay cloud --listen shm://{path}`"
        ) from None
    except DeltarelayError:
        control.close()
        raise
    try:
        segment = Segment(descriptors, server=False, sealed=sealed)
    except DeltarelayError:
        control.close()
        raise
    return ShmTransport(f"shm://{path}", control, segment)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock.fileno(), lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())


def _receive_descriptors(control: socket.socket) -> tuple[Descriptors, bool]:
    space = socket.CMSG_SPACE(3 * array.array("i").itemsize)
    data, ancillary, flags, _ = control.recvmsg(256, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    whole = len(data) == _GREETING.size and len(fds) == 3 and not flags & socket.MSG_CTRUNC
    if whole and _GREETING.unpack(data)[:2] == (_MAGIC, _VERSION):
        return Descriptors(*fds), bool(_GREETING.unpack(data)[2])
    for fd in fds:
        os.close(fd)
    if data and not fds and not data.startswith(_MAGIC):
        raise LinkError(f"the decoder refused: {data.decode(errors='replace')}")
    if not data:
        raise LinkError("the decoder hung up at once")
    raise RemoteProtocolError(
        f"{len(fds)} of 3 descriptors arrived: raise the limit on open files, or update the older end"
    )


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
        except OSError as error:
            listening.close()
            raise LinkError(f"{self.name}: cannot listen: {error.strerror or error}") from None
        listening.setblocking(False)
        self._socket, self._on_connection = listening, on_connection
        asyncio.get_running_loop().add_reader(listening.fileno(), self._accept)

    async def close(self) -> None:
        """Stop, hang up on everybody and remove the socket file."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
        for transport in list(self._transports):
            transport.close()

    def _remove_stale(self) -> None:
        try:
            mode = self._path.stat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise LinkError(f"{self.name}: the path exists and is no socket; choose another")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(str(self._path))
            except ConnectionRefusedError:
                self._path.unlink(missing_ok=True)
                return
            except OSError as error:
                raise LinkError(f"{self.name}: {error.strerror}") from None
        raise LinkError(
            f"{self.name}: another decoder listens here; stop it or choose another path"
        )

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            control, _ = self._socket.accept()
        except OSError:  # the client is gone again, or no descriptor is left: the next one may succeed
            return
        control.setblocking(False)
        try:
            transport = self._hand_over(control)
        except (DeltarelayError, OSError) as error:
            with contextlib.suppress(OSError):
                control.send(str(error).encode()[:250])
            control.close()
            return
        self._transports = {t for t in self._transports if t._open}
        self._transports.add(transport)
        self._on_connection(transport)

    def _hand_over(self, control: socket.socket) -> ShmTransport:
        credentials = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", credentials)
        own = uid == os.getuid()
        if not own and uid not in self._allow:
            raise LinkError(f"user {uid} may not connect: add it to the decoder's allow_uids")
        descriptors = create_descriptors(sealed=not own)
        segment = Segment(descriptors, server=True, sealed=not own)
        try:
            greeting = _GREETING.pack(_MAGIC, _VERSION, int(not own))
            fds = [descriptors.memory, descriptors.client_wake, descriptors.server_wake]
            socket.send_fds(control, [greeting], fds)
        except OSError:
            segment.close()
            raise
        return ShmTransport(f"{self.name}#{pid}", control, segment)
