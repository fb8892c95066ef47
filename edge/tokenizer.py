"""Growing, revised text to stable token ids: only the uncommitted end is encoded again. Pure.

At every moment committed + tail is the encoding of the text so far. While the text only grows,
nothing committed is taken back; at the end of the turn the ids equal those of a full encode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import InputError
from shared.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Revision:
    """What a new text does to its ids: keep `keep` committed ones, append `ids`, set `tail`."""

    keep: int
    ids: list[int]
    tail: list[int]


class StreamingEncoder:
    """The encoder of one turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._marks: list[tuple[int, int]] = [(0, 0)]
        """Committed cuts: characters before, ids before."""

    @property
    def text(self) -> str:
        """The text so far."""
        return self._text

    @property
    def committed(self) -> int:
        """Ids committed."""
        return self._marks[-1][1]

    def revise(self, text: str, stable: int | None = None) -> Revision:
        """Take the whole text so far; the source promises to keep its first `stable` characters.

        Without a promise everything may be committed that the tokenizer's rule allows: what is
        deleted afterwards is rewound.

        Raises:
            InputError: the text holds a lone surrogate.
        """
        plan = self.plan(text, stable)
        self.adopt(plan)
        return plan.revision

    def plan(self, text: str, stable: int | None = None) -> "Plan":
        """Return what `revise` would do, and change nothing: another may still refuse it.

        Raises:
            InputError: the text holds a lone surrogate.
        """
        _check(text)
        kept = self._kept_marks(text)
        start, count = self._marks[kept - 1]
        limit = self._tokenizer.horizon(text)
        if stable is not None:
            limit = min(limit, stable)
        committed: list[int] = []
        tail: list[int] = []
        marks: list[tuple[int, int]] = []
        for end, ids in self._tokenizer.split(text[start:], first=start == 0):
            if not tail and start + end <= limit:
                committed += ids
                marks.append((start + end, count + len(committed)))
            else:
                tail += ids
        return Plan(Revision(count, committed, tail), text, kept, marks)

    def adopt(self, plan: "Plan") -> None:
        """Do what `plan`, the last one made, says."""
        del self._marks[plan.kept_marks :]
        self._marks += plan.marks
        self._text = plan.text

    def _kept_marks(self, text: str) -> int:
        """Return how many of the committed cuts stand in `text`."""
        kept = len(self._marks)
        if not text.startswith(self._text):
            shared = common_length(self._text, text)
            limit = self._tokenizer.horizon(text[:shared])
            while self._marks[kept - 1][0] > limit:
                kept -= 1
        return kept


@dataclass(frozen=True, slots=True)
class Plan:
    """A revision that was worked out and not made yet."""

    revision: Revision
    text: str
    kept_marks: int
    marks: list[tuple[int, int]]


def common_length(a: str, b: str) -> int:
    """Return how many leading characters two texts share (bisection over slices)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def encode_turn(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    """Encode a whole turn at once."""
    _check(text)
    return tokenizer.encode(text)


def _check(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start} of the text is a lone surrogate ({text[error.start]!r}): "
            "decode the input as UTF-8 with errors='replace'"
        ) from None
