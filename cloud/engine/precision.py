"""Linear layers whose arithmetic is chosen per step by the number of rows.

Few rows are bound by reading weights: 4-bit codes are the fastest there. Many rows are bound by
arithmetic: float32 or bfloat16, whichever this processor multiplies faster. The crossings are
measured at start. A GGUF's Q4_1 and Q4_0 blocks are repacked into torch's int4 kernel without
touching a code: scale = d, zero = m + 8 d (Q4_0: 0), both rounded to bfloat16.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as nnf

from shared.nn.checkpoint import Weight

GROUP = 32
"""Values of one quantized block."""


class Linear(Protocol):
    """x (rows, in) float32 → (rows, out) float32."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """float32 or bfloat16 weights; accumulation is float32 in both."""

    weight: torch.Tensor  # (out, in)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nnf.linear(x.to(self.weight.dtype), self.weight).float()


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """float32 weights in oneDNN's own blocked layout."""

    packed: torch.Tensor

    @staticmethod
    def pack(weight: torch.Tensor) -> "PackedLinear":
        """Reorder `weight` (out, in)."""
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight, GROUP))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return y


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """4-bit codes, a bfloat16 scale and zero per block of 32; bfloat16 activations."""

    packed: torch.Tensor
    scales: torch.Tensor  # (in / GROUP, out, 2) bfloat16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.bfloat16(), self.packed, GROUP, self.scales
        )
        return y.float()


@dataclass(frozen=True, slots=True)
class BiasedLinear:
    """Any form, plus a bias."""

    form: Linear
    bias: torch.Tensor  # (out,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(x) + self.bias


@dataclass(frozen=True, slots=True)
class CrossingLinear:
    """Several forms of one weight: `forms[i]` serves up to `upto[i]` rows, the last the others."""

    forms: tuple[Linear, ...]
    upto: tuple[int, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        for form, bound in zip(self.forms, self.upto, strict=False):
            if rows <= bound:
                return form(x)
        return self.forms[-1](x)


def repack_int4(weights: Sequence[Weight]) -> Int4Linear | None:
    """Repack Q4_1 or Q4_0 weights, stacked by rows; None if one of them is of another kind."""
    if any(w.kind not in ("Q4_0", "Q4_1") for w in weights):
        return None
    codes, scales = zip(*(_int4_codes(w) for w in weights), strict=True)
    code = torch.from_numpy(np.concatenate(codes)).to(torch.int32)
    if code.shape[0] % 16 or code.shape[1] % GROUP:
        return None
    scale = torch.from_numpy(np.concatenate(scales)).bfloat16()  # (out, in / GROUP, 2)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(code, 1)
    return Int4Linear(packed, scale.transpose(0, 1).contiguous())


def _int4_codes(weight: Weight) -> tuple[np.ndarray, np.ndarray]:
    """Return codes (out, in) 0..15 and [scale, zero] (out, in / GROUP, 2) of GGML blocks.

    GGML, ggml-common.h: Q4_1 is half d, half m, 16 bytes; Q4_0 half d, 16 bytes. The low nibbles
    are the first 16 values, the high ones the last. Value = d q + m, or d (q - 8); torch's kernel
    computes (q - 8) scale + zero.
    """
    out, inner = weight.shape
    header = 4 if weight.kind == "Q4_1" else 2
    blocks = weight.data.reshape(out, inner // GROUP, header + 16)
    nibbles = blocks[:, :, header:]
    codes = np.concatenate((nibbles & 15, nibbles >> 4), axis=2).reshape(out, inner)
    halves = np.ascontiguousarray(blocks[:, :, :header]).view(np.float16).astype(np.float32)
    d = halves[:, :, 0]
    zero = halves[:, :, 1] + 8 * d if weight.kind == "Q4_1" else np.zeros_like(d)
    return codes, np.stack((d, zero), axis=2)


ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64)
"""Row counts at which forms are compared."""


def crossings(
    layers: Sequence[Sequence[Linear]], inner: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[int, ...]:
    """Return up to how many rows each form but the last beats all later ones.

    Args:
        layers: the forms of the same part in several layers, together larger than the processor's
            cache, because that is how a step meets them; forms go from the fewest weight bytes to
            the most.
        inner: values in a row.
    """
    racing = range(len(layers[0]))
    best: dict[int, int] = {}
    for rows in ROWS:
        if len(racing) == 1:
            break
        x = torch.randn(rows, inner)
        times = {i: _time([forms[i] for forms in layers], x, clock) for i in racing}
        best[rows] = min(times, key=times.__getitem__)
        # a form with more weight bytes loses less with every row: who falls far behind is out
        racing = range(min(i for i in racing if times[i] < 2 * times[best[rows]]), racing.stop)
    last = len(layers[0]) - 1
    return tuple(max((rows for rows, b in best.items() if b <= i), default=0) for i in range(last))


def _time(forms: Sequence[Linear], x: torch.Tensor, clock: Callable[[], float]) -> float:
    times: list[float] = []
    for _ in range(3):
        started = clock()
        for form in forms:
            form(x)
        times.append(clock() - started)
    return min(times)
