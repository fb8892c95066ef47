"""A batch laid out flat: which row is which token of which sequence, and where its keys live."""

from dataclasses import dataclass

import torch

from cloud.engine.batch import Batch
from cloud.engine.cache import BLOCK


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `row..row + count` are the last `count` of `context` tokens of one sequence."""

    row: int
    count: int
    context: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's rows. All tensors are on the model's device."""

    tokens: torch.Tensor  # (rows,)
    cos: torch.Tensor  # (rows, head_dim / 2)
    sin: torch.Tensor
    slots: torch.Tensor  # (rows,) where each row's key and value go
    tables: torch.Tensor  # (spans, most blocks of a span) int32, padded with 0
    masks: tuple[torch.Tensor | None, ...]  # per span (count, context): keys each row may see
    spans: tuple[Span, ...]
    sampled: torch.Tensor  # (sampled,) the rows that logits are wanted of


def plan_batch(batch: Batch, cos: torch.Tensor, sin: torch.Tensor) -> Plan:
    """Lay out the chunks of a batch; `cos`, `sin`: (positions, head_dim / 2) of the model."""
    device = cos.device
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled: list[int] = []
    spans: list[Span] = []
    for chunk in batch.chunks:
        end = chunk.start + chunk.count
        blocks = chunk.sequence.blocks
        spans.append(Span(len(tokens), chunk.count, end))
        tokens += chunk.sequence.ids[chunk.start : end]
        positions += range(chunk.start, end)
        slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(chunk.start, end)]
        sampled += range(len(tokens) - chunk.num_logits, len(tokens))
    width = max(-(-span.context // BLOCK) for span in spans)
    tables = [(c.sequence.blocks[:width] + [0] * width)[:width] for c in batch.chunks]
    where = torch.tensor(positions, device=device)
    return Plan(
        torch.tensor(tokens, device=device),
        cos[where],
        sin[where],
        torch.tensor(slots, device=device),
        torch.tensor(tables, dtype=torch.int32, device=device),
        tuple(_mask(span, device) for span in spans),
        tuple(spans),
        torch.tensor(sampled, dtype=torch.int64, device=device),
    )


def _mask(span: Span, device: torch.device) -> torch.Tensor | None:
    if span.count == 1:
        return None  # the last token sees everything
    last = torch.arange(span.context - span.count, span.context, device=device)
    return torch.arange(span.context, device=device) <= last.unsqueeze(1)
