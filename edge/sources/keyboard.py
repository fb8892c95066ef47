"""A terminal as a source: every keystroke is a reading, Enter ends the turn."""

import asyncio
import codecs
import os
import sys
import termios
import tty
import unicodedata
from collections.abc import AsyncIterator
from types import TracebackType

from edge.sources import Reading
from shared.errors import InputError

_BACKSPACE = frozenset({"\x7f", "\b"})
_ERASE_LINE, _ERASE_WORD, _END, _ENTER = "\x15", "\x17", "\x04", frozenset({"\r", "\n"})


class Line:
    """What is on the line while keys arrive. Pure."""

    def __init__(self) -> None:
        self.text = ""
        self._escape = ""

    def press(self, key: str) -> bool:
        """Apply one character of input, past control sequences; return whether the text changed."""
        before = self.text
        if self._escape or key == "\x1b":
            self._escape += key
            if len(self._escape) > 1 and self._sequence_ended():
                self._escape = ""
            return False
        if key in _BACKSPACE:
            self.text = _without_last(self.text)
        elif key == _ERASE_LINE:
            self.text = ""
        elif key == _ERASE_WORD:
            kept = self.text.rstrip()
            self.text = kept[: max(kept.rfind(" "), kept.rfind("\n")) + 1]
        elif key == "\t" or key.isprintable():
            self.text += key
        return self.text != before

    def _sequence_ended(self) -> bool:
        second, last = self._escape[1], self._escape[-1]
        if second not in "[O":
            return True
        return len(self._escape) > 2 and ("@" <= last <= "~")


def _without_last(text: str) -> str:
    """Drop the last character together with its combining marks and joiners."""
    while text and (unicodedata.combining(text[-1]) or text[-1] in "\u200d\ufe0f"):
        text = text[:-1]
    return text[:-1]


class KeyboardSource:
    """Reads keys of a terminal; a context manager, so that the terminal's mode is put back."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = sys.stdin.fileno() if fd is None else fd
        self._saved: list[object] | None = None
        self._keys: asyncio.Queue[str] = asyncio.Queue(maxsize=4096)

    def __enter__(self) -> "KeyboardSource":
        if not os.isatty(self._fd):
            raise InputError(
                "standard input is no terminal; `deltarelay edge` takes lines from a pipe"
            )
        self._saved = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd, termios.TCSADRAIN)  # keys pressed early are kept
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        if self._saved is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)  # type: ignore[arg-type]  # as returned

    async def readings(self) -> AsyncIterator[Reading]:
        """Yield a reading per key that changes the text; Ctrl-D on an empty line is the end."""
        line = Line()
        while True:
            key = await self._keys.get()
            if key == _END and not line.text:
                return
            if key in _ENTER:
                if line.text.strip():
                    yield Reading(line.text, len(line.text), ended=True)
                    line = Line()
            elif line.press(key):
                yield Reading(line.text)

    def _read(self) -> None:
        data = os.read(self._fd, 4096)
        for key in self._utf8.decode(data) if data else _END:
            if not self._keys.full():
                self._keys.put_nowait(key)
