"""Processes that report JSON lines, and may be killed and started again."""

import asyncio
import json
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import LinkError

LONGEST_LINE = 1 << 24
OnReport = Callable[[Mapping[str, Any]], None]


class ReportingProcess:
    """One program under one name; it lives once at a time, and several times in all.

    Args:
        program: gets `--life N`, the number of its lives before this one, behind its arguments.
        log: what all its lives write to standard error.
        on_report: gets each object that it prints; not of a line that was cut off by its death.
    """

    def __init__(self, name: str, program: Sequence[str], log: Path, on_report: OnReport) -> None:
        self.name, self.log = name, log
        self._program, self._on_report = program, on_report
        self._process: Process | None = None
        self._following: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self.num_lives = 0

    async def start(self) -> None:
        """Start it."""
        async with self._lock:
            await self._start()

    async def crash(self, away: float) -> None:
        """Kill it (SIGKILL) and start it again after `away` seconds."""
        async with self._lock:
            await self._kill()
            await asyncio.sleep(away)
            await self._start()

    async def freeze(self, seconds: float) -> None:
        """Stop it in its tracks (SIGSTOP), and let it go on after `seconds` (SIGCONT)."""
        async with self._lock:
            self._living.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                self._living.send_signal(signal.SIGCONT)

    async def revive(self) -> bool:
        """Start it again if it has ended by itself; return whether it had."""
        async with self._lock:
            if self.is_alive:
                return False
            await self._kill()
            await self._start()
            return True

    @property
    def is_alive(self) -> bool:
        """It has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Of its present life."""
        return self._living.pid

    async def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        async with self._lock:
            stdin = self._living.stdin
            assert stdin is not None
            stdin.write(line.encode() + b"\n")

    async def ended(self, seconds: float) -> None:
        """Wait until it ends by itself.

        Raises:
            LinkError: it does not within `seconds`, or it fails; with the end of its log.
        """
        try:
            async with asyncio.timeout(seconds):
                status = await self._living.wait()
                assert self._following is not None
                await self._following
        except TimeoutError:
            raise LinkError(
                f"{self.name} has not ended within {seconds:g} s{self.last_words()}"
            ) from None
        if status:
            raise LinkError(f"{self.name} ended with status {status}{self.last_words()}")

    async def close(self) -> None:
        """Kill it, if it lives."""
        async with self._lock:
            await self._kill()

    def last_words(self) -> str:
        """Return the end of its log, to be put behind a message."""
        tail = self.log.read_text("utf-8", "replace").strip()[-800:]
        return f"; it said: {tail}" if tail else ""

    @property
    def _living(self) -> Process:
        assert self._process is not None
        return self._process

    async def _start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._program,
                "--life",
                str(self.num_lives),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                limit=LONGEST_LINE,
            )
        self.num_lives += 1
        self._following = asyncio.create_task(self._follow(self._process), name=self.name)

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._following is not None:
            await self._following

    async def _follow(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.endswith(b"\n"):
                self._on_report(json.loads(line))
