"""A decoder as a child process, for commands that bring their own: chat, demo, benches."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.errors import LinkError

START_TIMEOUT = 120.0
STOP_TIMEOUT = 20.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildDecoder:
    """A running decoder: where it listens, and its process."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path


@asynccontextmanager
async def open_decoder(
    model: str, *, listen: Sequence[str] = (), changes: Sequence[str] = ()
) -> AsyncGenerator[ChildDecoder, None]:
    """Run a decoder until the block is left; it also dies with this process.

    Args:
        listen: addresses besides a Unix socket of its own.
        changes: settings, as `--set` takes them.

    Raises:
        LinkError: it does not come up; the message says what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="deltarelay-") as folder:
        socket = Path(folder) / "decoder.sock"
        log = Path(folder) / "decoder.log"
        program = [sys.executable, "-m", "cloud", "--model", model, "--with-parent"]
        program += ["--set", f"state={folder}/state"]
        for address in (*listen, f"shm://{socket}"):
            program += ["--listen", address]
        for change in changes:
            program += ["--set", change]
        with log.open("wb") as output:
            child = subprocess.Popen(program, stdout=output, stderr=output)
        try:
            await _wait_for(socket, child, log)
            yield ChildDecoder(f"shm://{socket}", child, log)
        finally:
            _stop(child)


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent process ends (prctl(2), PR_SET_PDEATHSIG)."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGTERM)


async def _wait_for(socket: Path, child: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_TIMEOUT
    while not socket.exists():
        if child.poll() is not None or time.monotonic() > until:
            tail = log.read_text(errors="replace")[-800:].strip()
            raise LinkError(f"the decoder did not start (status {child.poll()}): {tail}")
        await asyncio.sleep(0.05)


def _stop(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        child.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
