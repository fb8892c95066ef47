"""In-car dialogues (KVRET dev), and replies to their turns by an independent fp32 implementation.

Both lie beside the checkout, where they are there at all.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

from shared.errors import InputError

DATA = Path(__file__).parents[3] / "shared/data"
REPLIES = DATA / "smollm2-reference/kvret_dev_40.json"
DIALOGUES = DATA / "kvret/kvret_dev_public.json"
T = TypeVar("T")


class OracleReply(msgspec.Struct, frozen=True):
    """A prompt, and what the independent implementation replies to it."""

    user: str
    prompt_ids: list[int]
    greedy_ids: list[int]
    """Up to 32; a stop id among them is the last."""


Dialogue = tuple[tuple[str, str], ...]
"""Pairs of what the driver and the assistant say."""


def load_replies(path: Path) -> list[OracleReply]:
    """Read the oracle's replies.

    Raises:
        InputError: they are not there, or malformed.
    """
    return _read(path, list[OracleReply])


class _Said(msgspec.Struct, frozen=True):
    utterance: str


class _Turn(msgspec.Struct, frozen=True):
    turn: str
    data: _Said


class _KvretDialogue(msgspec.Struct, frozen=True):
    dialogue: list[_Turn]


def load_dialogues(path: Path, most: int) -> list[Dialogue]:
    """Read the first `most` dialogues in which driver and assistant take turns and say something.

    Raises:
        InputError: the file is not there, malformed, or without such dialogues.
    """
    found: list[Dialogue] = []
    for row in _read(path, list[_KvretDialogue]):
        said = [turn.data.utterance.strip() for turn in row.dialogue]
        speakers = [turn.turn for turn in row.dialogue]
        if all(said) and speakers == ["driver", "assistant"] * (len(said) // 2):
            found.append(tuple(zip(said[::2], said[1::2], strict=True)))
    if not found:
        raise InputError(f"{path} has no dialogue in which driver and assistant take turns")
    return found[:most]


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise InputError(
            f"{path} is not there: quality is measured on data that is no part of this project; "
            "put it beside the checkout"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
