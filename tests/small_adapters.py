"""Random LoRA adapters for the small Llama, as PEFT writes them."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shared.adapter import MODULES, Adapter, LoraPair
from shared.nn.weights import Checkpoint, Weight
from shared.peft_folder import CONFIG, write_adapter
from tests.small_llama import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS

_KV = KV_HEADS * HEAD_DIM
SHAPES = {
    "q": (HEADS * HEAD_DIM, HIDDEN),
    "k": (_KV, HIDDEN),
    "v": (_KV, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate": (INTERMEDIATE, HIDDEN),
    "up": (INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
"""(out, in) of every projection."""


def random_adapter(
    seed: int,
    *,
    rank: int = 4,
    parts: Iterable[str] = tuple(MODULES),
    layers: Iterable[int] = range(LAYERS),
    scale: float = 0.5,
) -> Adapter:
    """Return an adapter that changes what the small model says."""
    rng = np.random.default_rng(seed)

    def pair(part: str) -> LoraPair:
        out, inner = SHAPES[part]
        a = rng.standard_normal((rank, inner)) * 0.3
        b = rng.standard_normal((out, rank)) * 0.3
        return LoraPair(a.astype(np.float32), b.astype(np.float32), scale)

    return Adapter({f"layers.{i}.{part}": pair(part) for i in layers for part in parts})


def adapter_folder(folder: Path, seed: int, **options: Any) -> Path:
    """Write a random adapter."""
    write_adapter(folder, random_adapter(seed, **options))
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change settings in adapter_config.json."""
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def merged(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """Return the model with W + scale B A in place of W, as float32."""
    weights: dict[str, Weight] = dict(checkpoint.weights)
    for name, pair in adapter.pairs.items():
        change = pair.scale * (pair.b.astype(np.float64) @ pair.a.astype(np.float64))
        dense = (checkpoint.dense(name).numpy() + change).astype(np.float32)
        weights[name] = Weight("F32", dense, dense.shape)
    return replace(checkpoint, weights=weights)
