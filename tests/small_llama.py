"""A random Llama of some thousand weights, written as a Hugging Face folder and as a GGUF file."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import save_file

from tests.vocabularies import small_blob, small_bpe

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, CONTEXT = 64, 2, 4, 2, 16, 96, 128
Array = NDArray[np.float32]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class SmallLlama:
    """A model by the names of Hugging Face."""

    weights: dict[str, NDArray[Any]]
    tied: bool = True
    rope: Mapping[str, Any] | None = None

    def settings(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "vocab_size": len(small_bpe()[0]),
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "intermediate_size": INTERMEDIATE,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": self.rope,
            "tie_word_embeddings": self.tied,
            "eos_token_id": 2,
        }

    def quantized(self, kind: Kind) -> "SmallLlama":
        """Return the model whose matrices hold what their quantized form stands for."""
        weights = {
            name: gguf.dequantize(gguf.quantize(value, kind), kind) if value.ndim == 2 else value
            for name, value in self.weights.items()
        }
        return replace(self, weights=weights)


def random_llama(
    *, tied: bool = True, bias: bool = False, rope: Mapping[str, Any] | None = None
) -> SmallLlama:
    """Return a model of fixed random weights."""
    rng = np.random.default_rng(11)
    kv = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(small_bpe()[0]), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    parts = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for i in range(LAYERS):
        for part, shape in parts.items():
            shapes[f"model.layers.{i}.{part}.weight"] = shape
            if bias and "norm" not in part:
                shapes[f"model.layers.{i}.{part}.bias"] = shape[:1]
    weights = {
        name: (rng.standard_normal(shape) * 0.2 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    return SmallLlama(weights, tied, rope)


def write_folder(
    folder: Path, model: SmallLlama, *, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write a Hugging Face folder; `changes` go into its config.json."""
    folder.mkdir(exist_ok=True)
    tensors = {n: torch.from_numpy(value).to(dtype) for n, value in model.weights.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.settings() | changes))
    document = json.loads(small_blob("small-gpt-2").partition(b"\n")[2])
    document["added_tokens"] = [
        {"id": i, "content": token} for token, i in document["model"]["vocab"].items() if i < 3
    ]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": "{{ x }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def write_gguf(
    path: Path,
    model: SmallLlama,
    *,
    kind: Kind = Kind.F32,
    vocabulary: bool = True,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    architecture: str = "llama",
    sizes: Mapping[str, int | None] | None = None,
) -> Path:
    """Write a GGUF file as llama.cpp's converter does; `sizes`: keys under `llama.`, None: none."""
    writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
    usual = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD_DIM,
    }
    for name, value in (usual | dict(sizes or {})).items():
        if value is not None:
            writer.add_uint32(f"llama.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_chat_template("{{ x }}")
    if vocabulary:
        _add_vocabulary(writer)
    _add_rope(writer, model.rope)
    for name, weight in model.weights.items():
        _add_tensor(writer, name, weight, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens, merges = small_bpe()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_rope(writer: gguf.GGUFWriter, rope: Mapping[str, Any] | None) -> None:
    """Linear scaling is metadata; Llama 3's is a tensor of divisors (convert_hf_to_gguf.py)."""
    if rope is None:
        return
    if rope["rope_type"] != "llama3":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        return
    context = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors: list[float] = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * 10000.0 ** (i / HEAD_DIM)
        if wavelength < context / high:
            divisors.append(1)
        elif wavelength > context / low:
            divisors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def _add_tensor(writer: gguf.GGUFWriter, name: str, value: NDArray[Any], kind: Kind) -> None:
    if name.startswith("model.layers."):
        _, _, layer, part = name.split(".", 3)
        part, suffix = part.rsplit(".", 1)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            value = _interleaved(value, HEADS if "q_proj" in part else KV_HEADS)
        name = f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"
    else:
        name = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[
            name.removeprefix("model.").removesuffix(".weight")
        ] + ".weight"
    if value.ndim == 2 and kind != Kind.F32:
        writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, value)


def _interleaved(value: NDArray[Any], heads: int) -> NDArray[Any]:
    """The converter's permutation of rotary halves to pairs (LlamaModel.permute)."""
    return (
        value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        .swapaxes(1, 2)
        .reshape(value.shape)
    )
