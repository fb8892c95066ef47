"""What a layer computes besides its matrix products."""

import torch
import torch.nn.functional as nnf

from cloud.engine.cache import BLOCK, KVCache
from cloud.engine.reference.plan import Plan
from shared.nn.llama import rotate


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of every row: (rows, hidden) → (rows, hidden)."""
    return nnf.rms_norm(x, weight.shape, weight, eps)


def store(
    layer: int, qkv: torch.Tensor, heads: int, kv_heads: int, cache: KVCache, plan: Plan
) -> torch.Tensor:
    """Turn queries and keys by their positions; put keys and values into the cache.

    qkv (rows, (heads + 2 kv_heads) * head_dim) → queries (rows, heads, head_dim).
    """
    rows = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    q, k, v = torch.split(rows, [heads, kv_heads, kv_heads], dim=1)
    cache.write(layer, plan.slots, rotate(k, plan.cos, plan.sin), v)
    return rotate(q, plan.cos, plan.sin)


def attend(layer: int, q: torch.Tensor, cache: KVCache, plan: Plan) -> torch.Tensor:
    """Causal attention, grouped heads: (rows, heads, head_dim) → (rows, heads * head_dim)."""
    out = torch.empty_like(q)
    for number, span in enumerate(plan.spans):
        blocks = plan.tables[number, : -(-span.context // BLOCK)]
        keys, values = (
            part.to(q.dtype).unsqueeze(0)
            for part in cache.read(layer, blocks, span.context, q.shape[2])
        )  # (1, kv_heads, context, head_dim)
        rows = slice(span.row, span.row + span.count)
        attended = nnf.scaled_dot_product_attention(
            q[rows].transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=plan.masks[number],
            enable_gqa=True,
        )
        out[rows] = attended.squeeze(0).transpose(0, 1)
    return out.flatten(1)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU: (rows, 2 * intermediate) → (rows, intermediate)."""
    left, right = gate_up.chunk(2, dim=-1)
    return nnf.silu(left) * right
