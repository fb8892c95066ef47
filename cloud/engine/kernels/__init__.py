"""Attention over the paged cache: one reference in torch, one compiled for the CPU."""

from typing import Protocol

import torch

from cloud.engine.cache import KVCache
from cloud.engine.plan import Plan


class Attention(Protocol):
    """q (rows, heads, head_dim) float32 → (rows, heads * head_dim) float32, causal, grouped heads."""

    def __call__(self, layer: int, q: torch.Tensor, cache: KVCache, plan: Plan) -> torch.Tensor: ...
