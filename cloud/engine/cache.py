"""The KV cache: paged keys and values of all layers."""

import torch

from shared.nn.llama import LlamaConfig

BLOCK = 16
"""Tokens of a block."""


class KVCache:
    """Keys and values in blocks: `keys[layer]` and `values[layer]` are (blocks, BLOCK, kv_heads, head_dim)."""

    def __init__(
        self, config: LlamaConfig, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.layers, num_blocks, BLOCK, config.kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store rows (rows, kv_heads, head_dim) at `slots` (block * BLOCK + offset, one a row)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys.to(self.keys.dtype))
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values.to(self.values.dtype))

    @staticmethod
    def bytes_per_block(config: LlamaConfig, dtype: torch.dtype) -> int:
        """Return the bytes one block takes over all layers."""
        return 2 * config.layers * BLOCK * config.kv_heads * config.head_dim * dtype.itemsize
