"""The memory of one shared-memory connection: two rings.

The server makes it, so that a client cannot choose size or layout, and passes its descriptor over
the Unix socket. Two kinds of memory: a `posix_ipc` segment, unlinked right after opening, for
a peer of the same user; a sealed memfd for a peer of another one, because an unsealed segment can
be shrunk under a reader, which then dies of SIGBUS.
"""

import contextlib
import fcntl
import mmap
import os
import secrets

import posix_ipc

from shared.errors import CapacityError, RemoteProtocolError
from shared.transport.ring import Consumer, Producer, Ring, ring_bytes

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
SIZE = 2 * ring_bytes()
"""Bytes of a segment: the ring up, then the ring down."""


def create_memory(*, sealed: bool) -> int:
    """Make formatted memory; return its descriptor.

    Raises:
        CapacityError: no memory in /dev/shm, or no descriptors left.
    """
    try:
        return _create_memfd() if sealed else _create_posix()
    except (OSError, posix_ipc.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise CapacityError(
            f"a shared-memory segment of {SIZE} bytes cannot be made: {why}; "
            "free space in /dev/shm or raise the limit on open files"
        ) from error


def _create_posix() -> int:
    name = f"/deltarelay-{secrets.token_hex(12)}"
    segment = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
    fd: int = segment.fd
    try:
        segment.unlink()
        _format(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create_memfd() -> int:
    fd = os.memfd_create("deltarelay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _format(fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _format(fd: int) -> None:
    # ftruncate alone succeeds on a full /dev/shm, and the first write is then a SIGBUS
    os.ftruncate(fd, SIZE)
    os.posix_fallocate(fd, 0, SIZE)
    with mmap.mmap(fd, SIZE) as memory:
        for at in (0, SIZE // 2):
            with memoryview(memory)[at : at + SIZE // 2] as half:
                Ring.format(half)


class Segment:
    """One end's mapping: a ring to write and a ring to read. Owns the descriptor it is given.

    Raises:
        RemoteProtocolError: the memory is not what it should be; the descriptor is closed.
    """

    def __init__(self, memory: int, *, server: bool, sealed: bool = False) -> None:
        self.memory = memory
        """Its descriptor."""
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, memory)
            _check_memory(memory, sealed=sealed)
            self._map = undo.enter_context(mmap.mmap(memory, SIZE))
            up, down = (memoryview(self._map)[at : at + SIZE // 2] for at in (0, SIZE // 2))
            undo.callback(up.release)
            undo.callback(down.release)
            self.producer = Producer(down if server else up)
            undo.callback(self.producer.release)
            self.consumer = Consumer(up if server else down)
            undo.callback(self.consumer.release)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Unmap and close; the kernel frees the memory with the last end."""
        self._undo.close()


def _check_memory(fd: int, *, sealed: bool) -> None:
    size = os.fstat(fd).st_size
    if size != SIZE:
        raise RemoteProtocolError(f"shared memory has {size} bytes, not {SIZE}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS) if sealed else _SEALS
    except OSError:  # memory of a kind that has no seals
        seals = 0
    if seals & _SEALS != _SEALS:
        raise RemoteProtocolError("shared memory of another user is not sealed")
