"""A checkpoint made ready to run: fused projections in the forms that the precision asks for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cloud.engine.precision import (
    BiasedLinear,
    CrossingLinear,
    DenseLinear,
    Linear,
    PackedLinear,
    crossings,
    repack_int4,
)
from shared.nn.checkpoint import Checkpoint
from shared.nn.llama import LlamaConfig, rope_table

Precision = Literal["fast", "bf16", "fp32", "exact"]
"""fast: the quickest form per step · bf16, fp32: that one · exact: fp32, bit-identical always."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer."""

    attention_norm: torch.Tensor
    qkv: Linear  # hidden → (heads + 2 kv_heads) * head_dim
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear  # hidden → 2 * intermediate
    down: Linear


@dataclass(frozen=True, slots=True)
class Model:
    """What a runner runs."""

    config: LlamaConfig
    embedding: torch.Tensor  # (vocabulary, hidden)
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Linear
    cos: torch.Tensor  # (context, head_dim / 2)
    sin: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.embedding.device


_PARTS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


def build_model(
    checkpoint: Checkpoint, precision: Precision, device: torch.device, context: int
) -> Model:
    """Make the forms of every projection; on the CPU, `fast` measures where they cross.

    Args:
        context: positions to prepare rotary angles for.
    """
    config = checkpoint.config
    embedding = checkpoint.dense("embedding").to(device)
    has_head = "head" in checkpoint.weights
    head_weight = checkpoint.dense("head").to(device) if has_head else embedding
    forms = {
        part: [_forms(checkpoint, i, names, precision, device) for i in range(config.layers)]
        for part, names in _PARTS.items()
    }
    head_forms = _head_forms(head_weight, precision)
    bounds: tuple[int, ...] = ()
    head_bounds: tuple[int, ...] = ()
    if precision == "fast" and device.type == "cpu":
        bounds = crossings(forms["gate_up"][:8], config.hidden)
        head_bounds = crossings([head_forms], config.hidden)
    layers: list[Layer] = []
    for i in range(config.layers):
        linear = {part: _choose(forms[part][i], bounds) for part in _PARTS}
        bias = _qkv_bias(checkpoint, i, device)
        if bias is not None:
            linear["qkv"] = BiasedLinear(linear["qkv"], bias)
        norms = (
            checkpoint.dense(f"layers.{i}.{n}").to(device) for n in ("attention_norm", "mlp_norm")
        )
        attention_norm, mlp_norm = norms
        layers.append(Layer(attention_norm, mlp_norm=mlp_norm, **linear))
    cos, sin = (t.to(device) for t in rope_table(config, context))
    norm = checkpoint.dense("norm").to(device)
    head = _choose(head_forms, head_bounds)
    return Model(config, embedding, tuple(layers), norm, head, cos, sin)


def _forms(
    checkpoint: Checkpoint,
    layer: int,
    names: Sequence[str],
    precision: Precision,
    device: torch.device,
) -> list[Linear]:
    weights = [checkpoint.weights[f"layers.{layer}.{name}"] for name in names]
    dense = torch.cat([w.dense() for w in weights]).to(device)
    if device.type != "cpu":
        kind = torch.float32 if precision in ("fp32", "exact") else torch.bfloat16
        return [DenseLinear(dense.to(kind))]
    match precision:
        case "exact":
            return [DenseLinear(dense)]
        case "fp32":
            return [PackedLinear.pack(dense)]
        case "bf16":
            return [DenseLinear(dense.bfloat16())]
        case "fast":
            narrow = repack_int4(weights) or DenseLinear(dense.bfloat16())
            return [narrow, PackedLinear.pack(dense)]


def _head_forms(weight: torch.Tensor, precision: Precision) -> list[Linear]:
    if weight.device.type != "cpu" or precision in ("exact", "bf16"):
        kind = torch.float32 if precision in ("fp32", "exact") else torch.bfloat16
        return [DenseLinear(weight.to(kind))]
    packed = PackedLinear.pack(weight)
    return [packed] if precision == "fp32" else [DenseLinear(weight.bfloat16()), packed]


def _choose(forms: list[Linear], bounds: tuple[int, ...]) -> Linear:
    if len(forms) == 1 or not bounds:
        return forms[-1]
    return CrossingLinear(tuple(forms), bounds)


def _qkv_bias(checkpoint: Checkpoint, layer: int, device: torch.device) -> torch.Tensor | None:
    names = [f"layers.{layer}.{part}.bias" for part in ("q", "k", "v")]
    if names[0] not in checkpoint.weights:
        return None
    return torch.cat([checkpoint.dense(name) for name in names]).to(device)
