"""Exact ids, proven cuts, honest digests, and text that comes out without half a character."""

import json
from collections.abc import Callable, Sequence
from itertools import product
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.digest import GOLDEN_TEXTS
from shared.errors import ModelError
from shared.nn.vocabulary import bpe_blob
from shared.tokenizer import MAX_BLOB, Tokenizer, TokenizerHeader, load_tokenizer, pack_tokenizer
from tests.vocabularies import (
    REAL,
    SMALL,
    TEXTS,
    data,
    kvret_utterances,
    real,
    small,
    small_blob,
    small_bpe,
    small_sentencepiece,
    tokenizer,
    xsid_utterances,
)


def joined(target: Tokenizer, text: str) -> list[int]:
    return [token for segment in target.split(text, first=True) for token in segment.ids]


# --- ids


@pytest.mark.parametrize("name", SMALL + REAL)
def test_segments_encoded_alone_are_the_encoding_of_the_whole(name: str) -> None:
    target = tokenizer(name)
    for text in (*TEXTS, *GOLDEN_TEXTS):
        segments = target.split(text, first=True)
        assert joined(target, text) == target.encode(text)
        assert [s.end for s in segments] == sorted({s.end for s in segments})
        assert (segments[-1].end if segments else 0) == len(text)


def test_sentencepiece_ids_equal_those_of_the_library_on_the_models_own_terms() -> None:
    from sentencepiece import SentencePieceProcessor

    for fallback, name in ((True, "small-spm"), (False, "small-spm-unknown")):
        native = SentencePieceProcessor(
            model_proto=small_sentencepiece(byte_fallback=fallback)  # adds its dummy prefix itself
        )
        for text in (*TEXTS, *GOLDEN_TEXTS):
            assert small(name).encode(text) == native.encode(text)


@pytest.mark.parametrize("name", ["stories260k", "llama2"])
def test_real_sentencepiece_ids_equal_those_of_the_library(name: str) -> None:
    from sentencepiece import SentencePieceProcessor

    folder, file = {
        "stories260k": ("stories260K", "tok512.model"),
        "llama2": ("llama2-spm-vectors", "tokenizer.model"),
    }[name]
    native = SentencePieceProcessor(model_file=str(data(folder, file)))
    for text in (*TEXTS, *GOLDEN_TEXTS, *kvret_utterances()[::5], *xsid_utterances()[::5]):
        assert real(name).encode(text) == native.encode(text)


def test_all_llama_2_vectors_come_out() -> None:
    target = real("llama2")
    name = "ggml-vocab-llama-spm.gguf"
    inputs = data("llama2-spm-vectors", f"{name}.inp").read_bytes().decode()
    outputs = data("llama2-spm-vectors", f"{name}.out").read_text().split("\n")
    texts = inputs.split("\n__ggml_vocab_test__\n")
    expected = [[int(token) for token in line.split()] for line in outputs[: len(texts)]]
    assert len(texts) == len(expected) == 47
    assert [target.encode(text) for text in texts] == expected


def test_bpe_ids_equal_those_of_the_tokenizer_as_it_was_trained() -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    tokens, merges = small_bpe()
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    native = Library(models.BPE(vocabulary, pairs))
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in (*TEXTS, *GOLDEN_TEXTS):
        assert small("small-gpt-2").encode(text) == native.encode(text).ids


# --- cuts


CLASSES = (" ", "\n", "\u00a0", "a", "l", "'", "1", "!")
"""One of every kind the BPE rules tell apart; `'l` may become the contraction `'ll`."""


def check_horizon(target: Tokenizer, classes: Sequence[str], length: int) -> int:
    """Append every character to every text: the cuts up to the horizon must stay the same."""
    texts = 0
    for chars in product(classes, repeat=length):
        text = "".join(chars)
        horizon = target.horizon(text)
        assert 0 <= horizon <= len(text)
        cuts = {s.end for s in target.split(text, first=True) if s.end <= horizon}
        for char in classes:
            longer = text + char
            after = {s.end for s in target.split(longer, first=True)}
            assert {cut for cut in after if cut <= horizon} == cuts, (text, char)
            assert target.horizon(longer) >= horizon
            texts += 1
    return texts


@pytest.mark.parametrize("name", SMALL)
def test_no_cut_before_the_horizon_moves_for_any_text_of_up_to_five_characters(name: str) -> None:
    classes = (" ", "\u2581", "\n", "a", "'") if "spm" in name else CLASSES
    assert sum(check_horizon(small(name), classes, length) for length in range(5)) > 700


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_no_cut_before_the_horizon_moves_for_any_text_of_six_characters(name: str) -> None:
    classes = (" ", "\u2581", "\n", "a", "'") if "spm" in name else CLASSES
    assert check_horizon(small(name), classes, 5) == len(classes) ** 6


@pytest.mark.parametrize("name", SMALL)
def test_a_rest_that_begins_at_a_cut_is_cut_like_the_whole(name: str) -> None:
    for text in TEXTS:
        segments = small(name).split(text, first=True)
        for index, segment in enumerate(segments):
            rest = small(name).split(text[segment.end :], first=False)
            assert [(s.end + segment.end, s.ids) for s in rest] == segments[index + 1 :]


def test_what_the_rules_call_whitespace_python_strips_as_well() -> None:
    from tokenizers import Regex, pre_tokenizers

    alone = pre_tokenizers.Split(Regex(r"\s"), "isolated")
    spaces = [c for c in map(chr, range(0x3100)) if len(alone.pre_tokenize_str(f"a{c}a")) == 3]
    assert len(spaces) == 25  # Unicode's White_Space
    assert all(space.isspace() for space in spaces)


# --- control strings


@pytest.mark.parametrize("name", SMALL + REAL)
def test_no_control_id_ever_comes_from_text(name: str) -> None:
    target = tokenizer(name)
    controls = target.controls()
    assert sorted(controls.values()) == sorted(target.header.control)
    assert len(controls) >= 2
    for string, token in controls.items():
        for text in (string, f" {string}", f"x{string}y", f"{string}{string}"):
            assert token not in target.encode(text)
        assert target.piece(token) == b""

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.sampled_from([*controls, "a", " ", "|>", "<", "\n"])).map("".join))
    def check(text: str) -> None:
        assert not set(target.encode(text)) & set(target.header.control)

    check()


# --- blobs


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    header = TokenizerHeader("bpe", "tekken", 1, [])
    with pytest.raises(ModelError, match=r"'tekken'.*is not proven; supported are gpt-2"):
        load_tokenizer(pack_tokenizer(header, b"{}"))
    with pytest.raises(ModelError, match="'lattice' is unknown; supported is 'space'"):
        load_tokenizer(pack_tokenizer(TokenizerHeader("spm", "lattice", 1, []), b""))


@pytest.mark.parametrize("name", ["small-spm", "small-gpt-2"])
def test_a_damaged_blob_is_refused_or_has_another_digest(name: str) -> None:
    rng, whole, refused = Random(7), small_blob(name), 0
    for turn in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(len(damaged))] ^= rng.randrange(1, 256)
        if turn % 3 == 0:
            del damaged[rng.randrange(len(damaged)) :]
        try:
            target = load_tokenizer(bytes(damaged))
        except ModelError:
            refused += 1
        else:
            assert target.digest != small(name).digest
            target.encode("hello the world 🙂")
            b"".join(map(target.piece, range(-2, 700)))
    assert refused > 150


def test_a_blob_whose_header_and_vocabulary_disagree_is_refused() -> None:
    line, _, payload = small_blob("small-gpt-2").partition(b"\n")
    header = msgspec.json.decode(line, type=TokenizerHeader)
    for changes in ({"vocabulary": 7}, {"control": [70_000]}, {"bos": 70_000}, {"eos": -2}):
        wrong = msgspec.structs.replace(header, **changes)
        with pytest.raises(ModelError, match="damaged"):
            load_tokenizer(pack_tokenizer(wrong, payload))


def test_a_token_outside_the_byte_alphabet_stands_for_its_own_text() -> None:
    tokens, merges = small_bpe()
    blob = bpe_blob([*tokens, "two words"], merges, pre="gpt-2", control=[0])
    assert load_tokenizer(blob).piece(len(tokens)) == b"two words"


def _with_model(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return document | {"model": document["model"] | changes}


def _split(pattern: str) -> dict[str, Any]:
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": rule}


FOREIGN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no pre-tokenizer": lambda d: d | {"pre_tokenizer": None},
    "a pattern that never ends": lambda d: d | _split("(a+)+$"),
    "a normalizer": lambda d: d | {"normalizer": {"type": "Replace", "pattern": {"String": "a"}}},
    "added tokens": lambda d: d | {"added_tokens": [{"id": 0, "content": "a", "special": False}]},
    "a key more": lambda d: d | {"later": 1},
    "another model": lambda d: _with_model(d, type="WordPiece"),
    "ids with gaps": lambda d: _with_model(d, vocab=d["model"]["vocab"] | {"x" * 9: 1 << 31}),
    "an id twice": lambda d: _with_model(d, vocab=d["model"]["vocab"] | {"x" * 9: 7}),
    "dropout": lambda d: _with_model(d, dropout=0.5),
}


def _dumped(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


@pytest.mark.parametrize("case", FOREIGN)
def test_a_bpe_in_any_form_but_ours_is_refused(case: str) -> None:
    line, _, payload = small_blob("small-gpt-2").partition(b"\n")
    document = json.loads(payload)
    assert _dumped(document) == payload
    with pytest.raises(ModelError, match="not in the form that deltarelay writes"):
        load_tokenizer(line + b"\n" + _dumped(FOREIGN[case](document)))


def test_a_sentencepiece_whose_pieces_are_no_text_is_refused_when_it_is_loaded() -> None:
    whole = small_blob("small-spm")
    for piece in (b"</s>", b"<unk>", "ü".encode()):
        damaged = whole.replace(piece, b"\x97" * len(piece), 1)
        assert damaged != whole
        try:
            target = load_tokenizer(damaged)
        except ModelError:
            continue
        target.controls()
        b"".join(map(target.piece, range(target.header.vocabulary)))


@pytest.mark.parametrize("merge", ["a c", "c a", "b a", "ab", "a  b", " a", "a ", "a b a", ""])
def test_a_merge_that_is_not_of_two_tokens_that_make_a_third_is_refused(merge: str) -> None:
    tokens = ["<s>", "a", "b", "ab", ""]
    assert load_tokenizer(bpe_blob(tokens, ["a b"], pre="gpt-2", control=[0])).encode("ab") == [3]
    with pytest.raises(ModelError, match=r"merge 1 .* is not of two tokens that make a third"):
        load_tokenizer(bpe_blob(tokens[:4], ["a b", merge], pre="gpt-2", control=[0]))


@pytest.mark.parametrize("blob", [b"", b"\n", b"{}", b"{}\n", b"[1]\n", b"\xff" * 9, b"null\n{}"])
def test_what_is_no_blob_is_refused(blob: bytes) -> None:
    with pytest.raises(ModelError, match=f"blob of {len(blob)} bytes is damaged"):
        load_tokenizer(blob)


def test_a_blob_over_the_bound_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(ModelError, match=f"at most {MAX_BLOB} bytes"):
        load_tokenizer(bytes(MAX_BLOB + 1))
