"""Kernels compiled for the CPU: few passes over small tensors, keys read where they lie.

Attention of single rows (replies) loops over (row, KV head), folds the query heads of a group, and
keeps a running softmax (Milakov & Gimelshein, arXiv:1805.02867) in float32. Longer spans are matrix
products and go to torch. The cache is bfloat16, which is the upper half of a float32: widening is a
shift, narrowing rounds to nearest even.
"""

import numba
import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray

from cloud.engine.cache import KVCache
from cloud.engine.plan import Plan, Span

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]

SHORT = 2
"""Rows up to which a span is attended row by row."""


@numba.njit(inline="always")
def _widen(raw: np.uint16) -> np.float32:
    return np.uint32(np.uint32(raw) << np.uint32(16)).view(np.float32)


@numba.njit(inline="always")
def _narrow(value: np.float32) -> np.uint16:
    bits = np.uint32(np.float32(value).view(np.uint32))
    odd = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@numba.njit(inline="always")
def _exp(x: np.float32) -> np.float32:
    """e^x for x <= 0 in float32, to about 2 ulp (Cody-Waite reduction, Taylor to degree 6)."""
    x = max(np.float32(x), np.float32(-87.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return p * np.uint32(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23)).view(np.float32)


@numba.njit(fastmath=True, nogil=True, cache=True)
def _norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    rows, hidden = x.shape
    for row in range(rows):
        total = np.float32(0.0)
        for i in range(hidden):
            total += x[row, i] * x[row, i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(hidden) + np.float32(eps))
        for i in range(hidden):
            out[row, i] = x[row, i] * scale * weight[i]


@numba.njit(fastmath=True, nogil=True, cache=True)
def _gate(gate_up: Floats, out: Floats) -> None:
    rows, inner = out.shape
    for row in range(rows):
        for i in range(inner):
            g = gate_up[row, i]
            e = _exp(-abs(g))
            sigmoid = np.float32(1.0) / (np.float32(1.0) + e)
            if g < 0:
                sigmoid = e * sigmoid
            out[row, i] = g * sigmoid * gate_up[row, inner + i]


@numba.njit(fastmath=True, nogil=True, cache=True)
def _store(
    qkv: Floats,
    cos: Floats,
    sin: Floats,
    slots: NDArray[np.int64],
    keys: Bits,
    values: Bits,
    out: Floats,
) -> None:
    rows, heads, dim = out.shape
    kv_heads, half = keys.shape[2], dim // 2
    block = keys.shape[1]
    for row in range(rows):
        where, offset = slots[row] // block, slots[row] % block
        for head in range(heads + kv_heads):
            at = head * dim
            for i in range(half):
                a, b = qkv[row, at + i], qkv[row, at + half + i]
                low = a * cos[row, i] - b * sin[row, i]
                high = b * cos[row, i] + a * sin[row, i]
                if head < heads:
                    out[row, head, i], out[row, head, half + i] = low, high
                else:
                    keys[where, offset, head - heads, i] = _narrow(low)
                    keys[where, offset, head - heads, half + i] = _narrow(high)
        for head in range(kv_heads):
            at = (heads + kv_heads + head) * dim
            for i in range(dim):
                values[where, offset, head, i] = _narrow(qkv[row, at + i])


@numba.njit(fastmath=True, nogil=True, cache=True)
def _attend(
    q: Floats,
    keys: Bits,
    values: Bits,
    tables: NDArray[np.int32],
    row_span: NDArray[np.int32],
    row_context: NDArray[np.int32],
    short: NDArray[np.bool_],
    out: Floats,
) -> None:
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
                most[g], mass[g] = np.float32(-1e30), np.float32(0.0)
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
                    top = most[g]
                    for p in range(count):
                        dot = np.float32(0.0)
                        for i in range(dim):
                            dot += query[g, i] * wide[p, i]
                        score[g, p] = dot
                        top = max(top, dot)
                    shrink = _exp(most[g] - top)
                    most[g] = top
                    added = np.float32(0.0)
                    for p in range(count):
                        score[g, p] = _exp(score[g, p] - top)
                        added += score[g, p]
                    mass[g] = mass[g] * shrink + added
                    for i in range(dim):
                        total[g, i] *= shrink
                for p in range(count):
                    for i in range(dim):
                        wide[p, i] = _widen(values[here, p, head, i])
                for g in range(group):
                    for p in range(count):
                        for i in range(dim):
                            total[g, i] += score[g, p] * wide[p, i]
            for g in range(group):
                for i in range(dim):
                    out[row, head * group + g, i] = total[g, i] / mass[g]


@numba.njit(fastmath=True, nogil=True, cache=True)
def _gather(part: Bits, table: NDArray[np.int32], context: int, out: Floats) -> None:
    """Widen the blocks of one sequence into out (kv_heads, context, head_dim)."""
    block, kv_heads, dim = part.shape[1], part.shape[2], part.shape[3]
    for p in range(context):
        here, offset = table[p // block], p % block
        for head in range(kv_heads):
            for i in range(dim):
                out[head, p, i] = _widen(part[here, offset, head, i])


class CompiledKernels:
    """On the CPU, with a bfloat16 cache."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm of every row."""
        out = torch.empty_like(x)
        _norm(x.numpy(), weight.numpy(), eps, out.numpy())
        return out

    def store(
        self, layer: int, qkv: torch.Tensor, heads: int, cache: KVCache, plan: Plan
    ) -> torch.Tensor:
        """Turn queries and keys by their positions; put keys and values into the cache."""
        out = torch.empty(len(qkv), heads, cache.keys.shape[4])
        keys, values = cache.raw(layer)
        _store(
            qkv.numpy(),
            plan.cos.numpy(),
            plan.sin.numpy(),
            plan.slots.numpy(),
            keys,
            values,
            out.numpy(),
        )
        return out

    def attend(self, layer: int, q: torch.Tensor, cache: KVCache, plan: Plan) -> torch.Tensor:
        """Attend single rows here, longer spans as matrix products."""
        out = torch.empty_like(q)
        short = np.ones(len(q), np.bool_)
        for numbered in enumerate(plan.spans):
            span = numbered[1]
            if span.count > SHORT:
                short[span.row : span.row + span.count] = False
                self._attend_span(cache.raw(layer), q, plan, numbered, out)
        if short.any():
            keys, values = cache.raw(layer)
            _attend(
                q.numpy(),
                keys,
                values,
                plan.tables.numpy(),
                plan.row_span.numpy(),
                plan.row_context.numpy(),
                short,
                out.numpy(),
            )
        return out.flatten(1)

    def _attend_span(
        self,
        raw: tuple[Bits, Bits],
        q: torch.Tensor,
        plan: Plan,
        numbered: tuple[int, Span],
        out: torch.Tensor,
    ) -> None:
        """Attend the rows of one span, the query heads of a group folded into rows."""
        number, span = numbered
        kv_heads, dim = raw[0].shape[2:]
        group = q.shape[1] // kv_heads
        keys, values = (torch.empty(1, kv_heads, span.context, dim) for _ in range(2))
        for part, wide in zip(raw, (keys, values), strict=True):
            _gather(part, plan.tables[number].numpy(), span.context, wide[0].numpy())
        rows = slice(span.row, span.row + span.count)
        folded = q[rows].view(span.count, kv_heads, group, dim).permute(1, 0, 2, 3)
        mask = plan.masks[number]
        attended = nnf.scaled_dot_product_attention(
            folded.reshape(1, kv_heads, span.count * group, dim),
            keys,
            values,
            attn_mask=None if mask is None else mask.repeat_interleave(group, 0),
        )
        unfolded = attended.view(kv_heads, span.count, group, dim).permute(1, 0, 2, 3)
        out[rows] = unfolded.reshape(span.count, -1, dim)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SwiGLU."""
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        _gate(gate_up.numpy(), out.numpy())
        return out
