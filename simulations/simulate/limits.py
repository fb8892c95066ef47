"""What is taken away from a running process for a while, and given back."""

import errno
import os
import resource
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

MB = 1 << 20
SHARED_MEMORY = 32
"""Megabytes in the /dev/shm of a process that has its own."""
OWN_SHARED_MEMORY = (
    *("unshare", "--mount", "sh", "-c"),
    f'mount -t tmpfs -o size={SHARED_MEMORY}m deltarelay /dev/shm && exec "$@"',
    "sh",
)
"""Runs a program with a /dev/shm of its own, which ends with it: mount_namespaces(7)."""


@contextmanager
def disk_full(pid: int) -> Generator[None, None, None]:
    """Let a process write to no file; pipes and sockets go on.

    It hears EFBIG, where a full disk says ENOSPC: SQLite and snapshots treat both alike.
    """
    with _limited(pid, resource.RLIMIT_FSIZE, 0):
        yield


@contextmanager
def no_descriptors(pid: int) -> Generator[None, None, None]:
    """Let a process open nothing beyond what it has open now (EMFILE)."""
    used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    with _limited(pid, resource.RLIMIT_NOFILE, used):
        yield


@contextmanager
def shared_memory_full(pid: int) -> Generator[None, None, None]:
    """Fill the /dev/shm that a process sees, which must be its own, to the last page."""
    filler = Path(f"/proc/{pid}/root/dev/shm/filler")
    try:
        with filler.open("wb", buffering=0) as file:
            _fill(file.fileno())
        yield
    finally:
        filler.unlink(missing_ok=True)


def may_mount() -> str:
    """Return why no process can be given a /dev/shm of its own; empty: it can."""
    tried = subprocess.run(
        [*OWN_SHARED_MEMORY, "true"], capture_output=True, text=True, check=False
    )
    return "" if tried.returncode == 0 else tried.stderr.strip() or "unshare fails"


@contextmanager
def _limited(pid: int, kind: int, most: int) -> Generator[None, None, None]:
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (most, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            resource.prlimit(pid, kind, before)


def _fill(file: int) -> None:
    for size in (MB, 4096):
        try:
            while True:
                os.write(file, bytes(size))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
