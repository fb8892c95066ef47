"""The one form in which the relay writes a byte-level BPE: a tokenizer.json of fixed keys. Pure.

Whoever receives one reads vocabulary and merges from it, writes the document again, and takes it
only if not a byte differs. So the tokenizer library never sees a regular expression, a normalizer
or an id that a stranger has made up.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

_LLAMA_BPE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA_BPE.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(*, regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": regex,
    }


def _split_rule(pattern: str) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(regex=False)]}


def pre_tokenizers() -> dict[str, dict[str, Any]]:
    """Return the rules of `BPE_RULES` as the library writes them."""
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "gpt-2": _byte_level(regex=True),
        "smollm": {"type": "Sequence", "pretokenizers": [digits, _byte_level(regex=True)]},
        "llama-bpe": _split_rule(_LLAMA_BPE),
        "qwen2": _split_rule(_QWEN2),
    }


def bpe_document(tokens: Sequence[str], merges: Sequence[str], pre: str) -> bytes:
    """Return the document of a vocabulary, tokens by id; `merges` are "left right" by rank."""
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre == "llama-bpe",
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": list(merges),
    }
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizers()[pre],
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


class _Model(msgspec.Struct):
    vocab: dict[str, int]
    merges: list[str]


class _Document(msgspec.Struct):
    model: _Model


def check_document(payload: bytes, pre: str) -> None:
    """Check that `payload` is a document of `bpe_document`, for the rule `pre`.

    Raises:
        ValueError: it is another one, or a merge is not of two tokens that make a third: the
            library would panic.
    """
    model = msgspec.json.decode(payload, type=_Document).model
    tokens = list(model.vocab)
    if bpe_document(tokens, model.merges, pre) != payload:
        raise ValueError(
            f"its {len(tokens)} tokens with {len(model.merges)} merges are not in the form that "
            "deltarelay writes: make the blob with the same version"
        )
    known = model.vocab
    for rank, merge in enumerate(model.merges):
        left, space, right = merge.partition(" ")
        if not (space and left in known and right in known and left + right in known):
            raise ValueError(f"merge {rank} {merge!r} is not of two tokens that make a third")
