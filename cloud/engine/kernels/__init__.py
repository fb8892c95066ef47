"""What a step computes besides matrix products: one set in torch, one compiled for the CPU."""

from typing import Protocol

import torch

from cloud.engine.cache import KVCache
from cloud.engine.plan import Plan


class Kernels(Protocol):
    """The parts of a layer. All activations are float32."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm of every row: (rows, hidden) → (rows, hidden)."""
        ...

    def store(
        self, layer: int, qkv: torch.Tensor, heads: int, cache: KVCache, plan: Plan
    ) -> torch.Tensor:
        """Turn queries and keys by their positions; put keys and values into the cache.

        qkv (rows, (heads + 2 kv_heads) * head_dim) → queries (rows, heads, head_dim).
        """
        ...

    def attend(self, layer: int, q: torch.Tensor, cache: KVCache, plan: Plan) -> torch.Tensor:
        """Causal attention, grouped heads: (rows, heads, head_dim) → (rows, heads * head_dim)."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SwiGLU: (rows, 2 * intermediate) → (rows, intermediate)."""
        ...
