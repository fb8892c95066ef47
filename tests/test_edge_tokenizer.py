"""Streaming is exact: committed + tail equal a full encode, whatever is typed or taken back."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.tokenizer import StreamingEncoder, common_length, encode_turn
from shared.errors import InputError
from shared.tokenizer import Tokenizer, decode
from tests.vocabularies import (
    REAL,
    SMALL,
    TEXTS,
    kvret_utterances,
    real,
    small,
    tokenizer,
    xsid_utterances,
)


@dataclass
class Follower:
    """Does with revisions what both ends do with their frames, and checks every moment."""

    tokenizer: Tokenizer
    encoder: StreamingEncoder = field(init=False)
    committed: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    moments: int = 0

    def __post_init__(self) -> None:
        self.encoder = StreamingEncoder(self.tokenizer)

    def see(self, text: str, stable: int | None = None) -> None:
        before, held = self.encoder.text, len(self.committed)
        revision = self.encoder.revise(text, stable)
        assert revision.keep <= held
        if text.startswith(before):
            assert revision.keep == held, f"{text!r} only grew and was rewound"
        del self.committed[revision.keep :]
        self.committed += revision.ids
        self.tail = revision.tail
        assert self.committed + self.tail == self.tokenizer.encode(text), repr(text)
        assert self.encoder.committed == len(self.committed)
        self.moments += 1


def follow(tokenizer: Tokenizer, versions: Iterable[str]) -> int:
    follower = Follower(tokenizer)
    for text in versions:
        follower.see(text)
    return follower.moments


def by_character(text: str) -> Iterator[str]:
    return (text[:end] for end in range(len(text) + 1))


def by_word(text: str) -> Iterator[str]:
    for end, (char, following) in enumerate(pairwise(text), 1):
        if following.isspace() and not char.isspace():
            yield text[:end]
    yield text


def with_revisions(text: str, rng: Random) -> Iterator[str]:
    """Grow in bursts; now and then delete a little, a lot or all, or change a word far back."""
    shown = ""
    while len(shown) < len(text):
        shown = text[: len(shown) + rng.randint(1, 7)]
        yield shown
        match rng.randrange(12):
            case 0:
                yield shown[: max(0, len(shown) - rng.randint(1, 9))]
            case 1:
                yield shown[: rng.randint(0, len(shown))] + rng.choice(("", " ", "'", "🙂x", "\n"))
            case 2:
                yield ""
            case 3:
                at = rng.randint(0, len(shown))
                yield shown[:at] + rng.choice(("'", " um ", "\u0301", "7", "\r\n")) + shown[at:]
    yield text


FRAGMENTS = st.sampled_from(
    [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2581", "\u3000", "\u0085", "\x04", "\x1d", "\x00",
     "'", "'s", "'l", "l", "'re", "'ſ", "'LL", "’t", "1", "42", "½", "²", ".", "!?", "...", "_",
     "a", "Hello", " world", "THE", "ß", "é", "e\u0301", "\u0301", "\u200d", "\ufe0f", "ﬆ", "中文",
     "最寄り", "の", "한", "한국어", "क्षि", "🙂", "👩‍👩‍👧‍👦", "🇩🇪", "\U00040000", "\ufffd",
     "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<0x0A>", "[INST]", "x" * 30]
)  # fmt: skip
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
PIECES = st.lists(FRAGMENTS | ANY, max_size=14).map("".join)
EDITS = st.lists(st.tuples(st.integers(0, 60), PIECES, st.none() | st.integers(0, 80)), max_size=6)


@pytest.mark.parametrize("name", SMALL)
def test_every_kind_of_text_streams_exactly_with_vocabularies_made_here(name: str) -> None:
    for index, text in enumerate(TEXTS):
        assert follow(small(name), by_character(text)) == len(text) + 1
        follow(small(name), by_word(text))
        follow(small(name), with_revisions(text, Random(index)))


@pytest.mark.parametrize("name", REAL)
def test_every_kind_of_text_streams_exactly_with_real_vocabularies(name: str) -> None:
    for index, text in enumerate(TEXTS):
        follow(real(name), by_character(text))
        follow(real(name), with_revisions(text, Random(index)))


@pytest.mark.parametrize("name", SMALL + REAL)
def test_any_text_streams_exactly_character_by_character(name: str) -> None:
    target = tokenizer(name)

    @settings(max_examples=60, deadline=None)
    @given(PIECES)
    def check(text: str) -> None:
        follow(target, by_character(text))

    check()


@pytest.mark.parametrize("name", SMALL + REAL)
def test_any_revision_streams_exactly_with_and_without_promises(name: str) -> None:
    target = tokenizer(name)

    @settings(max_examples=60, deadline=None)
    @given(EDITS)
    def check(edits: list[tuple[int, str, int | None]]) -> None:
        follower, text = Follower(target), ""
        for keep, more, stable in edits:
            text = text[:keep] + more
            follower.see(text, stable)
        follower.see("")
        assert follower.committed == follower.tail == []

    check()


@pytest.mark.parametrize("name", REAL)
def test_real_utterances_stream_exactly_a_sample(name: str) -> None:
    target, texts = real(name), kvret_utterances() + xsid_utterances()
    assert len(texts) > 2000
    for index, text in enumerate(texts):
        follow(target, by_word(text))
        if index % 7 == 0:
            follow(target, by_character(text))
        if index % 7 == 3:
            follow(target, with_revisions(text, Random(index)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL + REAL)
def test_real_utterances_stream_exactly_all_of_them(name: str) -> None:
    target, texts = tokenizer(name), kvret_utterances() + xsid_utterances()
    moments = 0
    for index, text in enumerate(texts):
        moments += follow(target, by_character(text)) + follow(target, by_word(text))
        moments += follow(target, with_revisions(text, Random(index)))
    print(f"\n{name}: {len(texts)} texts, {moments} moments")


# --- how much is held back, and what a promise does


def held_back(target: Tokenizer, texts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield every moment's text and how many characters of it are not committed."""
    for text in texts:
        follower = Follower(target)
        for shown in by_character(text):
            follower.see(shown)
            yield shown, len(b"".join(map(target.piece, follower.tail)).decode())


def last_word(text: str) -> int:
    return len(text.rsplit(maxsplit=1)[-1]) if text.split() else 0


@pytest.mark.parametrize("name", [*SMALL, *REAL])
def test_of_plain_english_at_most_the_last_word_and_two_characters_are_held_back(name: str) -> None:
    texts = TEXTS[:3] if name in SMALL else [" ".join(t.split()) for t in kvret_utterances()[::9]]
    held = list(held_back(tokenizer(name), texts))
    assert all(count <= last_word(shown) + 2 for shown, count in held)
    assert sum(count for _, count in held) / len(held) < 6


def test_what_the_source_does_not_promise_is_not_committed() -> None:
    for name in SMALL:
        follower = Follower(small(name))
        text = "navigate to the nearest gas station please"
        for end in range(len(text) + 1):
            follower.see(text[:end], stable=min(end, 12))
        assert decode(small(name), follower.committed) == "navigate to"
        follower.see(text, stable=len(text))
        assert len(decode(small(name), follower.committed)) >= len("navigate to the nearest gas")


def test_words_behind_the_horizon_are_committed_once_and_stay() -> None:
    for name in SMALL:
        follower = Follower(small(name))
        follower.see("navigate to the nearest gas st")
        committed = list(follower.committed)
        assert decode(small(name), committed) == "navigate to the nearest gas"
        follower.see("navigate to the nearest gas station")
        assert follower.committed == committed


def test_a_deleted_half_sentence_is_rewound_and_a_deleted_sentence_leaves_nothing() -> None:
    for name in SMALL:
        follower = Follower(small(name))
        follower.see("call my mother and then my brother")
        follower.see("call my sister")
        assert decode(small(name), follower.committed + follower.tail) == "call my sister"
        follower.see("")
        assert (follower.committed, follower.tail, follower.encoder.committed) == ([], [], 0)


def test_a_contraction_that_comes_late_moves_its_boundary_before_anything_is_committed() -> None:
    follower = Follower(small("small-smollm"))
    for text in ("they'", "they'r", "they're", "they're ok"):
        follower.see(text)
    assert decode(small("small-smollm"), follower.committed) == "they're"


def test_a_japanese_sentence_without_spaces_is_never_cut_by_force() -> None:
    text = "最寄りの充電所を探して" * 20
    for name in SMALL:
        follow(small(name), by_character(text))


# --- input that is not text


@pytest.mark.parametrize("text", ["\ud800", "navigate \udfff home", "🙂\ud83d"])
def test_a_lone_surrogate_is_refused_with_its_place_and_changes_nothing(text: str) -> None:
    follower = Follower(small("small-gpt-2"))
    follower.see("navigate home now")
    with pytest.raises(InputError, match=r"character \d+ of the text is a lone surrogate"):
        follower.encoder.revise(text)
    with pytest.raises(InputError, match="lone surrogate"):
        encode_turn(follower.tokenizer, text)
    follower.see("navigate home now and then")


def test_a_whole_turn_is_encoded_like_a_streamed_one() -> None:
    for name in SMALL:
        for text in TEXTS:
            follower = Follower(small(name))
            follower.see(text)
            assert list(encode_turn(small(name), text)) == follower.committed + follower.tail


@given(st.text(max_size=30), st.text(max_size=30))
def test_common_length_is_that_of_a_plain_loop(a: str, b: str) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    assert common_length(a, b) == (min(len(a), len(b)) if expected is None else expected)
