"""Keys, lines and scripts as sources."""

import asyncio
import os
import pty
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edge.sources import Reading, Source
from edge.sources.keyboard import KeyboardSource, Line
from edge.sources.text import LineSource, ScriptSource
from shared.errors import InputError


def readings_of(source: Source) -> list[Reading]:
    async def collect() -> list[Reading]:
        return [reading async for reading in source.readings()]

    return asyncio.run(collect())


def typed(keys: str) -> str:
    line = Line()
    for key in keys:
        line.press(key)
    return line.text


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("abc", "abc"),
        ("abc\x7f\x7f", "a"),
        ("cafe\u0301\x7f", "caf"),
        ("two words\x17", "two "),
        ("gone\x15here", "here"),
        ("a\x1b[Ab\x1b[1;5Cc\x1bOPd\x1bxe", "abcde"),
        ("\x01\x02ok", "ok"),
        ("\x7f", ""),
        ("日本\x7f語", "日語"),
    ],
)
def test_a_line_follows_the_keys(keys: str, text: str) -> None:
    assert typed(keys) == text


def test_a_terminal_gives_a_reading_per_key_and_a_turn_per_enter() -> None:
    async def main() -> list[Reading]:
        master, slave = pty.openpty()
        found: list[Reading] = []
        try:
            with KeyboardSource(slave) as keyboard:
                os.write(master, "hé\n".encode() + b"\n\x04")
                async with asyncio.timeout(5):
                    found = [reading async for reading in keyboard.readings()]
        finally:
            os.close(master)
            os.close(slave)
        return found

    found = asyncio.run(main())
    assert found == [Reading("h"), Reading("hé"), Reading("hé", 2, ended=True)]


def test_a_pipe_is_no_keyboard() -> None:
    read, write = os.pipe()
    try:
        with pytest.raises(InputError, match="no terminal"):
            KeyboardSource(read).__enter__()
    finally:
        os.close(read)
        os.close(write)


def lines_of(data: bytes, *, cut: int, path: Path | None = None) -> list[Reading]:
    """Return what a source makes of bytes: in pieces from a pipe, or from a file."""

    async def main() -> list[Reading]:
        if path is not None:
            path.write_bytes(data)
            with path.open("rb") as file:
                return [reading async for reading in LineSource(file.fileno()).readings()]
        read, write = os.pipe()
        try:
            readings = LineSource(read).readings()
            taking = asyncio.create_task(collect(readings))
            for at in range(0, len(data), cut):
                os.write(write, data[at : at + cut])
                await asyncio.sleep(0)
            os.close(write)
            return await taking
        finally:
            os.close(read)

    return asyncio.run(main())


async def collect(readings: AsyncIterator[Reading]) -> list[Reading]:
    return [reading async for reading in readings]


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_a_line_is_the_text_so_far_and_an_empty_line_ends_the_turn(
    tmp_path: Path, cut: int
) -> None:
    data = "Find\r\nFinde ä\\nb\n\n\nlast".encode()
    found = lines_of(data, cut=cut)
    assert found == [
        Reading("Find"),
        Reading("Finde ä\nb"),
        Reading("Finde ä\nb", 9, ended=True),
        Reading("last"),
        Reading("last", 4, ended=True),
    ]
    assert lines_of(data, cut=cut, path=tmp_path / "lines") == found


def test_who_waits_for_a_line_that_never_comes_can_be_ended() -> None:
    async def main() -> None:
        read, write = os.pipe()
        taking = asyncio.create_task(collect(LineSource(read).readings()))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        os.close(read)
        os.close(write)

    threads = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() == threads


def test_a_script_is_typed_character_by_character(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text('{"turns": ["ab", {"text": "c"}]}\n\n')
    found = readings_of(ScriptSource(path, characters_per_second=10_000, pause=0))
    assert [reading.text for reading in found] == ["a", "ab", "ab", "c", "c"]
    assert [reading.ended for reading in found] == [False, False, True, False, True]


@pytest.mark.parametrize("line", ["{", "[]", '{"turns": [{}]}', ""])
def test_a_malformed_script_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(line)
    with pytest.raises(InputError, match=r"line 1|no turns"):
        ScriptSource(path)
    with pytest.raises(InputError, match="cannot be read"):
        ScriptSource(tmp_path / "none")
    with pytest.raises(InputError, match="above 0"):
        ScriptSource(path, characters_per_second=0)
