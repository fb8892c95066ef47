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
from pathlib import Path

from shared.errors import LinkError

START_TIMEOUT = 120.0
STOP_TIMEOUT = 20.0
_PR_SET_PDEATHSIG = 1


class ChildDecoder:
    """A decoder in a process of its own, which may be killed and started again.

    Args:
        folder: for its socket and its log.
        arguments: of `deltarelay cloud`, besides the socket.
        through: a program that runs it in its own place, with its arguments: env, taskset, unshare.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], through: Sequence[str] = ()) -> None:
        self._socket, self.log = folder / "decoder.sock", folder / "decoder.log"
        self.address = f"shm://{self._socket}"
        """Where it listens, whatever else it listens at."""
        program = [*through, sys.executable, "-m", "cloud", "--with-parent"]
        program += ["--set", f"state={folder}/state", "--listen", self.address]
        self._program = [*program, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last."""
        assert self._process is not None
        return self._process

    async def start(self) -> None:
        """Start it and wait until it listens.

        Raises:
            LinkError: it does not come up; the message says what it printed.
        """
        self._socket.unlink(missing_ok=True)  # of one that was killed
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(self._program, stdout=output, stderr=output)
        await _wait_for(self._socket, self._process, self.log)

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it as an operator does, by SIGTERM; by SIGKILL if it does not obey."""
        if self._process is not None:
            _stop(self._process)


@asynccontextmanager
async def open_decoder(
    model: str,
    *,
    listen: Sequence[str] = (),
    changes: Sequence[str] = (),
    through: Sequence[str] = (),
) -> AsyncGenerator[ChildDecoder, None]:
    """Run a decoder until the block is left; it also dies with this process.

    Args:
        listen: addresses besides a Unix socket of its own.
        changes: settings, as `--set` takes them.
        through: a program that runs it in its own place, with its arguments: env, taskset, unshare.

    Raises:
        LinkError: it does not come up; the message says what it printed.
    """
    arguments = ["--model", model]
    for address in listen:
        arguments += ["--listen", address]
    for change in changes:
        arguments += ["--set", change]
    with tempfile.TemporaryDirectory(prefix="deltarelay-") as folder:
        decoder = ChildDecoder(Path(folder), arguments, through)
        try:
            await decoder.start()
            yield decoder
        finally:
            decoder.stop()


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
