"""Kernels in plain torch: the naive twins of the compiled ones, and those for GPUs."""

import torch
import torch.nn.functional as nnf

from cloud.engine.cache import BLOCK, KVCache
from cloud.engine.plan import Plan, Span
from shared.nn.llama import rotate


class ReferenceKernels:
    """Any device, any cache dtype."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm of every row."""
        return nnf.rms_norm(x, weight.shape, weight, eps)

    def store(
        self, layer: int, qkv: torch.Tensor, heads: int, cache: KVCache, plan: Plan
    ) -> torch.Tensor:
        """Turn queries and keys by their positions; put keys and values into the cache."""
        kv_heads, head_dim = cache.keys.shape[3:]
        rows = qkv.view(len(qkv), -1, head_dim)
        q, k, v = torch.split(rows, [heads, kv_heads, kv_heads], dim=1)
        cache.write(layer, plan.slots, rotate(k, plan.cos, plan.sin), v)
        return rotate(q, plan.cos, plan.sin)

    def attend(self, layer: int, q: torch.Tensor, cache: KVCache, plan: Plan) -> torch.Tensor:
        """Attend span by span."""
        out = torch.empty_like(q)
        for number, span in enumerate(plan.spans):
            attend_span(layer, q, cache, plan, (number, span), out)
        return out.flatten(1)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SwiGLU."""
        gate, up = gate_up.chunk(2, dim=-1)
        return nnf.silu(gate) * up


def attend_span(
    layer: int,
    q: torch.Tensor,
    cache: KVCache,
    plan: Plan,
    numbered: tuple[int, Span],
    out: torch.Tensor,
) -> None:
    """Attend the rows of one span into `out` (rows, heads, head_dim)."""
    number, span = numbered
    blocks = plan.tables[number, : -(-span.context // BLOCK)]
    keys, values = (
        part[layer]
        .index_select(0, blocks)
        .flatten(0, 1)[: span.context]
        .to(q.dtype)
        .transpose(0, 1)
        for part in (cache.keys, cache.values)
    )  # (kv_heads, context, head_dim)
    rows = slice(span.row, span.row + span.count)
    attended = nnf.scaled_dot_product_attention(
        q[rows].transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=plan.masks[number],
        enable_gqa=True,
    )
    out[rows] = attended.squeeze(0).transpose(0, 1)
