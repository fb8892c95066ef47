"""What drivers said and were shown, by turn, across the deaths of their vehicles. Pure.

Vehicles report as they go (`simulations.traveller`); what they have on disk in the end must agree.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from shared.errors import LinkError
from shared.frames import Reason
from shared.session.conversation_log import Turn

ANSWERED = (Reason.STOP, Reason.LENGTH)
Script = Callable[[str, str, int], str]
"""What a driver says, by device, conversation and turn; no two texts of a conversation are equal.
"""


class TurnKey(NamedTuple):
    """One turn of one conversation of one vehicle."""

    device: str
    talk: str
    turn: int


@dataclass(frozen=True, slots=True)
class LoggedTalk:
    """A conversation as its vehicle has it in the end."""

    conversation: str
    decoder: str
    """Who has it, too."""
    turns: tuple[Turn, ...]
    texts: tuple[str, ...]
    """What the user ids of each turn say."""


@dataclass(slots=True)
class Ledger:
    """Everything the vehicles report."""

    ended: dict[TurnKey, float] = field(default_factory=dict[TurnKey, float])
    """When each turn ended."""
    done: dict[TurnKey, float] = field(default_factory=dict[TurnKey, float])
    """When its reply had been shown to the end."""
    shown: dict[TurnKey, list[int]] = field(default_factory=dict[TurnKey, list[int]])
    """Reply ids that the driver was shown."""
    shown_at: dict[TurnKey, list[float]] = field(default_factory=dict[TurnKey, list[float]])
    """When the driver was shown something of a reply."""
    num_repeated: int = 0
    """Reply ids that a driver was shown again by the same life of the vehicle."""
    answered_again: set[TurnKey] = field(default_factory=set[TurnKey])
    """Turns whose reply ended twice in one life."""
    decoders: dict[str, str] = field(default_factory=dict[str, str])
    """Who serves each device."""
    contradictions: list[str] = field(default_factory=list[str])
    """Where a driver was shown two different replies to one turn."""
    talks: dict[tuple[str, str], LoggedTalk] = field(
        default_factory=dict[tuple[str, str], LoggedTalk]
    )
    _heard: dict[TurnKey, int] = field(default_factory=dict[TurnKey, int])
    """Length of the reply that the vehicle's present life has shown."""
    _over: set[TurnKey] = field(default_factory=set[TurnKey])
    """Turns whose reply has ended in the vehicle's present life."""

    def take(self, device: str, event: Mapping[str, Any], now: float) -> None:
        """Follow what a vehicle reports.

        Raises:
            LinkError: it reports what nobody knows.
        """
        key = TurnKey(device, event.get("talk", ""), event.get("turn", -1))
        self.decoders[device] = event.get("decoder", "")
        match event["event"]:
            case "ready":
                self._begin_life(device)
            case "ended":
                self.ended.setdefault(key, now)
            case "shown":
                self.ended.setdefault(key, now)  # it died between ending the turn and saying so
                self.shown_at.setdefault(key, []).append(now)
                self._show(key, event["index"], event["ids"])
            case "done":
                self.ended.setdefault(key, now)
                if key in self._over:
                    self.answered_again.add(key)
                self._over.add(key)
                self.done.setdefault(key, now)
            case "log":
                turns = [Turn(tuple(user), tuple(ids), why) for user, ids, why in event["turns"]]
                texts, decoder = tuple(event["texts"]), self.decoders[device]
                talk = LoggedTalk(event["conversation"], decoder, tuple(turns), texts)
                self.talks[device, event["talk"]] = talk
            case other:
                raise LinkError(f"{device} reports {other!r}")

    def is_replying(self, devices: Collection[str]) -> bool:
        """Tell whether a driver of one of them has been shown a part of a reply."""
        return any(key.device in devices for key in self.shown_at.keys() - self.done.keys())

    def drained_after(self, at: float) -> float:
        """Return how long after `at`, in seconds, all turns that waited then were answered."""
        waited = [key for key, when in self.ended.items() if when < at]
        return max((max(0.0, self.done.get(key, inf) - at) for key in waited), default=0.0)

    def unanswered(self, script: Script) -> list[TurnKey]:
        """Return the turns without exactly one answer: said, logged once, and shown as logged."""
        return [key for key in self.ended if not self._is_answered(key, script(*key))]

    def answered_twice(self, script: Script) -> set[TurnKey]:
        """Return the turns with more than one finished answer, in what was shown or logged."""
        logged = {
            key
            for key in self.ended
            if (talk := self.talks.get((key.device, key.talk))) is not None
            and talk.texts.count(script(*key)) > 1
        }
        return self.answered_again | logged

    def _begin_life(self, device: str) -> None:
        self._over = {key for key in self._over if key.device != device}
        self._heard = {key: n for key, n in self._heard.items() if key.device != device}

    def _is_answered(self, key: TurnKey, text: str) -> bool:
        talk = self.talks.get((key.device, key.talk))
        if talk is None or key.turn >= len(talk.turns):
            return False
        turn, shown = talk.turns[key.turn], self.shown.get(key, [])
        once = talk.texts.count(text) == 1 and talk.texts[key.turn] == text
        return once and turn.reason in ANSWERED and list(turn.reply_ids) == shown

    def _show(self, key: TurnKey, index: int, ids: Sequence[int]) -> None:
        end, heard = index + len(ids), self._heard.get(key, 0)
        self.num_repeated += max(0, min(heard, end) - index)
        self._heard[key] = max(heard, end)
        seen = self.shown.setdefault(key, [])
        again = seen[index : index + len(ids)]
        if index > len(seen) or again != list(ids[: len(again)]):
            self.contradictions.append(f"{key}: {ids} at {index}, after {seen}")
            return
        seen += ids[len(again) :]
