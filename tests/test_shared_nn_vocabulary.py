"""One vocabulary, one digest, whatever file it came from; what cannot be exact is refused."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelError
from shared.nn.gguf_file import read_gguf_file
from shared.nn.vocabulary import (
    blob_from_folder,
    blob_from_gguf,
    blob_from_sentencepiece,
    bpe_blob,
    spm_blob,
)
from shared.tokenizer import BPE_RULES, load_tokenizer
from tests.vocabularies import (
    data,
    real,
    small,
    small_blob,
    small_bpe,
    small_sentencepiece,
)

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def gguf_metadata(rule: str) -> dict[str, Any]:
    tokens, merges = small_bpe()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_folder(folder: Path, rule: str, **changes: Any) -> Path:
    """Write a Hugging Face folder's tokenizer: control tokens are added, merges are pairs."""
    document = json.loads(small_blob(f"small-{rule}").partition(b"\n")[2])
    vocabulary = document["model"]["vocab"]
    document["added_tokens"] = [
        {"id": i, "content": token, "special": True} for token, i in vocabulary.items() if i < 3
    ]
    document["model"]["merges"] = [m.split(" ") for m in document["model"]["merges"]]
    document["model"] |= changes.pop("model", {})
    (folder / "tokenizer.json").write_text(json.dumps(document | changes))
    special = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


# --- one digest


@pytest.mark.parametrize("rule", sorted(BPE_RULES))
def test_a_bpe_vocabulary_has_one_digest_from_gguf_and_from_a_folder(
    rule: str, tmp_path: Path
) -> None:
    from_gguf = load_tokenizer(blob_from_gguf(gguf_metadata(rule)))
    from_folder = load_tokenizer(blob_from_folder(write_folder(tmp_path, rule)))
    assert from_gguf.digest == from_folder.digest == small(f"small-{rule}").digest
    assert from_gguf.golden == from_folder.golden


def test_a_sentencepiece_vocabulary_has_one_digest_from_gguf_model_and_folder(
    tmp_path: Path,
) -> None:
    metadata = read_gguf_file(data("stories260K", "stories260K.gguf")).metadata
    model = data("stories260K", "tok512.model")
    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    blobs = {blob_from_gguf(metadata), blob_from_sentencepiece(model), blob_from_folder(tmp_path)}
    assert blobs == {next(iter(blobs))}
    assert load_tokenizer(blobs.pop()).golden == real("stories260k").golden


def test_other_names_of_a_rule_mean_the_same() -> None:
    for theirs, ours in (("llama3", "llama-bpe"), ("gpt2", "gpt-2")):
        assert blob_from_gguf(gguf_metadata(theirs)) == blob_from_gguf(gguf_metadata(ours))


def test_one_vocabulary_under_two_rules_has_two_digests_and_two_golden_vectors() -> None:
    targets = [small(f"small-{rule}") for rule in sorted(BPE_RULES)]
    assert len({target.digest for target in targets}) == len(targets)
    a, b, c = (small(f"small-{rule}").golden for rule in ("gpt-2", "smollm", "llama-bpe"))
    assert len({a, b, c}) == 3


def test_composition_is_left_out_as_llama_cpp_does(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "qwen2", normalizer={"type": "NFC"})
    assert blob_from_folder(folder) == small_blob("small-qwen2")


def test_what_an_author_added_by_hand_is_a_control_token_too() -> None:
    pieces = ["<unk>", "<s>", "<|system|>", "\u2581", *"a<|system>"]
    pieces = list(dict.fromkeys(pieces))
    types = [UNKNOWN, CONTROL, USER] + [NORMAL] * (len(pieces) - 3)
    target = load_tokenizer(spm_blob(pieces, [0.0] * len(pieces), types, bos=1))
    assert target.controls() == {"<s>": 1, "<|system|>": 2}
    assert 2 not in target.encode("a <|system|> a")
    metadata = gguf_metadata("gpt-2")
    metadata["tokenizer.ggml.token_type"][300] = USER
    assert 300 in load_tokenizer(blob_from_gguf(metadata)).header.control


# --- refusals


@pytest.mark.parametrize("rule", ["default", "deepseek-llm", ""])
def test_an_unknown_pre_tokenizer_of_a_gguf_is_refused_by_name(rule: str) -> None:
    with pytest.raises(ModelError, match=f"{rule!r} is not supported; supported are gpt-2, llama"):
        blob_from_gguf(gguf_metadata(rule))


@pytest.mark.parametrize("missing", ["tokens", "merges"])
def test_a_gguf_without_its_vocabulary_is_refused(missing: str) -> None:
    metadata = gguf_metadata("gpt-2")
    del metadata[f"tokenizer.ggml.{missing}"]
    with pytest.raises(ModelError, match=f"tokenizer.ggml.{missing}"):
        blob_from_gguf(metadata)


def test_a_gguf_with_another_kind_of_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'t5' is not supported; supported are gpt2 and llama"):
        blob_from_gguf(gguf_metadata("gpt-2") | {"tokenizer.ggml.model": "t5"})


def test_a_token_that_is_there_twice_is_refused() -> None:
    tokens, merges = small_bpe()
    with pytest.raises(ModelError, match="1 tokens are there twice"):
        bpe_blob([*tokens, "Ġ"], merges, pre="gpt-2", control=[])


@pytest.mark.parametrize(
    ("pieces", "types", "message"),
    [
        (["<unk>", "\u2581", "a\u2581b"], [UNKNOWN, NORMAL, NORMAL], "has a space inside"),
        (["<unk>", "\u2581", "a\u2581b"], [UNKNOWN, NORMAL, UNUSED], "has a space inside"),
        (["<unk>", "a"], [UNKNOWN, NORMAL], "needs an unknown piece and a space"),
        (["\u2581", "a"], [NORMAL, NORMAL], "needs an unknown piece and a space"),
        (["<unk>", "\u2581"], [UNKNOWN], "2 pieces, 2 scores, 1 types"),
    ],
)
def test_pieces_without_a_safe_cut_are_refused(
    pieces: list[str], types: list[int], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        spm_blob(pieces, [0.0] * len(pieces), types)


FOLDERS: dict[str, tuple[dict[str, Any], str]] = {
    "a normalizer": ({"normalizer": {"type": "Lowercase"}}, "without a normalizer"),
    "another pre-tokenizer": ({"pre_tokenizer": {"type": "Whitespace"}}, '"Whitespace".*supported'),
    "no pre-tokenizer": ({"pre_tokenizer": None}, "pre-tokenizer null is not supported"),
    "another model": ({"model": {"type": "WordPiece"}}, "only byte-level BPE"),
    "byte fallback": ({"model": {"byte_fallback": True}}, "only byte-level BPE"),
    "gaps": ({"added_tokens": [{"id": 9000, "content": "<x>"}]}, "have gaps"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_whose_text_would_be_split_otherwise_is_refused(case: str, tmp_path: Path) -> None:
    changes, message = FOLDERS[case]
    with pytest.raises(ModelError, match=f"tokenizer.json: .*{message}"):
        blob_from_folder(write_folder(tmp_path, "gpt-2", **changes))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        blob_from_folder(tmp_path)


def changed(change: Callable[[Any], None]) -> bytes:
    schema: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    proto = schema.ModelProto()
    proto.ParseFromString(small_sentencepiece())
    change(proto)
    written: bytes = proto.SerializeToString()
    return written


def as_unigram(proto: Any) -> None:
    proto.trainer_spec.model_type = 1


def with_charsmap(proto: Any) -> None:
    proto.normalizer_spec.precompiled_charsmap = b"\0\0"


def with_suffix_spaces(proto: Any) -> None:
    proto.trainer_spec.treat_whitespace_as_suffix = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (as_unigram, "only SentencePiece BPE"),
        (with_charsmap, "only identity is supported"),
        (with_suffix_spaces, "only spaces in front of words"),
    ],
)
def test_a_sentencepiece_model_that_changes_text_or_is_no_bpe_is_refused(
    change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(changed(change))
    with pytest.raises(ModelError, match=f"{path}: .*{message}"):
        blob_from_sentencepiece(path)


@pytest.mark.parametrize("content", [b"", b"no model", b"\xff" * 50])
def test_what_is_no_sentencepiece_model_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"{path}: "):
        blob_from_sentencepiece(path)
