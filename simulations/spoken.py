"""Turns as a recognizer heard them: what was known when, and when the turn ends."""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

from simulations.dialogues import load_dialogues
from simulations.speaker import speak_text

SILENCE = 0.5
"""Seconds without speech after which a turn has ended."""
SYSTEM = "You are the assistant of a car. Answer the driver in one short sentence."
"""What the decoder is told in the benches that speak."""
RECORDED = Path(__file__).parents[2] / "shared/data/partials/kvret_dev_240.jsonl"
"""Real hypotheses, where there are some beside the checkout."""


@dataclass(frozen=True, slots=True)
class SpokenTurn:
    """One turn: `updates` are (seconds since it began, whole text so far)."""

    updates: tuple[tuple[float, str], ...]
    final: str
    seconds: float
    """How long the speech is."""

    @property
    def ends_at(self) -> float:
        """Seconds from its begin to its end: after the later of speech and last update."""
        return max(self.seconds, self.updates[-1][0]) + SILENCE


def spoken_turns() -> list[SpokenTurn]:
    """Return recorded hypotheses, or those of our own dialogues as a recognizer might hear them."""
    if RECORDED.exists():
        rows = [json.loads(line) for line in RECORDED.read_text().splitlines()]
        return [
            SpokenTurn(tuple((at, text) for at, text in r["partials"]), r["final"], r["seconds"])
            for r in rows
        ]
    texts = [turn.text for d in load_dialogues() if d.language == "en" for turn in d.turns]
    turns: list[SpokenTurn] = []
    for text in texts:
        updates = speak_text(text, Random(text))
        heard = tuple((update.at, update.text) for update in updates)
        turns.append(SpokenTurn(heard, text, updates[-1].at))
    return turns
