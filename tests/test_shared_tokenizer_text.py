"""Reply ids become text as they come: whole characters, in order, nothing twice, nothing lost."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.tokenizer import TextDecoder, Tokenizer, byte_alphabet, decode
from tests.vocabularies import REAL, SMALL, TEXTS, small, small_bpe, tokenizer


def streamed(target: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    decoder = TextDecoder(target)
    ends = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [*(decoder.feed(ids[a:b]) for a, b in pairwise(ends)), decoder.flush()]


def whole(target: Tokenizer, ids: list[int]) -> str:
    data = b"".join(map(target.piece, ids))
    return data.removeprefix(b" " if target.header.add_prefix else b"").decode(errors="replace")


@pytest.mark.parametrize("name", SMALL + REAL)
def test_any_ids_give_the_text_of_a_whole_decode_however_they_are_split(name: str) -> None:
    target = tokenizer(name)
    size = target.header.vocabulary

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(0, size - 1), max_size=20), st.lists(st.integers(0, 20)))
    def check(ids: list[int], cuts: list[int]) -> None:
        assert "".join(streamed(target, ids, cuts)) == whole(target, ids) == decode(target, ids)

    check()


@pytest.mark.parametrize("name", SMALL + REAL)
def test_the_text_grows_by_whole_characters_id_by_id(name: str) -> None:
    target = tokenizer(name)
    for text in TEXTS:
        ids = target.encode(text)
        final, shown = decode(target, ids), ""
        decoder = TextDecoder(target)
        for token in ids:
            shown += decoder.feed([token])
            assert final.startswith(shown)
        assert shown == final
        assert decoder.flush() == ""


@pytest.mark.parametrize("name", ["small-spm", "small-gpt-2", "small-llama-bpe", "small-qwen2"])
def test_a_decoded_text_is_the_one_that_was_encoded(name: str) -> None:
    for text in TEXTS:
        expected = text.replace("\u2581", " ") if "spm" in name else text
        assert decode(small(name), small(name).encode(text)) == expected


def test_no_syllable_is_lost_in_korean_or_doubled_in_chinese() -> None:
    for text in (
        "가장 가까운 주유소를 찾아 주세요",
        "我想去最近的加油站加油加油",
        "👩‍👩‍👧‍👦🇩🇪👍🏽",
    ):
        for name in SMALL:
            if name != "small-spm-unknown":
                ids = small(name).encode(text)
                pieces = streamed(small(name), ids, list(range(len(ids))))
                assert "".join(pieces) == text
                assert not any("\ufffd" in piece for piece in pieces)


def byte_id(byte: int) -> int:
    tokens, _ = small_bpe()
    return tokens.index({value: char for char, value in byte_alphabet().items()}[byte])


def test_ten_thousand_continuation_bytes_never_pile_up() -> None:
    decoder, token = TextDecoder(small("small-gpt-2")), byte_id(0x80)
    assert all(decoder.feed([token]) == "\ufffd" for _ in range(10_000))
    assert decoder.flush() == ""


def test_a_character_that_never_ends_is_replaced_as_soon_as_that_is_certain() -> None:
    decoder, lead = TextDecoder(small("small-gpt-2")), byte_id(0xF0)
    assert decoder.feed([lead]) == ""
    assert all(decoder.feed([lead]) == "\ufffd" for _ in range(10_000))
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_a_reply_that_begins_inside_a_character_shows_nothing_of_the_prompt() -> None:
    first, *rest = [byte_id(byte) for byte in "é!".encode()]
    assert decode(small("small-gpt-2"), [first, *rest]) == "é!"
    assert decode(small("small-gpt-2"), rest) == "\ufffd!"


@pytest.mark.parametrize("name", SMALL + REAL)
def test_unknown_and_control_ids_are_silent(name: str) -> None:
    target = tokenizer(name)
    decoder = TextDecoder(target)
    strange = [-1, target.header.vocabulary, 2**31, 2**40, *target.header.control]
    text = decoder.feed(strange) + decoder.feed(target.encode("ok then")) + decoder.feed(strange)
    assert text + decoder.flush() == "ok then"


def test_the_implied_space_is_dropped_once_and_only_in_front() -> None:
    target = small("small-spm")
    for text in ("hello there", " hello", "  two", " "):
        assert decode(target, target.encode(text)) == text
    ids = target.encode("a b")
    assert decode(target, [*target.header.control, *ids, *ids]) == "a b a b"


def test_random_splits_of_long_replies_agree() -> None:
    rng = Random(3)
    for name in SMALL:
        ids = [rng.randrange(small(name).header.vocabulary) for _ in range(3000)]
        cuts = [rng.randrange(3000) for _ in range(500)]
        assert "".join(streamed(small(name), ids, cuts)) == whole(small(name), ids)
