"""Tokenizer blobs from a model's files: GGUF metadata, tokenizer.json, tokenizer.model. No torch.

The payload is written by this module, key by key, so that one vocabulary has one digest whatever
file it came from and whatever library version read it. Control tokens, and what a model's author
added by hand (GGUF: user-defined), never come from text.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.bpe_document import bpe_document, pre_tokenizers
from shared.errors import ModelError
from shared.tokenizer import BPE_RULES, TokenizerHeader, pack_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""Token types, the same numbers in GGUF and in SentencePiece."""

_SPACE = "\u2581"
_RULES = ", ".join(sorted(BPE_RULES))


def bpe_blob(
    tokens: Sequence[str], merges: Sequence[str], *, pre: str, control: Sequence[int], **ids: Any
) -> bytes:
    """Return the blob of a byte-level BPE; `merges` are "left right" in rank order.

    Raises:
        ModelError: a pre-tokenizer without a proven rule, or a token that is there twice.
    """
    repeated = len(tokens) - len(set(tokens))
    if repeated:
        raise ModelError(f"{repeated} tokens are there twice: unsupported")
    if pre not in BPE_RULES:
        raise ModelError(f"pre-tokenizer {pre!r} is not supported; supported are {_RULES}")
    payload = bpe_document(tokens, merges, pre)
    header = TokenizerHeader("bpe", pre, len(tokens), sorted(control), **ids)
    return pack_tokenizer(header, payload)


def spm_blob(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], **ids: Any
) -> bytes:
    """Return the blob of a SentencePiece BPE with the identity normalizer.

    Raises:
        ModelError: a piece has a space behind another character, so that no cut is safe, or a
            space is no piece, so that unknown characters on its two sides would become one token.
    """
    schema = _schema()
    types = [_CONTROL if kind == _USER else kind for kind in types]
    if not len(pieces) == len(scores) == len(types):
        raise ModelError(f"{len(pieces)} pieces, {len(scores)} scores, {len(types)} types: damaged")
    if _UNKNOWN not in types or _SPACE not in pieces:
        raise ModelError("a SentencePiece vocabulary needs an unknown piece and a space")
    proto = schema.ModelProto()
    for i, (piece, score, kind) in enumerate(zip(pieces, scores, types, strict=True)):
        if _SPACE in piece.lstrip(_SPACE) and kind not in (_CONTROL, _UNKNOWN):
            raise ModelError(f"SentencePiece piece {i} {piece!r} has a space inside: unsupported")
        proto.pieces.add(piece=piece, score=score, type=kind)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = schema.TrainerSpec.BPE
    trainer.byte_fallback = _BYTE in types
    trainer.vocab_size = len(pieces)
    for name, token in (("unk_id", types.index(_UNKNOWN)), ("bos_id", ids.get("bos", -1))):
        setattr(trainer, name, token)
    trainer.eos_id, trainer.pad_id = ids.get("eos", -1), -1
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = False  # `SpmTokenizer` adds it, to the first segment only
    normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    control = [i for i, kind in enumerate(types) if kind == _CONTROL]
    header = TokenizerHeader("spm", "space", len(pieces), control, **ids)
    return pack_tokenizer(header, proto.SerializeToString(deterministic=True))


def blob_from_gguf(meta: Mapping[str, Any]) -> bytes:
    """Return the tokenizer blob of a GGUF's metadata.

    Raises:
        ModelError: it has no vocabulary, or one of an unsupported kind.
    """
    model = meta.get("tokenizer.ggml.model")
    tokens: list[str] | None = meta.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelError("this GGUF has no vocabulary (tokenizer.ggml.tokens)")
    types: list[int] = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    needed = {"gpt2": "merges", "llama": "scores"}.get(str(model), "tokens")
    if f"tokenizer.ggml.{needed}" not in meta:
        raise ModelError(f"this GGUF's vocabulary has no tokenizer.ggml.{needed}")
    ids = {
        "bos": meta.get("tokenizer.ggml.bos_token_id", -1),
        "eos": meta.get("tokenizer.ggml.eos_token_id", -1),
        "add_bos": meta.get("tokenizer.ggml.add_bos_token", model == "llama"),
    }
    if model == "gpt2":
        control = [i for i, kind in enumerate(types) if kind in (_CONTROL, _USER)]
        pre = meta.get("tokenizer.ggml.pre", "default")
        pre = {"llama3": "llama-bpe", "gpt2": "gpt-2"}.get(pre, pre)
        return bpe_blob(tokens, meta["tokenizer.ggml.merges"], pre=pre, control=control, **ids)
    if model == "llama":
        ids["add_prefix"] = meta.get("tokenizer.ggml.add_space_prefix", True)
        return spm_blob(tokens, meta["tokenizer.ggml.scores"], types, **ids)
    raise ModelError(f"GGUF tokenizer {model!r} is not supported; supported are gpt2 and llama")


_NFC = {"type": "NFC"}
"""Left out, as llama.cpp does: keyboards and recognizers give composed characters anyway."""
_PLAIN = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
)


def blob_from_folder(folder: Path) -> bytes:
    """Return the tokenizer blob of a Hugging Face folder.

    Raises:
        ModelError: neither tokenizer.json nor tokenizer.model is there, or it is unsupported.
    """
    if (folder / "tokenizer.model").exists():
        return blob_from_sentencepiece(folder / "tokenizer.model")
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{folder}: neither tokenizer.json nor tokenizer.model is there")
    document = json.loads(path.read_text())
    model = document["model"]
    plain = model.get("type") == "BPE" and not any(model.get(name) for name in _PLAIN)
    if not plain or document.get("normalizer") not in (None, _NFC):
        raise ModelError(f"{path}: only byte-level BPE without a normalizer is supported")
    split = document.get("pre_tokenizer")
    pre = next((name for name, rule in pre_tokenizers().items() if _same(rule, split)), None)
    if pre is None:
        raise ModelError(
            f"{path}: pre-tokenizer {json.dumps(split)[:200]} is not supported; "
            f"supported are {_RULES}"
        )
    vocabulary: dict[str, int] = dict(model["vocab"])
    control = [t["id"] for t in document.get("added_tokens", ())]
    vocabulary.update({t["content"]: t["id"] for t in document.get("added_tokens", ())})
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if [vocabulary[token] for token in tokens] != list(range(len(tokens))):
        raise ModelError(f"{path}: the ids of its {len(tokens)} tokens have gaps: unsupported")
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    settings = _settings(folder)
    ids = {
        "bos": vocabulary.get(settings.get("bos_token") or "", -1),
        "eos": vocabulary.get(settings.get("eos_token") or "", -1),
        "add_bos": bool(settings.get("add_bos_token", False)),
    }
    return bpe_blob(tokens, merges, pre=pre, control=control, **ids)


def blob_from_sentencepiece(path: Path) -> bytes:
    """Return the tokenizer blob of a SentencePiece model file.

    Raises:
        ModelError: it is damaged, not BPE, or normalizes its text.
    """
    from google.protobuf.message import DecodeError

    schema = _schema()
    proto = schema.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ModelError(f"{path}: not a SentencePiece model: {error}") from None
    normalizer = proto.normalizer_spec
    if proto.trainer_spec.model_type != schema.TrainerSpec.BPE:
        raise ModelError(f"{path}: only SentencePiece BPE models are supported")
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        raise ModelError(
            f"{path}: normalizer {normalizer.name!r} changes text; only identity is supported"
        )
    if proto.trainer_spec.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise ModelError(f"{path}: only spaces in front of words are supported")
    return spm_blob(
        [p.piece for p in proto.pieces],
        [p.score for p in proto.pieces],
        [p.type for p in proto.pieces],
        bos=proto.trainer_spec.bos_id,
        eos=proto.trainer_spec.eos_id,
        add_bos=True,
        add_prefix=normalizer.add_dummy_prefix,
    )


def _schema() -> Any:
    """SentencePiece's own schema, whose classes protobuf makes at import (so: untyped)."""
    return importlib.import_module("sentencepiece.sentencepiece_model_pb2")


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in ("bos_token", "eos_token"):
        if isinstance(settings.get(name), dict):
            settings[name] = settings[name].get("content")
    return settings


def _same(rule: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    """Compare two pre-tokenizers, leaving out what does not change the ids."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k != "trim_offsets"}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return bool(strip(rule) == strip(other))
