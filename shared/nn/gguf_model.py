"""A Llama model in a GGUF file → our configuration and names."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelError
from shared.nn.gguf_file import GgufFile, GgufTensor, read_gguf_file
from shared.nn.llama import LlamaConfig, RopeScaling
from shared.nn.vocabulary import blob_from_gguf
from shared.nn.weights import Checkpoint, Weight

_PARTS = {
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_TOP = {
    "token_embd.weight": "embedding",
    "output_norm.weight": "norm",
    "output.weight": "head",
}
_ROPE_FACTORS = "rope_freqs.weight"


def read_gguf(path: Path) -> Checkpoint:
    """Read a GGUF file.

    Raises:
        ModelError: it is not of the Llama architecture, or a part is unsupported.
        ValueError: it is damaged (and what else a damaged file makes numpy raise).
    """
    if not path.is_file():
        raise ModelError(f"{path}: neither a file nor a folder")
    file = read_gguf_file(path)
    meta = file.metadata
    if meta.get("general.architecture") != "llama":
        raise ModelError(
            f"{path}: architecture {meta.get('general.architecture')!r}; only 'llama' is supported"
        )
    config = _config(file)
    stops = {meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    return Checkpoint(
        path,
        str(meta.get("general.name", path.stem)),
        config,
        _weights(file.tensors, config),
        blob_from_gguf(meta),
        str(meta.get("tokenizer.chat_template", "")),
        frozenset(int(stop) for stop in stops if stop is not None),
    )


def _weights(tensors: Mapping[str, GgufTensor], config: LlamaConfig) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}
    for kind in {tensor.kind for tensor in tensors.values()}:
        _check_kind(kind)
    for name, tensor in tensors.items():
        if name == _ROPE_FACTORS:
            continue  # part of the configuration
        ours = _our_name(name)
        weight = Weight(tensor.kind, tensor.data, tensor.shape)
        if ours.endswith((".q", ".k", ".q.bias", ".k.bias")):
            heads = config.heads if ours.split(".")[2] == "q" else config.kv_heads
            weight = weight.rows(_halves_order(tensor.shape[0], heads))
        weights[ours] = weight
    return weights


def _config(file: GgufFile) -> LlamaConfig:
    def key(name: str, default: Any = None) -> Any:
        value = file.metadata.get(f"llama.{name}", default)
        if value is None:
            raise ModelError(f"metadata llama.{name} is missing")
        return value

    if "token_embd.weight" not in file.tensors:
        raise ModelError("tensor 'token_embd.weight' is missing; is the download complete?")
    heads, hidden = int(key("attention.head_count")), int(key("embedding_length"))
    head_dim = int(key("attention.key_length", hidden // heads))
    if int(key("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(
            f"rotary angles over {key('rope.dimension_count')} of {head_dim} values: not supported"
        )
    return LlamaConfig(
        vocabulary=file.tensors["token_embd.weight"].shape[0],
        hidden=hidden,
        layers=int(key("block_count")),
        heads=heads,
        kv_heads=int(key("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate=int(key("feed_forward_length")),
        context=int(key("context_length")),
        norm_eps=float(key("attention.layer_norm_rms_epsilon")),
        rope_theta=float(key("rope.freq_base", 10_000.0)),
        rope_scaling=_scaling(file, head_dim),
    )


def _scaling(file: GgufFile, head_dim: int) -> RopeScaling | None:
    """llama.cpp states linear scaling in the metadata, and Llama 3's as a tensor of divisors."""
    kind = file.metadata.get("llama.rope.scaling.type", "none") or "none"
    if kind not in ("none", "linear"):
        raise ModelError(f"rope scaling {kind!r} is unknown; supported are linear and llama3")
    tensor = file.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        factor = float(file.metadata.get("llama.rope.scaling.factor", 1.0))
        return None if kind == "none" else RopeScaling(kind, factor)
    factors = tuple(tensor.data.reshape(-1).tolist())
    usable = len(factors) == head_dim // 2 and all(f > 0 and math.isfinite(f) for f in factors)
    if kind != "none" or tensor.kind != "F32" or not usable:
        raise ModelError(
            f"{_ROPE_FACTORS} ({tensor.kind} {tensor.shape}, beside scaling {kind!r}) is not "
            f"{head_dim // 2} positive float32 divisors on their own: unsupported"
        )
    return RopeScaling("factors", 1.0, factors=factors)


def _our_name(name: str) -> str:
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found is not None and found[2] in _PARTS:
        return f"layers.{found[1]}.{_PARTS[found[2]]}{'.bias' * (found[3] == 'bias')}"
    if name not in _TOP:
        raise ModelError(f"tensor {name!r} does not belong to the Llama architecture")
    return _TOP[name]


def _check_kind(kind: str) -> None:
    """Try a block: gguf stores more types than it can turn into numbers."""
    type_ = gguf.GGMLQuantizationType[kind]
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[type_][1]), np.uint8), type_)
    except NotImplementedError:
        raise ModelError(
            f"weights of type {kind} are not supported; use Q4_1, Q8_0 or BF16"
        ) from None


def _halves_order(rows: int, heads: int) -> NDArray[np.int64]:
    """Row order that turns GGUF's interleaved rotary pairs into halves."""
    dim = rows // heads
    order = np.arange(rows).reshape(heads, dim // 2, 2).swapaxes(1, 2)
    return np.ascontiguousarray(order).reshape(rows)
