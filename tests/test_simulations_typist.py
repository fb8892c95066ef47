"""Typed and spoken text always arrives whole, and is revised as people and recognizers revise."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InputError
from simulations.dialogues import load_dialogues
from simulations.speaker import RECOGNIZER_WORDS_PER_SECOND, clusters
from simulations.typist import (
    RECOGNIZER,
    RevisionStatistics,
    Update,
    revision_statistics,
    speak_text,
    type_text,
)

PARTIALS = Path(__file__).parents[2] / "shared/data/partials/kvret_dev_240.jsonl"
SENTENCE = "Please take me home, but not through the tunnel at 6 pm on Tuesday."
MIXED = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            ["take me home", "Straße", "それはカーナビです。", "a\u0301", "👩‍👩‍👧", "🇯🇵", "6", " "]
        ),
    ),
    max_size=8,
).map("".join)
Source = Callable[[str, Random], list[Update]]
both = pytest.mark.parametrize("grow", [type_text, speak_text])


def fast_hands(text: str, rng: Random) -> list[Update]:
    return type_text(text, rng, typo_rate=0.3, rethink_rate=0.5)


def texts(updates: list[Update]) -> list[str]:
    return [update.text for update in updates]


def is_near(got: RevisionStatistics, want: RevisionStatistics, share: float, size: float) -> None:
    """Compare: shares of steps within `share`, sizes within the fraction `size`."""
    for name in ("revised", "end_mark", "dressing", "last_word", "deeper", "number", "marked"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), abs=share), name
    for name in ("seconds", "words", "chars_back", "words_back"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=size), name


@given(text=MIXED, seed=st.integers(0, 2**32))
@pytest.mark.parametrize("grow", [type_text, speak_text, fast_hands])
@settings(max_examples=60, deadline=None)
def test_any_text_arrives_whole_in_order_of_time(grow: Source, text: str, seed: int) -> None:
    updates = grow(text, Random(seed))
    assert updates[-1].text == text
    assert updates[-1].stable == len(text)
    assert all(old.at < new.at for old, new in pairwise(updates))
    assert updates[0].at > 0
    assert all(0 <= update.stable <= len(update.text) for update in updates)


@both
def test_the_same_seed_gives_the_same_updates(grow: Source) -> None:
    assert grow(SENTENCE, Random(7)) == grow(SENTENCE, Random(7))
    assert grow(SENTENCE, Random(7)) != grow(SENTENCE, Random(8))


@given(text=MIXED, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_fingers_never_cut_a_character_in_two(text: str, seed: int) -> None:
    whole = clusters(text)
    prefixes = {"".join(whole[:count]) for count in range(len(whole) + 1)}
    updates = type_text(text, Random(seed), typo_rate=0.0, rethink_rate=0.0)
    assert set(texts(updates)) <= prefixes


def test_clusters_keep_marks_joiners_tones_and_flags() -> None:
    assert clusters("a\u0301b👩‍👩‍👧👍🏽🇯🇵🇩🇪か\u3099") == [
        "a\u0301", "b", "👩‍👩‍👧", "👍🏽", "🇯🇵", "🇩🇪", "か\u3099",
    ]  # fmt: skip
    assert clusters("\u0301a") == ["\u0301", "a"]
    assert clusters("") == []


def test_plain_typing_adds_one_character_at_the_given_speed() -> None:
    text = "no marks and no slips here " * 40
    updates = type_text(text, Random(1), typo_rate=0.0, rethink_rate=0.0, chars_per_second=12.0)
    grown = [text[: count + 1] for count in range(len(text))]
    assert texts(updates)[: len(text)] == grown
    assert len(text) / updates[-1].at == pytest.approx(12.0, rel=0.05)


def test_a_slip_is_a_neighbouring_key_and_is_taken_back_within_four_characters() -> None:
    updates = type_text("hello " * 60, Random(2), typo_rate=0.1, rethink_rate=0.0)
    shown = texts(updates)
    depth = 0
    for old, new in pairwise(shown):
        depth = depth + 1 if len(new) < len(old) else 0
        assert depth <= 4
        assert abs(len(new) - len(old)) <= 1
    wrong = set("".join(shown)) - set("hello ")
    assert wrong <= set("gjwrkip")
    assert len(wrong) > 3


def test_second_thoughts_break_what_was_called_stable() -> None:
    updates = type_text(SENTENCE * 3, Random(3), typo_rate=0.0, rethink_rate=0.3)
    broken = [
        old for old, new in pairwise(updates) if new.text[: old.stable] != old.text[: old.stable]
    ]
    assert broken
    calm = type_text(SENTENCE * 3, Random(3), typo_rate=0.2, rethink_rate=0.0)
    late = [old for old, new in pairwise(calm) if new.text[: old.stable] != old.text[: old.stable]]
    assert len(late) < len(calm) / 20


def test_japanese_comes_from_an_input_method_one_to_three_characters_at_once() -> None:
    text = "高速道路を使わない道を教えてください。"
    shown = texts(type_text(text, Random(4)))
    steps = {len(new) - len(old) for old, new in pairwise(["", *shown])}
    assert steps <= {0, 1, 2, 3}
    assert max(steps) > 1


def test_japanese_speech_is_revised_and_closed_with_its_own_mark() -> None:
    shown = texts(speak_text("高速道路を使わない道を教えてください。", Random(5)))
    assert len(shown) > 3
    assert any(text.endswith("。") for text in shown[:-1])
    assert not any(text.endswith(".") for text in shown)


def test_spoken_numbers_change_between_digits_and_words() -> None:
    shown = [
        t for seed in range(30) for t in texts(speak_text("wake me at 6 or at seven", Random(seed)))
    ]
    assert any("six" in text for text in shown)
    assert any("7" in text for text in shown)


def test_speech_is_stable_only_where_two_partials_agree_on_whole_words() -> None:
    for seed in range(20):
        updates = speak_text(SENTENCE, Random(seed))
        for old, new in pairwise(updates[:-1]):
            assert old.text.startswith(new.text[: new.stable])
            assert new.text[new.stable : new.stable + 1] in ("", *" .,?") or (
                new.text[new.stable - 1 : new.stable] in ("", " ")
            )


def test_the_statistics_of_four_hand_made_partials() -> None:
    turn = [
        Update(0.5, "What day in time?", 0),
        Update(1.0, "What day in time is", 0),
        Update(2.0, "What day, in time is at six", 0),
        Update(2.5, "What day, in time is at 6 pm.", 0),
        Update(3.0, "What day, in time is at 6 pm. Thanks", 0),
        Update(3.5, "That day is", 0),
    ]
    got = revision_statistics([turn[:5], turn[4:], turn[:1]])
    assert (got.num_steps, got.seconds) == (5, 0.6)
    assert (got.end_mark, got.dressing, got.last_word, got.deeper) == (0.2, 0.2, 0.2, 0.2)
    assert (got.revised, got.number) == (0.8, 0.2)
    assert (
        got.chars_back
        == (1 + len(" in time is") + 3 + len("What day, in time is at 6 pm. Thanks")) / 4
    )
    assert got.words_back == (1 + 4 + 1 + 9) / 4
    assert got.marked == 3 / 8


def test_statistics_of_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="at least one turn must have two updates"):
        revision_statistics([[Update(0.0, "one", 0)], []])


@both
def test_a_speed_of_nothing_is_refused(grow: Any) -> None:
    name = "chars_per_second" if grow is type_text else "words_per_second"
    with pytest.raises(InputError, match=f"{name} is 0: it must be above 0"):
        grow("x", Random(1), **{name: 0})


def test_our_own_dialogues_are_revised_like_real_recognizer_output() -> None:
    turns = [turn.text for d in load_dialogues() if d.language == "en" for turn in d.turns]
    rng = Random(6)
    spoken = [speak_text(t, rng, words_per_second=RECOGNIZER_WORDS_PER_SECOND) for t in turns * 5]
    got = revision_statistics(spoken)
    assert got.revised == pytest.approx(RECOGNIZER.revised, abs=0.06)
    assert got.seconds == pytest.approx(RECOGNIZER.seconds, rel=0.05)
    assert got.words == pytest.approx(RECOGNIZER.words, rel=0.3)


@pytest.mark.skipif(not PARTIALS.exists(), reason="../shared/data/partials is not here")
def test_the_generator_has_the_statistics_of_real_recognizer_partials() -> None:
    rows = [json.loads(line) for line in PARTIALS.read_text("utf-8").splitlines()]
    real = revision_statistics([[Update(at, text, 0) for at, text in r["partials"]] for r in rows])
    assert real.num_steps == RECOGNIZER.num_steps
    is_near(real, RECOGNIZER, share=0.001, size=0.003)
    rng = Random(7)
    spoken = [
        speak_text(r["final"], rng, words_per_second=len(r["final"].split()) / r["seconds"])
        for r in rows * 3
    ]
    is_near(revision_statistics(spoken), real, share=0.04, size=0.12)
