"""The KV cache: paged keys and values of all layers."""

import numpy as np
import torch
from numpy.typing import NDArray

from shared.nn.llama import LlamaConfig

BLOCK = 16
"""Tokens of a block."""


class KVCache:
    """`keys[layer]` and `values[layer]` are (blocks, BLOCK, kv_heads, head_dim)."""

    def __init__(
        self, config: LlamaConfig, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.layers, num_blocks, BLOCK, config.kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._raw: list[tuple[NDArray[np.uint16], NDArray[np.uint16]]] = []
        if dtype == torch.bfloat16 and device.type == "cpu":
            keys, values = (t.view(torch.uint16).numpy() for t in (self.keys, self.values))
            self._raw = list(zip(keys, values, strict=True))

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store rows (rows, kv_heads, head_dim) at `slots` (block * BLOCK + offset, one a row)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys.to(self.keys.dtype))
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values.to(self.values.dtype))

    def raw(self, layer: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
        """Return the bits of a layer's keys and values in a bfloat16 cache on the CPU."""
        return self._raw[layer]

    @staticmethod
    def bytes_per_block(config: LlamaConfig, dtype: torch.dtype) -> int:
        """Return the bytes one block takes over all layers."""
        return 2 * config.layers * BLOCK * config.kv_heads * config.head_dim * dtype.itemsize
