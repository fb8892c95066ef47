"""Whether a decoder holds the conversations that vehicles have, id by id."""

from collections.abc import Mapping
from pathlib import Path

from cloud.snapshot.format import SavedConversation
from cloud.snapshot.reader import read_conversations
from shared.tokenlog import history_crc
from simulations.simulate.ledger import LoggedTalk


def differences(folder: Path, talks: Mapping[tuple[str, str], LoggedTalk]) -> list[str]:
    """Return what differs between a decoder's snapshots and its vehicles' logs, in words.

    User and reply ids of all turns are compared one by one. Of turns that no longer fit the context
    a decoder has no ids: they are in the CRC of its history, which is compared as well.

    Args:
        folder: the snapshots of a decoder that was told to end, or has nothing new to write.
        talks: what vehicles have, by device and conversation. Whatever else a decoder has is
            of no concern.

    Raises:
        InputError: there is no such folder, or a log in it is damaged.
    """
    saved = {(one.device, one.name): one for one in read_conversations(folder)}
    found: list[str] = []
    for (device, name), talk in talks.items():
        why = _difference(saved.get((device, talk.conversation)), talk)
        if why:
            found.append(f"{device}, {name}: {why}")
    return found


def _difference(saved: SavedConversation | None, talk: LoggedTalk) -> str:
    if saved is None:
        return f"the decoder does not hold it; the vehicle has {len(talk.turns)} turns"
    if len(saved.turns) != len(talk.turns):
        return f"the decoder has {len(saved.turns)} turns, the vehicle {len(talk.turns)}"
    for number, (held, turn) in enumerate(zip(saved.turns, talk.turns, strict=True)):
        if held is not None and held != turn.kept:
            return f"turn {number} is {held} at the decoder, {turn.kept} at the vehicle"
    crc = 0
    for turn in talk.turns[: saved.stream.turn]:
        crc = history_crc(*turn.kept, crc)
    if crc != saved.stream.history:
        return "the decoder's history has another CRC"
    if saved.stream.reason is None and saved.stream.committed:
        return f"the decoder has an open turn of {len(saved.stream.committed)} ids"
    return ""
