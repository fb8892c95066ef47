"""How text grows under fingers: key by key, with slips, corrections and second thoughts.

Pure: no I/O and no clock; randomness is the caller's `random.Random`. What a speech recognizer
does to text stands in `speaker` and is offered here as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from random import Random

from shared.errors import InputError
from simulations.speaker import (
    MARKS,
    RECOGNIZER,
    RevisionStatistics,
    Update,
    clusters,
    is_cjk,
    revision_statistics,
    speak_text,
)

__all__ = [
    "RECOGNIZER",
    "RevisionStatistics",
    "Update",
    "revision_statistics",
    "speak_text",
    "type_text",
]

QWERTY = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


def type_text(
    text: str,
    rng: Random,
    *,
    chars_per_second: float = 12.0,
    typo_rate: float = 0.03,
    rethink_rate: float = 0.03,
) -> list[Update]:
    """Type `text` key by key, with slips and second thoughts; the last update is exactly `text`.

    Letters of Latin script get typos: a neighbouring key, noticed one to four characters later
    and corrected by backspacing. Japanese and Chinese arrive as an input method gives them, one
    to three characters at a time.

    Args:
        chars_per_second: mean speed of plain typing.
        typo_rate: chance per letter.
        rethink_rate: chance per word that one or two words are deleted and written anew, or that
            another word stands there first.
    """
    if chars_per_second <= 0:
        raise InputError(f"chars_per_second is {chars_per_second}: it must be above 0")
    hand = _Hand(rng, 1.0 / chars_per_second)
    pieces = clusters(text)
    words = text.split()
    at = 0
    while at < len(pieces):
        if is_cjk(pieces[at]):
            size = rng.randint(1, 3)
            run = list(takewhile(is_cjk, pieces[at : at + size]))
            hand.convert(run)
            at += len(run)
            continue
        if rng.random() < typo_rate and (wrong := _neighbour(pieces[at], rng)):
            late = pieces[at + 1 : at + rng.randint(1, 4)]  # typed on before it is noticed
            hand.type([wrong, *late])
            hand.erase(1 + len(late))
        hand.type(pieces[at : at + 1])
        at += 1
        if pieces[at - 1] == " " and words and rng.random() < rethink_rate:
            hand.rethink(words)
    hand.settle()
    return hand.updates


@dataclass(slots=True)
class _Hand:
    """Fingers over one line of text, with their own time."""

    rng: Random
    beat: float
    at: float = 0.0
    line: list[str] = field(default_factory=list[str])
    updates: list[Update] = field(default_factory=list[Update])

    def type(self, pieces: Sequence[str]) -> None:
        for piece in pieces:
            if self.line and self.line[-1] in MARKS:
                self.at += self.beat * self.rng.uniform(1.0, 5.0)
            self.line.append(piece)
            self._show(1.0)

    def convert(self, pieces: Sequence[str]) -> None:
        """Let an input method put several characters at once: about two keys for each."""
        begin = len(self.line)
        self.line.extend(pieces)
        self._show(2.0 * len(pieces), begin)

    def erase(self, count: int) -> None:
        self.at += self.rng.uniform(0.15, 0.4)  # the slip is noticed
        for _ in range(count):
            self.line.pop()
            self._show(0.6)

    def rethink(self, words: Sequence[str]) -> None:
        """Write one or two words anew, or begin with another word and drop it."""
        self.at += self.rng.uniform(0.3, 1.0)
        if self.rng.random() < 0.5:
            other = clusters(self.rng.choice(words))
            self.type(other)
            self.erase(len(other))
            return
        back = self.line[self._word_start(self.rng.randint(1, 2)) :]
        self.erase(len(back))
        self.type(back)

    def settle(self) -> None:
        """End the turn: all that stands there is meant."""
        text = "".join(self.line)
        if not self.updates or self.updates[-1].stable < len(text):
            self.at += self.beat
            self.updates.append(Update(self.at, text, len(text)))

    def _word_start(self, num_words: int) -> int:
        """Index in the line where its last `num_words` words begin; trailing spaces count in."""
        start = len(self.line)
        for _ in range(num_words):
            while start and self.line[start - 1] == " ":
                start -= 1
            while start and self.line[start - 1] != " ":
                start -= 1
        return start

    def _show(self, beats: float, begin: int | None = None) -> None:
        """Add an update; settled is what precedes `begin`, by default the word at the cursor."""
        # log-normal with mean 1: human inter-key intervals are skewed to the long side
        self.at += self.beat * beats * self.rng.lognormvariate(-0.08, 0.4)
        if begin is None:
            begin = len(self.line)
            while begin and self.line[begin - 1] != " " and not is_cjk(self.line[begin - 1]):
                begin -= 1
        stable = len("".join(self.line[:begin]))
        self.updates.append(Update(self.at, "".join(self.line), stable))


def _neighbour(piece: str, rng: Random) -> str | None:
    """A key beside this one, in the same case; None for what is no plain Latin letter."""
    for row in QWERTY:
        at = row.find(piece.lower())
        if at >= 0:
            wrong = rng.choice(row[max(at - 1, 0) : at] + row[at + 1 : at + 2])
            return wrong.upper() if piece.isupper() else wrong
    return None
