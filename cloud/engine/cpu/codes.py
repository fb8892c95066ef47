"""Inner loops over integer codes: weights in groups of 32 k that share a scale.

A group of a tile holds 16 float16 scales (and 16 minima), then its codes:
w = code * scale + minimum, as in GGML's Q4_1, Q4_0 and Q8_0.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cloud.engine.cpu.features import FEATURES
from cloud.engine.cpu.simd import (
    FLOATS,
    GROUP,
    I8,
    I16,
    I32,
    INTEGERS,
    PAIRS,
    TILE,
    Emitter,
    all_of,
    long,
)

CODE_ROWS = 8 if FEATURES.get("avx512bw") else 4
"""Most rows of one call: a product of pairs needs a register more than one of floats."""

GROUP_BYTES = {"int4": 4 * TILE + TILE * GROUP // 2, "int8": 2 * TILE + TILE * GROUP}
"""Bytes of the 16 columns of one group."""
STEPS = GROUP // 2
_AHEAD = 2048
"""Bytes between what is multiplied and what is asked for: weights come from memory, once a step."""


class Codes:
    """The weights of one group as vectors of 16 pairs (w[k], w[k + 1]) of 16-bit integers."""

    def __init__(self, e: Emitter, form: str, group: ir.Value) -> None:
        self._e, self._form = e, form
        self._scales = e.halves(group)
        self._minima = e.halves(e.plus(group, 2 * TILE)) if form == "int4" else None
        self.codes = e.plus(group, 2 * TILE if form == "int8" else 4 * TILE)
        self.steps = STEPS // 4 if form == "int4" else STEPS

    def pairs(self, step: ir.Value) -> list[ir.Value]:
        """Return the vectors of one step: four of int4, one of int8."""
        e = self._e
        if self._form == "int8":
            raw = e.load(e.plus(self.codes, e.times(step, 2 * TILE)), I8, 2 * TILE)
            return [e.b.sext(raw, PAIRS)]
        raw = e.load(e.plus(self.codes, e.times(step, 4 * TILE)), I16, 2 * TILE)
        shifted = [e.b.lshr(raw, all_of(I16, 4 * i, 2 * TILE)) if i else raw for i in range(4)]
        low = all_of(I16, 15, 2 * TILE)
        return [e.b.and_(part, low) for part in shifted[:3]] + shifted[3:]

    def scaled(self, total: ir.Value, x_sum: ir.Value) -> ir.Value:
        """Return scale * total + minimum * x_sum."""
        if self._minima is None:
            return self._e.b.fmul(total, self._scales)
        return self._e.fma(total, self._scales, self._e.b.fmul(self._minima, x_sum))


def _make_dot_codes(form: str, *, unpacked: bool = False) -> Any:
    """Return dot(rows, x, x_at, x_stride, scales, sums, s_at, s_stride, w, w_at, groups, panel,
    out, out_at, out_stride).

    x is int16 codes with a scale for every group of 32, and the sum of its codes: the product of a
    group is an exact integer, sum of w[k] x[k], which is then scaled once.

    Args:
        unpacked: the codes are taken from `panel`, where `unpack` has put them.
    """

    @intrinsic
    def dot(
        _typing: Any,
        rows: Any,
        x: Any,
        x_at: Any,
        x_stride: Any,
        scales: Any,
        sums: Any,
        s_at: Any,
        s_stride: Any,
        w: Any,
        w_at: Any,
        groups: Any,
        panel: Any,
        out: Any,
        out_at: Any,
        out_stride: Any,
    ) -> Any:
        signature = types.void(
            rows, x, x_at, x_stride, scales, sums, s_at, s_stride, w, w_at, groups, panel,
            out, out_at, out_stride,
        )  # fmt: skip

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            e = Emitter(context, builder, signature)
            rows, _, x_at, x_stride, _, _, s_at, s_stride, _, w_at, groups, _, _, at, stride = (
                values
            )
            first_x, first_w = e.pointer(1, values, x_at), e.pointer(8, values, w_at)
            first_scale, first_sum = (e.pointer(i, values, s_at) for i in (4, 5))
            first_panel, first_out = e.pointer(11, values, long(0)), e.pointer(12, values, at)

            def emit(count: int) -> None:
                totals = e.sums(first_out, stride, count)
                row_x = [e.plus(first_x, e.times(x_stride, 2 * r)) for r in range(count)]
                row_s = [e.times(s_stride, 4 * r) for r in range(count)]
                sums = [cgutils.alloca_once(builder, INTEGERS) for _ in range(count)]
                with cgutils.for_range(builder, groups) as loop:
                    here = e.plus(first_w, e.times(loop.index, GROUP_BYTES[form]))
                    if not unpacked:
                        e.prefetch(e.plus(here, _AHEAD), GROUP_BYTES[form])
                    group = Codes(e, form, here)
                    wide = e.plus(first_panel, e.times(loop.index, 4 * TILE * STEPS))
                    xs = [e.plus(x, e.times(loop.index, 2 * GROUP)) for x in row_x]
                    for one in sums:
                        builder.store(all_of(I32, 0), one)
                    steps = STEPS if unpacked else group.steps
                    with cgutils.for_range(builder, long(steps)) as inner:
                        if unpacked:
                            where = e.plus(wide, e.times(inner.index, 4 * TILE))
                            vectors = [e.load(where, I16, 2 * TILE)]
                        else:
                            vectors = group.pairs(inner.index)
                        for number, pairs in enumerate(vectors):
                            for one, row in zip(sums, xs, strict=True):
                                step = e.times(inner.index, 4 * len(vectors))
                                where = e.plus(e.plus(row, step), 4 * number)
                                added = e.add_pairs(builder.load(one), pairs, e.splat_pair(where))
                                builder.store(added, one)
                    for r, one in enumerate(sums):
                        at = builder.add(row_s[r], e.times(loop.index, 4))
                        total = builder.sitofp(builder.load(one), FLOATS)
                        scaled = group.scaled(total, e.splat(e.plus(first_sum, at)))
                        totals.add_one(r, e.plus(first_scale, at), scaled)
                totals.store()

            e.for_each_count(rows, CODE_ROWS, emit)
            return context.get_dummy_value()

        return signature, generate

    return dot


def _make_unpack_pairs(form: str) -> Any:
    """Return unpack(w, w_at, groups, panel): the pairs of each group as int16, in order."""

    @intrinsic
    def unpack(_typing: Any, w: Any, w_at: Any, groups: Any, panel: Any) -> Any:
        signature = types.void(w, w_at, groups, panel)

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            e = Emitter(context, builder, signature)
            _, w_at, groups, _ = values
            first_w, first_out = e.pointer(0, values, w_at), e.pointer(3, values, long(0))
            with cgutils.for_range(builder, groups) as loop:
                codes = Codes(e, form, e.plus(first_w, e.times(loop.index, GROUP_BYTES[form])))
                out = e.plus(first_out, e.times(loop.index, 4 * TILE * STEPS))
                with cgutils.for_range(builder, long(codes.steps)) as inner:
                    vectors = codes.pairs(inner.index)
                    size = 4 * TILE * len(vectors)
                    for number, pairs in enumerate(vectors):
                        at = builder.add(e.times(inner.index, size), long(4 * TILE * number))
                        e.store(pairs, e.plus(out, at))
            return context.get_dummy_value()

        return signature, generate

    return unpack


def _make_decode(form: str) -> Any:
    """Return decode(w, w_at, groups, panel): float32 w[k, 16 columns], k after k."""

    @intrinsic
    def decode(_typing: Any, w: Any, w_at: Any, groups: Any, panel: Any) -> Any:
        signature = types.void(w, w_at, groups, panel)

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            e = Emitter(context, builder, signature)
            _, w_at, groups, _ = values
            first_w, first_out = e.pointer(0, values, w_at), e.pointer(3, values, long(0))
            one = ir.Constant(FLOATS, [1.0] * TILE)
            with cgutils.for_range(builder, groups) as loop:
                codes = Codes(e, form, e.plus(first_w, e.times(loop.index, GROUP_BYTES[form])))
                out = e.plus(first_out, e.times(loop.index, 4 * TILE * GROUP))
                with cgutils.for_range(builder, long(codes.steps)) as inner:
                    vectors = codes.pairs(inner.index)
                    size = 8 * TILE * len(vectors)
                    for number, pairs in enumerate(vectors):
                        for parity in (0, 1):
                            value = codes.scaled(e.every_second(pairs, parity), one)
                            at = e.times(inner.index, size)
                            at = builder.add(at, long(4 * TILE * (2 * number + parity)))
                            e.store(value, e.plus(out, at))
            return context.get_dummy_value()

        return signature, generate

    return decode


dot_int4, dot_int8 = map(_make_dot_codes, ("int4", "int8"))
dot_unpacked_int4, dot_unpacked_int8 = (_make_dot_codes(f, unpacked=True) for f in ("int4", "int8"))
unpack_int4, unpack_int8 = map(_make_unpack_pairs, ("int4", "int8"))
decode_int4, decode_int8 = map(_make_decode, ("int4", "int8"))
