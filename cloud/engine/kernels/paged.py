"""Attention compiled for the CPU: reads keys where they lie, block by block, without gathering.

Short spans (replies, appends) go through a loop over (row, KV head) that folds the query heads of a group
and keeps a running softmax (Milakov & Gimelshein, arXiv:1805.02867) in float32. Long spans are matrix
products and go to torch. bfloat16 keys are widened bit by bit: a bfloat16 is the upper half of a float32.
"""

import numba
import numpy as np
import torch

from cloud.engine.cache import KVCache
from cloud.engine.kernels.reference import attend_span
from cloud.engine.plan import Plan

SHORT = 16
"""Rows up to which a span is short."""


@numba.njit(inline="always")
def _widen(raw):
    return np.uint32(np.uint32(raw) << np.uint32(16)).view(np.float32)


@numba.njit(fastmath=True, nogil=True, cache=True)
def _attend_rows(q, keys, values, tables, row_span, row_context, short, out):
    rows, heads, dim = q.shape
    block, kv_heads = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    scale = np.float32(1.0 / np.sqrt(dim))
    query = np.empty((group, dim), np.float32)
    wide = np.empty((block, dim), np.float32)
    score = np.empty((group, block), np.float32)
    total = np.empty((group, dim), np.float32)
    most = np.empty(group, np.float32)
    mass = np.empty(group, np.float32)
    for row in range(rows):
        if not short[row]:
            continue
        context, table = row_context[row], tables[row_span[row]]
        for head in range(kv_heads):
            for g in range(group):
                most[g], mass[g] = -np.inf, 0.0
                for i in range(dim):
                    query[g, i] = q[row, head * group + g, i] * scale
                    total[g, i] = 0.0
            for b in range((context + block - 1) // block):
                here = table[b]
                count = min(block, context - b * block)
                for p in range(count):
                    for i in range(dim):
                        wide[p, i] = _widen(keys[here, p, head, i])
                for g in range(group):
                    for p in range(count):
                        dot = np.float32(0.0)
                        for i in range(dim):
                            dot += query[g, i] * wide[p, i]
                        score[g, p] = dot
                for p in range(count):
                    for i in range(dim):
                        wide[p, i] = _widen(values[here, p, head, i])
                for g in range(group):
                    top = most[g]
                    for p in range(count):
                        top = max(top, score[g, p])
                    shrink = np.exp(most[g] - top)
                    most[g] = top
                    mass[g] *= shrink
                    for i in range(dim):
                        total[g, i] *= shrink
                    for p in range(count):
                        weight = np.exp(score[g, p] - top)
                        mass[g] += weight
                        for i in range(dim):
                            total[g, i] += weight * wide[p, i]
            for g in range(group):
                for i in range(dim):
                    out[row, head * group + g, i] = total[g, i] / mass[g]


def attend(layer: int, q: torch.Tensor, cache: KVCache, plan: Plan) -> torch.Tensor:
    """Attend every span; the cache must be bfloat16 and on the CPU."""
    out = torch.empty_like(q)
    short = np.ones(len(q), np.bool_)
    for numbered in enumerate(plan.spans):
        span = numbered[1]
        if span.count > SHORT:
            short[span.row : span.row + span.count] = False
            attend_span(layer, q, cache, plan, numbered, out)
    if short.any():
        _attend_rows(
            q.numpy(),
            _raw(cache.keys[layer]),
            _raw(cache.values[layer]),
            plan.tables.numpy(),
            plan.row_span.numpy(),
            plan.row_context.numpy(),
            short,
            out.numpy(),
        )
    return out.flatten(1)


def _raw(part: torch.Tensor) -> np.ndarray:
    return part.view(torch.int16).numpy().view(np.uint16)
