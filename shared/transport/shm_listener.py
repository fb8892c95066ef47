"""A decoder's side of shared memory: accepts vehicles of this host at a Unix socket."""

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Callable, Collection, Generator
from pathlib import Path

from shared.errors import DeltarelayError, LinkError
from shared.transport import Transport
from shared.transport.handover import peer_of, send_memory, send_refusal
from shared.transport.segment import Segment, create_memory
from shared.transport.shm import ShmTransport

_ACCEPT_PAUSE = 0.2
"""Seconds without accepting after no descriptor was left for a client."""


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
        with self._alone():
            self._remove_stale()
            listening = self._bind()
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

    @contextlib.contextmanager
    def _alone(self) -> Generator[None, None, None]:
        """Of two that start at once, only one removes a stale file and puts its own there."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock_path = Path(f"{self._path}.lock")
        try:
            lock = os.open(lock_path, flags, 0o600)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink == 0:  # the other one is through, and has removed it
                raise self._taken()
            try:
                yield
            finally:
                lock_path.unlink(missing_ok=True)
        except BlockingIOError:
            raise self._taken() from None
        finally:
            os.close(lock)

    def _bind(self) -> socket.socket:
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
            raise self._unusable(error) from None
        return listening

    def _unusable(self, error: OSError) -> LinkError:
        return LinkError(f"{self.name}: cannot listen: {error.strerror or error}")

    def _taken(self) -> LinkError:
        return LinkError(
            f"{self.name}: another decoder listens here; stop it or choose another path"
        )

    def _file_now(self) -> tuple[int, int]:
        status = self._path.lstat()
        return status.st_dev, status.st_ino

    def _remove_stale(self) -> None:
        """Remove the file that a dead decoder has left.

        Raises:
            LinkError: somebody listens at it, or it is something else.
        """
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
        raise self._taken()

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
