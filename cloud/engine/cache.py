"""The KV cache: paged keys and values of all layers."""

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
        for part in (self.keys, self.values, self.key_scales, self.value_scales):
            if part.shape[1]:
                part[:, target].copy_(part[:, source])

    @staticmethod
    def bytes_per_block(config: LlamaConfig, dtype: torch.dtype) -> int:
        """Return the bytes one block takes over all layers."""
        per_token = padded(config.head_dim) * dtype.itemsize + (4 if dtype == torch.int8 else 0)
        return 2 * config.layers * BLOCK * config.kv_heads * per_token


def padded(head_dim: int) -> int:
    """Return the values a head takes in the cache."""
    return -(-head_dim // LANES) * LANES
