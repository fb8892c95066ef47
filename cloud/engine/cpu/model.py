"""A checkpoint laid out for the step program."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import gguf
import numpy as np

from cloud.engine.cpu.job import PARTS, Sizes, Weights
from cloud.engine.cpu.simd import GROUP, TILE
from cloud.engine.cpu.tiles import Form, form_of, pack, tile_bytes
from shared.nn.checkpoint import Checkpoint
from shared.nn.llama import rope_table
from shared.nn.weights import Weight

_FLOATS = ("F32", "F16", "BF16")
Quantize = Literal["", "int8", "int4"]
_LINE = 64
"""Matrices begin at whole cache lines."""


@dataclass(frozen=True, slots=True)
class CpuModel:
    """What the step program needs of a model."""

    sizes: Sizes
    weights: Weights


def pack_model(
    checkpoint: Checkpoint, context: int, wanted: Form | None = None, quantize: Quantize = ""
) -> CpuModel:
    """Lay all weights out.

    Args:
        context: positions to prepare rotary angles for.
        wanted: as for `tiles.form_of`.
        quantize: round matrices of floats to codes first.
    """
    config = checkpoint.config
    matrices = [_quantized(weight, quantize) for weight in _matrices(checkpoint)]
    forms = [form_of(weight, wanted) for weight in matrices]
    places, size = [], 0
    for weight, form in zip(matrices, forms, strict=True):
        places.append(size)
        length = -(-weight.shape[0] // TILE) * tile_bytes(form, weight.shape[1])
        size += -(-length // _LINE) * _LINE
    room = np.empty(size + _LINE, np.uint8)
    data = room[-room.ctypes.data % _LINE :][:size]
    where = np.empty((len(matrices), 3), np.int64)
    for number, (weight, form, at) in enumerate(zip(matrices, forms, places, strict=True)):
        tiles = pack(weight, form)
        data[at : at + tiles.size] = tiles.reshape(-1)
        where[number] = form, at, tiles.shape[1]
    parts = len(PARTS)
    ends = where[config.layers * parts :]
    cos, sin = rope_table(config, context)
    weights = Weights(
        data,
        where[: config.layers * parts].reshape(config.layers, parts, 3),
        ends if len(ends) == 2 else np.repeat(ends, 2, axis=0),
        _norms(checkpoint),
        _biases(checkpoint),
        np.cumsum([0, *(weight.shape[0] for weight in matrices[:parts])]),
        cos.numpy(),
        sin.numpy(),
    )
    sizes = Sizes(
        config.layers,
        config.hidden,
        config.intermediate,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.vocabulary,
        config.norm_eps,
        any(form in (Form.INT4, Form.INT8) for form in forms),
    )
    return CpuModel(sizes, weights)


def _quantized(weight: Weight, quantize: Quantize) -> Weight:
    """Round floats to Q8_0 or Q4_1 blocks (ggml-quants.c); codes stay as they are."""
    if not quantize or weight.kind not in _FLOATS or weight.shape[1] % GROUP:
        return weight
    kind = {"int8": gguf.GGMLQuantizationType.Q8_0, "int4": gguf.GGMLQuantizationType.Q4_1}[
        quantize
    ]
    return Weight(kind.name, gguf.quantize(weight.dense().numpy(), kind), weight.shape)


def _matrices(checkpoint: Checkpoint) -> Iterator[Weight]:
    """Yield the matrices of every layer, then embedding and, if it is another one, head."""
    for layer in range(checkpoint.config.layers):
        for part in PARTS:
            yield checkpoint.weights[f"layers.{layer}.{part}"]
    yield checkpoint.weights["embedding"]
    if "head" in checkpoint.weights:
        yield checkpoint.weights["head"]


def _norms(checkpoint: Checkpoint) -> np.ndarray:
    names = [
        f"layers.{i}.{norm}"
        for i in range(checkpoint.config.layers)
        for norm in ("attention_norm", "mlp_norm")
    ]
    return np.stack([checkpoint.dense(name).numpy() for name in (*names, "norm")])


def _biases(checkpoint: Checkpoint) -> np.ndarray:
    names = [[f"layers.{i}.{part}" for part in PARTS] for i in range(checkpoint.config.layers)]
    if not any(f"{name}.bias" in checkpoint.weights for layer in names for name in layer):
        return np.zeros((0, 0), np.float32)
    return np.stack([np.concatenate([_bias(checkpoint, name) for name in row]) for row in names])


def _bias(checkpoint: Checkpoint, name: str) -> np.ndarray:
    if f"{name}.bias" in checkpoint.weights:
        return checkpoint.dense(f"{name}.bias").numpy()
    return np.zeros(checkpoint.weights[name].shape[0], np.float32)
