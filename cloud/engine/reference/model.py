"""A checkpoint as dense tensors on one device, projections that share an input side by side."""

from dataclasses import dataclass

import torch

from shared.nn.checkpoint import Checkpoint
from shared.nn.llama import LlamaConfig, rope_table


@dataclass(frozen=True, slots=True)
class Linear:
    """x (rows, in) float32 → (rows, out) float32; accumulation is float32 in every type."""

    weight: torch.Tensor  # (out, in)
    bias: torch.Tensor | None = None  # (out,) float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x.to(self.weight.dtype), self.weight).float()
        return y if self.bias is None else y + self.bias


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
    """What the reference runner runs."""

    config: LlamaConfig
    embedding: torch.Tensor  # (vocabulary, hidden) float32
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Linear
    cos: torch.Tensor  # (context, head_dim / 2)
    sin: torch.Tensor


def build_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, context: int
) -> Model:
    """Put all weights on the device, matrices as `dtype`.

    Args:
        context: positions to prepare rotary angles for.
    """

    def vector(name: str) -> torch.Tensor:
        return checkpoint.dense(name).to(device)

    def linear(layer: int, *parts: str) -> Linear:
        names = [f"layers.{layer}.{part}" for part in parts]
        weight = torch.cat([checkpoint.dense(name) for name in names]).to(device, dtype)
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in checkpoint.weights]
        if not biases:
            return Linear(weight)
        return Linear(weight, torch.cat([checkpoint.dense(name) for name in biases]).to(device))

    layers = tuple(
        Layer(
            vector(f"layers.{i}.attention_norm"),
            linear(i, "q", "k", "v"),
            linear(i, "o"),
            vector(f"layers.{i}.mlp_norm"),
            linear(i, "gate", "up"),
            linear(i, "down"),
        )
        for i in range(checkpoint.config.layers)
    )
    head = "head" if "head" in checkpoint.weights else "embedding"
    cos, sin = (table.to(device) for table in rope_table(checkpoint.config, context))
    return Model(
        checkpoint.config,
        vector("embedding"),
        layers,
        vector("norm"),
        Linear(vector(head).to(dtype)),
        cos,
        sin,
    )
