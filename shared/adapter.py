"""What a LoRA adapter is. No torch, no I/O; `peft_folder` reads and writes it.

LoRA (Hu et al., arXiv:2106.09685): y = W x + scale * B (A x).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelError

Floats = NDArray[np.float32]

MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""The projections of a layer, by our names: those of Hugging Face's modules."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """The two matrices of one projection: y += scale * b (a x)."""

    a: Floats  # (rank, in)
    b: Floats  # (out, rank)
    scale: float
    """A float32 number."""

    @property
    def rank(self) -> int:
        """Width between the two."""
        return len(self.a)


@dataclass(frozen=True, eq=False)
class Adapter:
    """Low-rank changes to the projections of a Llama."""

    pairs: Mapping[str, LoraPair]
    """By names of weights as in `Checkpoint`: `layers.{i}.{q, k, v, o, gate, up or down}`."""
    source: str = "adapter"
    """Where it was read from, for messages."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that changes a result: names, scales and values, as float32."""
        total = hashlib.sha256()
        for name, pair in sorted(self.pairs.items()):
            shape = f"{pair.a.shape[1]} {pair.rank} {len(pair.b)}"
            total.update(f"{name} {shape} {pair.scale.hex()}\n".encode())
            for part in (pair.a, pair.b):
                total.update(np.ascontiguousarray(part, "<f4").tobytes())
        return total.hexdigest()

    @property
    def rank(self) -> int:
        """The largest rank of a projection."""
        return max(pair.rank for pair in self.pairs.values())

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check it against the shapes (out, in) of a model's weights (`LlamaConfig.shapes`).

        Raises:
            ModelError: it adapts a layer that the model has not, or one of another size.
        """
        for name, pair in self.pairs.items():
            if name not in shapes:
                layers = sum(key.endswith(".q") for key in shapes)
                raise ModelError(
                    f"{self.source}: {module_of(name)} is adapted; the model has layers "
                    f"0..{layers - 1}: the adapter is of another model"
                )
            found = len(pair.b), pair.a.shape[1]
            if found != shapes[name]:
                raise ModelError(
                    f"{self.source}: lora_B lora_A of {module_of(name)} is (out, in) {found}; the "
                    f"model's weight is {shapes[name]}: the adapter is of another model"
                )


def module_of(name: str) -> str:
    """`layers.3.q` → `model.layers.3.self_attn.q_proj`."""
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{MODULES[part]}"
