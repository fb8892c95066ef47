"""Attention in plain torch, span by span: the naive twin of every other kernel, and the one for GPUs."""

import torch
import torch.nn.functional as nnf

from cloud.engine.cache import BLOCK, KVCache
from cloud.engine.plan import Plan, Span


def attend(layer: int, q: torch.Tensor, cache: KVCache, plan: Plan) -> torch.Tensor:
    """Attend every span."""
    out = torch.empty_like(q)
    for number, span in enumerate(plan.spans):
        attend_span(layer, q, cache, plan, (number, span), out)
    return out.flatten(1)


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
    blocks = plan.tables[number, : -(-span.context // BLOCK)].long()
    keys, values = (
        part[layer][blocks].flatten(0, 1)[: span.context].to(q.dtype).transpose(0, 1)
        for part in (cache.keys, cache.values)
    )  # (kv_heads, context, head_dim)
    rows = slice(span.row, span.row + span.count)
    mask = None
    if span.count > 1:
        seen = torch.arange(span.context, device=q.device)
        mask = seen < plan.row_context[rows].unsqueeze(1)
    attended = nnf.scaled_dot_product_attention(
        q[rows].transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        enable_gqa=True,
    )
    out[rows] = attended.squeeze(0).transpose(0, 1)
