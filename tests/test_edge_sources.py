"""Keys, lines and scripts as sources."""

import asyncio
import io
import os
import pty
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


def test_a_line_is_the_text_so_far_and_an_empty_line_ends_the_turn() -> None:
    found = readings_of(LineSource(io.StringIO("Find\nFind a\\nb\n\n\nlast")))
    assert found == [
        Reading("Find"),
        Reading("Find a\nb"),
        Reading("Find a\nb", 8, ended=True),
        Reading("last"),
        Reading("last", 4, ended=True),
    ]


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
