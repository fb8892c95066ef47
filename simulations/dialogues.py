"""The in-car dialogues of demo and benches, written for this project: what a driver says, by turn.

They stand in `dialogues.jsonl`, one dialogue a line.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import msgspec

from shared.errors import InputError

DIALOGUES = Path(__file__).with_name("dialogues.jsonl")

Text = Annotated[str, msgspec.Meta(pattern=r"^\S(.*\S)?\Z")]
"""One line, neither empty nor with space around it."""


@dataclass(frozen=True, slots=True)
class DriverTurn:
    """One thing the driver says."""

    text: Text
    barge_in_after: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Reply tokens the driver hears before the next turn cuts the reply off; None: hears it out."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation from the driver's side; the replies are the model's."""

    id: Text
    language: Annotated[str, msgspec.Meta(pattern="^[a-z]{2}$")]
    """ISO 639-1: en, de, ja."""
    system: Text
    turns: Annotated[tuple[DriverTurn, ...], msgspec.Meta(min_length=1)]


def load_dialogues(path: Path | None = None) -> list[Dialogue]:
    """Read dialogues from a JSON Lines file, by default our own; blank lines are skipped.

    Raises:
        InputError: the file cannot be read, or a line is no dialogue; names file, line and field.
    """
    path = path or DIALOGUES
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read dialogues from {path}: {error}") from error
    dialogues: dict[str, Dialogue] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            dialogue = _parse(line)
            if dialogue.id in dialogues:
                raise InputError(f"id {dialogue.id!r} stands there twice")
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
        dialogues[dialogue.id] = dialogue
    if not dialogues:
        raise InputError(f"{path} holds no dialogue: write one JSON object a line")
    return list(dialogues.values())


def _parse(line: str) -> Dialogue:
    try:
        record = msgspec.json.decode(line, type=dict[str, object])
        dialogue = msgspec.convert(record, Dialogue)
    except msgspec.MsgspecError as error:
        raise InputError(str(error)) from error
    _refuse_unknown(record, Dialogue, "$")
    for index, turn in enumerate(msgspec.convert(record["turns"], list[dict[str, object]])):
        _refuse_unknown(turn, DriverTurn, f"$.turns[{index}]")
    if dialogue.turns[-1].barge_in_after is not None:
        raise InputError("nobody barges in after the last turn - at `$.turns[-1].barge_in_after`")
    return dialogue


def _refuse_unknown(keys: Iterable[str], kind: type[Dialogue | DriverTurn], place: str) -> None:
    known = [known.name for known in fields(kind)]
    for key in keys:
        if key not in known:
            raise InputError(f"unknown field {key!r}, known are {', '.join(known)} - at `{place}`")
