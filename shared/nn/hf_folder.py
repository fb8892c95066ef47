"""A Llama model in a Hugging Face folder → our configuration and names."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shared.errors import ModelError
from shared.nn.llama import LlamaConfig, RopeScaling
from shared.nn.vocabulary import blob_from_folder
from shared.nn.weights import Checkpoint, Weight

_PARTS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_TOP = {
    "model.embed_tokens.weight": "embedding",
    "model.norm.weight": "norm",
    "lm_head.weight": "head",
}
_TYPES = ("llama", "qwen2")


def read_folder(folder: Path) -> Checkpoint:
    """Read a Hugging Face model folder.

    Raises:
        ModelError: it is not of the Llama architecture, or a part is missing or unsupported.
        ValueError: it is damaged (and what else a damaged file makes the libraries raise).
    """
    path = folder / "config.json"
    if not path.exists():
        raise ModelError(f"{path}: it is missing; expected a Hugging Face model folder")
    settings = _json(path)
    if settings.get("model_type") not in _TYPES:
        raise ModelError(
            f"{path}: model_type {settings.get('model_type')!r}; supported are {', '.join(_TYPES)}"
        )
    config = _config(settings, path)
    weights = dict(_weights(folder))
    if settings.get("tie_word_embeddings", False):
        weights.pop("head", None)
    elif "head" not in weights:
        raise ModelError(
            f"{folder}: lm_head.weight is missing and config.json does not tie it to the embedding"
        )
    return Checkpoint(
        folder,
        folder.name,
        config,
        weights,
        blob_from_folder(folder),
        _template(folder),
        _stop_ids(folder, settings),
    )


def _config(settings: Mapping[str, Any], path: Path) -> LlamaConfig:
    if settings.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {settings['hidden_act']!r}; only 'silu' is supported")
    if settings.get("use_sliding_window") or settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{path}: use_sliding_window and partial_rotary_factor are not supported")
    heads = int(settings["num_attention_heads"])
    rope: dict[str, Any] = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    return LlamaConfig(
        vocabulary=int(settings["vocab_size"]),
        hidden=int(settings["hidden_size"]),
        layers=int(settings["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(settings.get("num_key_value_heads") or heads),
        head_dim=int(settings.get("head_dim") or settings["hidden_size"] // heads),
        intermediate=int(settings["intermediate_size"]),
        context=int(settings["max_position_embeddings"]),
        norm_eps=float(settings["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", settings.get("rope_theta", 10_000.0))),
        rope_scaling=_scaling(rope, path),
    )


def _scaling(rope: Mapping[str, Any], path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind,
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise ModelError(f"{path}: rope scaling {kind!r} is unknown; supported are linear and llama3")


def _weights(folder: Path) -> Iterator[tuple[str, Weight]]:
    from safetensors import SafetensorError, safe_open

    parts = sorted(folder.glob("*.safetensors"))
    if not parts:
        raise ModelError(f"{folder}: no *.safetensors file is there; is the download complete?")
    for part in parts:
        try:
            with safe_open(part, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if not name.endswith(".rotary_emb.inv_freq"):  # old files; never read
                        yield _our_name(name, part), _weight(name, file.get_tensor(name))
        except SafetensorError as error:
            raise ModelError(f"{part}: damaged or truncated, download it again: {error}") from None


def _weight(name: str, tensor: torch.Tensor) -> Weight:
    """Keep 16-bit values as they are: half the memory, and their bits are what is repacked."""
    shape = tuple(tensor.shape)
    if tensor.dtype == torch.float32:
        return Weight("F32", tensor.numpy(), shape)
    if tensor.dtype == torch.float16:
        return Weight("F16", tensor.numpy(), shape)
    if tensor.dtype == torch.bfloat16:
        return Weight("BF16", tensor.view(torch.uint8).numpy(), shape)
    raise ModelError(f"tensor {name!r} is {tensor.dtype}; supported are float32, float16, bfloat16")


def _our_name(name: str, path: Path) -> str:
    found = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)", name)
    if found is not None and found[2] in _PARTS:
        return f"layers.{found[1]}.{_PARTS[found[2]]}{'.bias' * (found[3] == 'bias')}"
    if name not in _TOP:
        raise ModelError(f"{path}: tensor {name!r} does not belong to the Llama architecture")
    return _TOP[name]


def _template(folder: Path) -> str:
    """Return the chat template: its own file, or a setting of the tokenizer (one, or by name)."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    path = folder / "tokenizer_config.json"
    chat = _json(path).get("chat_template") if path.exists() else None
    if isinstance(chat, list):
        chat = {entry["name"]: entry["template"] for entry in chat}.get("default")
    return str(chat or "")


def _stop_ids(folder: Path, settings: Mapping[str, Any]) -> frozenset[int]:
    """Return what ends a reply: a chat model often states more in generation_config.json."""
    path = folder / "generation_config.json"
    found: set[int] = set()
    for source in (settings, _json(path) if path.exists() else {}):
        stops = source.get("eos_token_id")
        found.update(stops if isinstance(stops, list) else [] if stops is None else [stops])
    return frozenset(found)


def _json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object")
    return content
