"""The dialogues we ship are what benches count on, and a broken file is refused by line."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InputError
from simulations.dialogues import Dialogue, DriverTurn, load_dialogues


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records), "utf-8")
    return path


def record(**changes: object) -> dict[str, Any]:
    turns = [{"text": "Hello.", "barge_in_after": None}, {"text": "And now?"}]
    base = {"id": "a", "language": "en", "system": "You are a car.", "turns": turns}
    return {**base, **changes}


def turns_in(language: str) -> list[DriverTurn]:
    return [
        turn for dialogue in load_dialogues() if dialogue.language == language
        for turn in dialogue.turns
    ]  # fmt: skip


def test_the_shipped_dialogues_have_enough_turns_in_three_languages() -> None:
    assert 9 <= len(load_dialogues()) <= 10
    assert sum(len(dialogue.turns) for dialogue in load_dialogues()) >= 28
    assert len(turns_in("en")) > 14
    assert min(len(turns_in("de")), len(turns_in("ja"))) >= 4
    assert all(len(dialogue.turns) > 1 for dialogue in load_dialogues())


def test_exactly_one_shipped_reply_is_cut_off() -> None:
    cut = [t for d in load_dialogues() for t in d.turns if t.barge_in_after is not None]
    assert len(cut) == 1


def test_ten_shipped_turns_are_long_dictations() -> None:
    # 45 to 120 SmolLM2 tokens, counted when they were written; about 4 characters a token
    assert sum(170 <= len(turn.text) <= 480 for turn in turns_in("en") + turns_in("de")) >= 10


def test_a_file_is_read_in_its_order_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", record(id="b"), record(id="a"))
    path.write_text(path.read_text("utf-8") + "\n\n", "utf-8")
    turns = (DriverTurn("Hello."), DriverTurn("And now?"))
    assert load_dialogues(path) == [
        Dialogue("b", "en", "You are a car.", turns),
        Dialogue("a", "en", "You are a car.", turns),
    ]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([], "Expected `object`"),
        (record(turns=[]), "length >= 1 - at `$.turns`"),
        (record(turns=[{"text": " Hello."}]), r"at `$.turns[0].text`"),
        (record(turns=[{"text": ""}]), r"at `$.turns[0].text`"),
        (record(turns=[{"text": "x", "barge_in": 3}]), r"'barge_in', known are text, barge_in_aft"),
        (record(turns=[{"text": "x", "barge_in_after": 0}]), r"`$.turns[0].barge_in_after`"),
        (record(turns=[{"text": "x", "barge_in_after": 2}]), "after the last turn"),
        (record(language="english"), "at `$.language`"),
        (record(mood="good"), "unknown field 'mood'"),
        (record(id="first"), "id 'first' stands there twice"),
    ],
)
def test_a_broken_line_is_refused_with_file_line_and_field(
    tmp_path: Path, broken: object, message: str
) -> None:
    path = write(tmp_path / "d.jsonl", record(id="first"), broken)
    with pytest.raises(InputError) as refused:
        load_dialogues(path)
    assert str(refused.value).startswith(f"{path}, line 2: ")
    assert message in str(refused.value)


def test_what_is_no_json_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("{", "utf-8")
    with pytest.raises(InputError, match=r"d\.jsonl, line 1: Input data was truncated"):
        load_dialogues(path)


def test_a_missing_and_an_empty_file_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read dialogues from .*none\.jsonl"):
        load_dialogues(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match=r"empty\.jsonl holds no dialogue"):
        load_dialogues(tmp_path / "empty.jsonl")
