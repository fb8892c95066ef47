"""Text that grows outside: lines on standard input, and scripted dialogues typed at human speed."""

import asyncio
import codecs
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from edge.sources import Reading
from shared.errors import InputError

_PIECE = 64 * 1024
"""Bytes read at once."""


class LineSource:
    """One line = the whole text so far; an empty line ends the turn.

    Args:
        fd: where lines come from, in UTF-8; default: standard input. It stays as it is: blocking,
            and its owner's.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = sys.stdin.fileno() if fd is None else fd

    async def readings(self) -> AsyncIterator[Reading]:
        """Yield a reading per line; the end of the stream ends an open turn."""
        text = ""
        async for line in self._lines():
            if line:
                text = line.replace("\\n", "\n")
                yield Reading(text)
            elif text:
                yield Reading(text, len(text), ended=True)
                text = ""
        if text:
            yield Reading(text, len(text), ended=True)

    async def _lines(self) -> AsyncIterator[str]:
        decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
        while data := await self._read():
            *lines, rest = (rest + decoder.decode(data)).split("\n")
            for line in lines:
                yield line.removesuffix("\r")
        rest += decoder.decode(b"", final=True)
        if rest:
            yield rest

    async def _read(self) -> bytes:
        """Wait for bytes without a thread: one that waits for a person could not be ended."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        try:
            loop.add_reader(self._fd, ready.set)
        except PermissionError:  # a file on disk is always ready, says epoll_ctl(2)
            return os.read(self._fd, _PIECE)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._fd)
        return os.read(self._fd, _PIECE)


class ScriptSource:
    """Types the turns of a dialogue file, character by character.

    Args:
        path: JSON lines; each has `turns`, a list of strings or of objects with `text`.
        characters_per_second: typing speed.
        pause: seconds between the last character and the end of a turn.
    """

    def __init__(
        self, path: Path, *, characters_per_second: float = 12.0, pause: float = 0.4
    ) -> None:
        if characters_per_second <= 0 or pause < 0:
            raise InputError(
                f"typing speed {characters_per_second} and pause {pause}: above 0, at least 0"
            )
        self._turns = read_script(path)
        self._wait, self._pause = 1.0 / characters_per_second, pause

    async def readings(self) -> AsyncIterator[Reading]:
        """Yield a reading per character."""
        for text in self._turns:
            for end in range(1, len(text) + 1):
                yield Reading(text[:end], end)
                await asyncio.sleep(self._wait)
            await asyncio.sleep(self._pause)
            yield Reading(text, len(text), ended=True)


def read_script(path: Path) -> list[str]:
    """Return the driver's turns of a dialogue file.

    Raises:
        InputError: it is missing or malformed; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    turns: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)["turns"]
            turns += [turn if isinstance(turn, str) else str(turn["text"]) for turn in found]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f'{path}, line {number}: expected {{"turns": ["...", ...]}}: {error!r}'
            ) from None
    if not turns:
        raise InputError(f"{path}: it holds no turns")
    return turns
