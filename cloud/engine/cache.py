"""The KV cache: paged keys and values of all layers."""

import math
from collections.abc import Iterator

import torch

from shared.nn.llama import LlamaConfig

BLOCK = 16
"""Tokens of a block."""
LANES = 16
"""The values of a head are padded with zeros to a multiple of so many."""


class KVCache:
    """Keys are (layers, blocks, kv_heads, width, BLOCK), values (..., BLOCK, width).

    Keys of a block lie value by value, so that the scores of its 16 tokens are one vector. In an
    int8 cache every key and value of a head has a scale: (layers, blocks, kv_heads, BLOCK).
    """

    def __init__(
        self, config: LlamaConfig, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.layers, num_blocks, config.kv_heads)
        self.width = padded(config.head_dim)
        self.keys = torch.zeros(*shape, self.width, BLOCK, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, BLOCK, self.width, dtype=dtype, device=device)
        scaled = num_blocks if dtype == torch.int8 else 0
        scales = (config.layers, scaled, config.kv_heads, BLOCK)
        self.key_scales, self.value_scales = (torch.zeros(scales, device=device) for _ in range(2))

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store rows (rows, kv_heads, head_dim) at `slots` (block * BLOCK + offset, one a row)."""
        blocks, offsets = slots // BLOCK, slots % BLOCK
        dim = keys.shape[2]
        self.keys[layer][blocks, :, :dim, offsets] = keys.to(self.keys.dtype)
        self.values[layer][blocks, :, offsets, :dim] = values.to(self.values.dtype)

    def read(
        self, layer: int, blocks: torch.Tensor, count: int, dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first `count` keys and values in `blocks`: each (kv_heads, count, dim)."""
        keys = self.keys[layer].index_select(0, blocks)  # (blocks, kv_heads, width, BLOCK)
        values = self.values[layer].index_select(0, blocks)
        return (
            keys.permute(1, 0, 3, 2).flatten(1, 2)[:, :count, :dim],
            values.transpose(0, 1).flatten(1, 2)[:, :count, :dim],
        )

    def copy(self, source: int, target: int) -> None:
        """Copy the keys and values of a block."""
        for part in self._parts:
            part[:, target].copy_(part[:, source])

    @property
    def num_blocks(self) -> int:
        """Blocks there are."""
        return self.keys.shape[1]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(math.prod(_without_blocks(part)) * part.itemsize for part in self._parts)

    def save(self, block: int, into: torch.Tensor) -> None:
        """Copy a block out, layer after layer: `into` is (block_bytes,) of uint8 on the CPU."""
        for part, raw in self._laid_out(into):
            raw.copy_(part[:, block])

    def load(self, block: int, source: torch.Tensor) -> None:
        """Copy a block in that `save` copied out of a cache like this one."""
        for part, raw in self._laid_out(source):
            part[:, block].copy_(raw)

    @property
    def _parts(self) -> list[torch.Tensor]:
        scales = [self.key_scales, self.value_scales] if self.key_scales.shape[1] else []
        return [self.keys, self.values, *scales]

    def _laid_out(self, raw: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield every part of the cache with the bytes that are a block's share of it."""
        at = 0
        for part in self._parts:
            shape = _without_blocks(part)
            end = at + math.prod(shape) * part.itemsize
            yield part, raw[at:end].view(part.dtype).view(shape)
            at = end

    @staticmethod
    def bytes_per_block(config: LlamaConfig, dtype: torch.dtype) -> int:
        """Return the bytes one block takes over all layers."""
        per_token = padded(config.head_dim) * dtype.itemsize + (4 if dtype == torch.int8 else 0)
        return 2 * config.layers * BLOCK * config.kv_heads * per_token


def _without_blocks(part: torch.Tensor) -> tuple[int, ...]:
    return (part.shape[0], *part.shape[2:])


def padded(head_dim: int) -> int:
    """Return the values a head takes in the cache."""
    return -(-head_dim // LANES) * LANES
