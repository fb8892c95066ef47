"""A model in memory: weights in the form they are stored in, and what belongs to them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from shared.digest import sha256, sha256_file
from shared.nn.llama import LlamaConfig


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor as stored, read-only and mostly still in its mapped file.

    `data` is float32 or float16, or the raw bytes of its rows (`kind` says which).
    """

    kind: str
    """GGML's name of the type: F32, F16, BF16, Q4_0, Q4_1, Q8_0, ..."""
    data: NDArray[Any]  # (rows, bytes or values per row)
    shape: tuple[int, ...]

    def dense(self) -> torch.Tensor:
        """Return the values as float32, in memory of their own."""
        if self.kind == "F32":
            return torch.from_numpy(np.array(self.data, dtype=np.float32)).view(self.shape)
        kind = gguf.GGMLQuantizationType[self.kind]
        return torch.from_numpy(gguf.dequantize(self.data, kind)).view(self.shape)

    def rows(self, order: NDArray[np.int64]) -> "Weight":
        """Return the same weight with its rows reordered."""
        return Weight(self.kind, self.data[order], self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A model as read from disk.

    Names of weights: `embedding`, `norm`, `head`, `layers.{i}.{part}[.bias]`; no head means that it
    is the embedding.
    """

    path: Path
    name: str
    config: LlamaConfig
    weights: Mapping[str, Weight]
    tokenizer: bytes
    """The tokenizer blob (`shared.tokenizer`)."""
    template: str
    """The chat template (jinja2), empty if the model has none."""
    stop_ids: frozenset[int]
    """Ids that end a reply."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights' file (of all of them in a folder, by name)."""
        if self.path.is_file():
            return sha256_file(self.path)
        parts = sorted(self.path.glob("*.safetensors"))
        return sha256("\n".join(f"{p.name} {sha256_file(p)}" for p in parts).encode())

    def dense(self, name: str) -> torch.Tensor:
        """Return one weight as float32."""
        return self.weights[name].dense()
