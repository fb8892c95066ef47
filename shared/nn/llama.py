"""The Llama architecture in plain torch: configuration, rotary angles, differentiable forward pass.

The forward pass here is the naive one: whole sequences, no cache. Trainers differentiate it; the
engine's paged, batched pass is tested against it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    `linear`, `llama3` (Llama 3.1's, by wavelength), or `factors` (a divisor for each rotary pair).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama model."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight that must be there (biases and a head are optional)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocabulary, self.hidden),
            "norm": (self.hidden,),
        }
        parts = {
            "attention_norm": (self.hidden,),
            "mlp_norm": (self.hidden,),
            "q": (q, self.hidden),
            "k": (kv, self.hidden),
            "v": (kv, self.hidden),
            "o": (self.hidden, q),
            "gate": (self.intermediate, self.hidden),
            "up": (self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }
        for i in range(self.layers):
            shapes |= {f"layers.{i}.{part}": shape for part, shape in parts.items()}
        return shapes


def rope_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Return the angle per position of each rotary pair: (head_dim / 2,), float32.

    `llama3` is the rule of Hugging Face's modeling_rope_utils.py.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors)
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_context / scaling.low_freq_factor
    high = scaling.original_context / scaling.high_freq_factor
    smooth = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > low, frequencies / scaling.factor, between)
    return torch.where(wavelengths < high, frequencies, scaled)


def rope_table(config: LlamaConfig, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of positions below `positions`: each (positions, head_dim / 2)."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), rope_frequencies(config))
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs (i, i + half) of `x` (rows, heads, 2 half) by `cos`, `sin` (rows, half)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def forward(
    config: LlamaConfig, weights: Mapping[str, torch.Tensor], tokens: torch.Tensor
) -> torch.Tensor:
    """Return the logits after every token of one sequence.

    Args:
        weights: every weight, dense; names as in `Checkpoint`.
        tokens: (length,) int64.

    Returns:
        (length, vocabulary)
    """
    length = len(tokens)
    cos, sin = rope_table(config, length)
    x = weights["embedding"][tokens]  # (length, hidden)
    for i in range(config.layers):
        layer = f"layers.{i}."
        h = _norm(x, weights[layer + "attention_norm"], config)
        q = _linear(h, weights, layer + "q").view(length, config.heads, config.head_dim)
        k = _linear(h, weights, layer + "k").view(length, config.kv_heads, config.head_dim)
        v = _linear(h, weights, layer + "v").view(length, config.kv_heads, config.head_dim)
        attended = nnf.scaled_dot_product_attention(
            rotate(q, cos, sin).transpose(0, 1),
            rotate(k, cos, sin).transpose(0, 1),
            v.transpose(0, 1),
            is_causal=True,
            enable_gqa=True,
        )
        x = x + _linear(attended.transpose(0, 1).reshape(length, -1), weights, layer + "o")
        h = _norm(x, weights[layer + "mlp_norm"], config)
        gate = nnf.silu(_linear(h, weights, layer + "gate"))
        x = x + _linear(gate * _linear(h, weights, layer + "up"), weights, layer + "down")
    head = weights.get("head", weights["embedding"])
    return nnf.linear(_norm(x, weights["norm"], config), head)


def _norm(x: torch.Tensor, weight: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    return nnf.rms_norm(x, (config.hidden,), weight, config.norm_eps)


def _linear(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    return nnf.linear(x, weights[name], weights.get(name + ".bias"))
