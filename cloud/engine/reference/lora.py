"""Adapters in plain torch: y + B (A x) for the rows of sequences that have one."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cloud.engine.batch import Batch
from shared.adapter import Adapter
from shared.nn.llama import LlamaConfig

INPUTS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""The matrices of a layer, and the projections that lie side by side in each."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to some channels of a matrix."""

    channel: int
    """The first of them."""
    a: torch.Tensor  # (rank, in)
    b: torch.Tensor  # (channels, rank), times the scale


@dataclass(frozen=True, slots=True, eq=False)
class TorchAdapter:
    """An adapter on one device."""

    digest: str
    rank: int
    num_bytes: int
    matrices: dict[tuple[int, str], list[LowRank]]
    """By layer and matrix."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """Rows of a batch that have one adapter."""

    adapter: TorchAdapter
    rows: torch.Tensor  # (rows,)


def load_adapter(adapter: Adapter, config: LlamaConfig, device: torch.device) -> TorchAdapter:
    """Put an adapter that fits the model on the device, as float32."""
    shapes = config.shapes()
    matrices: dict[tuple[int, str], list[LowRank]] = {}
    for layer in range(config.layers):
        for matrix, parts in INPUTS.items():
            channel = 0
            for part in parts:
                name = f"layers.{layer}.{part}"
                if (pair := adapter.pairs.get(name)) is not None:
                    a, b = (torch.from_numpy(side).to(device) for side in (pair.a, pair.b))
                    low = LowRank(channel, a, b * pair.scale)
                    matrices.setdefault((layer, matrix), []).append(low)
                channel += shapes[name][0]
    size = sum(pair.a.nbytes + pair.b.nbytes for pair in adapter.pairs.values())
    return TorchAdapter(adapter.digest, adapter.rank, size, matrices)


def adapted_rows(batch: Batch, device: torch.device) -> list[Adapted]:
    """Return which rows of a batch have which adapter."""
    rows: dict[TorchAdapter, list[int]] = {}
    row = 0
    for chunk in batch.chunks:
        adapter = chunk.sequence.adapter
        if adapter is not None:
            assert isinstance(adapter, TorchAdapter), "it was not loaded here"
            rows.setdefault(adapter, []).extend(range(row, row + chunk.count))
        row += chunk.count
    return [Adapted(adapter, torch.tensor(which, device=device)) for adapter, which in rows.items()]


def add_adapters(
    y: torch.Tensor, x: torch.Tensor, adapted: Iterable[Adapted], layer: int, matrix: str
) -> torch.Tensor:
    """Add to y (rows, out), in place, what adapters make of x (rows, in)."""
    for some in adapted:
        for low in some.adapter.matrices.get((layer, matrix), ()):
            columns = y[:, low.channel : low.channel + len(low.b)]
            columns.index_add_(0, some.rows, x[some.rows] @ low.a.T @ low.b.T)
    return y
