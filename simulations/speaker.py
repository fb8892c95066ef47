"""What a speech recognizer makes of spoken text: partials that grow and are taken back.

Pure: no I/O and no clock; randomness is the caller's `random.Random`.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from random import Random

from shared.errors import InputError


@dataclass(frozen=True, slots=True)
class Update:
    """The whole text so far."""

    at: float
    """Seconds since the turn began."""
    text: str
    stable: int
    """How many characters the source calls settled: a claim, which a later update may break."""


@dataclass(frozen=True, slots=True)
class RevisionStatistics:
    """What a list of partials does from one update to the next; shares are of all such steps."""

    num_steps: int
    seconds: float
    """Mean time between updates."""
    words: float
    """Mean net growth in words."""
    revised: float
    """Share that is no plain extension of the text before."""
    end_mark: float
    """Share that takes back punctuation at the end and nothing else."""
    dressing: float
    """Share that changes only punctuation or case further in."""
    last_word: float
    """Share that changes just the last word (or completes it)."""
    deeper: float
    """Share that changes two or more words."""
    number: float
    """Share whose first changed word is or was a number."""
    chars_back: float
    """Mean number of characters taken back by a revision."""
    words_back: float
    """Mean number of words taken back by a revision, punctuation and case counting."""
    marked: float
    """Share of partials (not steps) that end in a punctuation mark."""


# Measured with `revision_statistics` on 240 spoken driver turns (shared/data/partials: KVRET dev,
# Piper voice "joe", Moonshine tiny-en, update every 0.3 s); a test repeats it where the data is.
RECOGNIZER = RevisionStatistics(
    num_steps=706, seconds=0.646, words=1.90, revised=0.892, end_mark=0.404, dressing=0.033,
    last_word=0.217, deeper=0.239, number=0.074, chars_back=8.54, words_back=2.23, marked=0.862,
)  # fmt: skip
RECOGNIZER_WORDS_PER_SECOND = 3.45
"""The pace of that voice."""

INTERVALS, INTERVAL_COUNTS = (0.6, 0.7, 0.8), (424, 233, 43)
"""Seconds between the updates of the same recordings, and how often each was seen."""
FIRST_UPDATE = 0.7

# Fitted by hand: texts of those recordings, said at their pace, then show the statistics above.
GUESSED_AFTER = 0.3
"""Share of a word that is said before something is shown for it."""
SETTLED_BEFORE = 0.1
"""Seconds before the end of speech from which the next update is the last."""
EDGE_WRONG, INNER_WRONG, RELAPSE, REPAIR = 0.54, 0.055, 0.014, 0.7
"""Chance that a new word is heard wrong as the last, or not as the last; that at an update a
right one turns wrong; that a wrong one is put right."""
NUMBER_WRONG = 4.0
"""How many times as often a number is heard wrong."""
REDRESSED, ECHO = 0.009, 0.08
"""Chance per word and update of another mark or case; per update of a word too many at the end."""
MARK_SURE, MARK_UNSURE = 0.94, 0.72
"""Chance that a partial is closed with a mark, when it is right so far and when it is not."""

MARKS = ".,?!;:…。、？！"
CJK = re.compile("[\u3000-\u30ff\u3400-\u9fff\uff01-\uff9f]")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBER = re.compile(rf"\d|^({'|'.join(NUMBERS)}|eleven|twelve|\w+teen|twenty|thirty|\w+th)$", re.I)


def speak_text(text: str, rng: Random, *, words_per_second: float = 2.7) -> list[Update]:
    """Say `text` to a recognizer: its partials, revised as `RECOGNIZER` measured it.

    Words come late and wrong and are put right, each partial is closed like a sentence, numbers
    change between digits and words. `stable` is the words two partials in a row agree on
    (LocalAgreement-2). The last update is exactly `text`, all of it stable.

    Args:
        words_per_second: pace; where there are no spaces, two characters count as a word.
    """
    if words_per_second <= 0:
        raise InputError(f"words_per_second is {words_per_second}: it must be above 0")
    units = _units(text)
    begins, end = _hearing_times(units, rng, words_per_second)
    shown: list[str] = []
    updates: list[Update] = []
    at, before = FIRST_UPDATE, ""
    while at < end:
        num_heard = sum(1 for begin in begins if begin <= at)
        shown = _listen(shown, units[:num_heard], rng)
        partial = _close(shown, units, rng)
        if partial != before:
            updates.append(Update(at, partial, _agreed(before, partial)))
            before = partial
        at += rng.choices(INTERVALS, INTERVAL_COUNTS)[0]
    return [*updates, Update(at, text, len(text))]


def _hearing_times(units: Sequence[str], rng: Random, pace: float) -> tuple[list[float], float]:
    """Seconds at which each unit can be guessed, and from which an update is the last."""
    costs = [(2.0 + len(unit.strip())) * rng.uniform(0.8, 1.2) for unit in units]
    scale = len(units) / pace / max(sum(costs), 1.0)
    begins: list[float] = []
    now = 0.0
    for cost in costs:
        begins.append(now + GUESSED_AFTER * cost * scale)
        now += cost * scale
    return begins, now - SETTLED_BEFORE


def _listen(shown: Sequence[str], heard: Sequence[str], rng: Random) -> list[str]:
    """The recognizer's next opinion of the units heard so far."""
    opinion: list[str] = []
    for index, unit in enumerate(heard):
        old = shown[index] if index < len(shown) else None
        if old is None:
            chance = EDGE_WRONG if index == len(heard) - 1 else INNER_WRONG
        else:
            chance = RELAPSE if old == unit else 1.0 - REPAIR
        if NUMBER.search(unit.strip(MARKS + " ")) and (old is None or old == unit):
            chance *= NUMBER_WRONG
        if rng.random() >= chance:
            opinion.append(unit if rng.random() >= REDRESSED else _redressed(unit, rng))
        elif old not in (None, unit) and rng.random() < 0.7:
            opinion.append(old or unit)  # the same mistake again
        else:
            opinion.append(_misheard(unit, heard, rng))
    return opinion


def _redressed(unit: str, rng: Random) -> str:
    """The same word with another mark or another case."""
    bare = unit.rstrip(MARKS)
    if bare != unit:
        return bare
    if rng.random() < 0.5:
        return unit + _comma(unit)
    return re.sub(r"\w", lambda first: first[0].upper(), unit, count=1)


def _misheard(unit: str, heard: Sequence[str], rng: Random) -> str:
    """What a recognizer might hear for `unit`: another number, a mark, its beginning, a word."""
    bare = unit.rstrip(MARKS)
    mark = unit[len(bare) :]
    word = bare.lstrip()
    space = bare[: len(bare) - len(word)]
    if word.isdecimal() and word.isascii():
        spelled = len(word) < 3 and int(word) < len(NUMBERS) and rng.random() < 0.6
        return space + (NUMBERS[int(word)] if spelled else rng.choice("123") + word) + mark
    if word.lower() in NUMBERS:
        return space + str(NUMBERS.index(word.lower())) + mark
    if mark and rng.random() < 0.4:
        return bare if mark == _comma(unit) else bare + _comma(unit)
    if len(word) > 3 and rng.random() < 0.6:
        pieces = clusters(word)
        return space + "".join(pieces[: rng.randint(min(2, len(pieces)), len(pieces))])
    return space + rng.choice(heard).strip(MARKS + " ")


def _close(shown: Sequence[str], units: Sequence[str], rng: Random) -> str:
    """The partial as a recognizer writes it: maybe a word too many, then a closing mark."""
    body = list(shown)
    sure = body == list(units[: len(body)])
    if body and rng.random() < ECHO:
        again = rng.choice(body).strip()
        body.append(again if is_cjk(again) else " " + again)
    text = "".join(body).strip().rstrip(MARKS + " ")
    if not text or rng.random() >= (MARK_SURE if sure else MARK_UNSURE):
        return text
    asks = units[-1].endswith(("?", "？"))
    if is_cjk(text[-1]):
        return text + ("？" if asks else "。")
    return text + rng.choices(("?" if asks else ".", ","), (32, 1))[0]


def _comma(unit: str) -> str:
    return "、" if is_cjk(unit[-1]) else ","


def _units(text: str) -> list[str]:
    """Cut text into what is heard as one: words with the space before them, or two characters."""
    units: list[str] = []
    for word in re.findall(r"\s*\S+", text):
        run: list[str] = []
        for piece in clusters(word):
            full = len(run) >= 2 and piece not in MARKS
            if run and (is_cjk(piece) or is_cjk(run[-1])) and full:
                units.append("".join(run))
                run = []
            run.append(piece)
        units.append("".join(run))
    return units


def _agreed(before: str, now: str) -> int:
    """How many characters of whole words both partials begin with, closing marks not counted."""
    common = _common(before.rstrip(MARKS), now.rstrip(MARKS))
    ends = (before[common : common + 1], now[common : common + 1])
    if common and (is_cjk(now[common - 1]) or all(end in ("", " ", *MARKS) for end in ends)):
        return common
    return now.rfind(" ", 0, common) + 1


def clusters(text: str) -> list[str]:
    """Split text into what a reader takes for one character: marks, joiners and flags stay on."""
    pieces: list[str] = []
    for char in text:
        last = pieces[-1] if pieces else ""
        joins = unicodedata.category(char) in ("Mn", "Me", "Mc") or char in "\u200d\ufe0f"
        tone = "\U0001f3fb" <= char <= "\U0001f3ff"
        flag = len(last) == 1 and all("\U0001f1e6" <= c <= "\U0001f1ff" for c in last + char)
        if last and (joins or tone or flag or last[-1] == "\u200d"):
            pieces[-1] += char
        else:
            pieces.append(char)
    return pieces


def is_cjk(piece: str) -> bool:
    """Whether a character is written with an input method and without spaces around words."""
    return CJK.match(piece) is not None


def revision_statistics(turns: Iterable[Sequence[Update]]) -> RevisionStatistics:
    """Measure how partials were revised, over the updates of many turns.

    Raises:
        InputError: no turn has two updates.
    """
    turns = list(turns)
    steps = [pair for turn in turns for pair in pairwise(turn)]
    if not steps:
        raise InputError("no step to measure: at least one turn must have two updates")
    kinds = Counter(_kind(old.text, new.text) for old, new in steps)
    revised = [(old.text, new.text) for old, new in steps if not new.text.startswith(old.text)]
    partials = [update.text for turn in turns for update in turn]
    num_steps, num_revised = len(steps), max(len(revised), 1)
    return RevisionStatistics(
        num_steps=num_steps,
        seconds=sum(new.at - old.at for old, new in steps) / num_steps,
        words=sum(len(n.text.split()) - len(o.text.split()) for o, n in steps) / num_steps,
        revised=len(revised) / num_steps,
        end_mark=kinds["end_mark"] / num_steps,
        dressing=kinds["dressing"] / num_steps,
        last_word=kinds["last_word"] / num_steps,
        deeper=kinds["deeper"] / num_steps,
        number=sum(_touches_number(old, new) for old, new in revised) / num_steps,
        chars_back=sum(len(old) - _common(old, new) for old, new in revised) / num_revised,
        words_back=sum(len(old.split()) - _common(old.split(), new.split()) for old, new in revised)
        / num_revised,
        marked=sum(text[-1:] in (*MARKS, "-") for text in partials) / len(partials),
    )


def _kind(old: str, new: str) -> str:
    if new.startswith(old):
        return "extension"
    if new.startswith(old.rstrip(MARKS)):
        return "end_mark"
    before, after = _bare(old), _bare(new)
    changed = len(before) - _common(before, after)
    return "dressing" if not changed else "last_word" if changed == 1 else "deeper"


def _bare(text: str) -> list[str]:
    return [word.casefold().strip(MARKS + "\"'") for word in text.split()]


def _touches_number(old: str, new: str) -> bool:
    before, after = old.split(), new.split()
    first = _common(before, after)
    changed = (*before[first : first + 1], *after[first : first + 1])
    return any(NUMBER.search(word.strip(MARKS)) for word in changed)


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    """Length of the longest common prefix."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )
