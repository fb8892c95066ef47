"""Products of codes in the matrix unit of processors that have AMX, the same to the last bit.

Activations are 16-bit codes, so a pair of bytes each: low (0..255) and high (-128..127). The unit
multiplies bytes, four along k at a time, and adds up in 32 bits. Against weights that stand at the
low bytes, with zeros between them, it gives the sum of low bytes; one byte further on that of the
high ones. 256 times the latter plus the former is the exact sum that the vector unit computes, and
what follows is the same scaling, in the same order.

    tile 0      codes of 16 rows, 32 k              (16, 64 bytes)
    tile 1, 2   weights at low and at high bytes    (16 pairs of k, 16 columns of 4 bytes)
    tile 3, 4   sums of low and of high bytes       (16 rows, 16 columns)
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cloud.engine.cpu.codes import GROUP_BYTES, Codes
from cloud.engine.cpu.simd import (
    F32,
    FLOATS,
    GROUP,
    I8,
    I16,
    I32,
    TILE,
    Emitter,
    all_of,
    long,
)

CODES, WEIGHTS, SUMS = 0, 1, 3
"""Numbers of the tiles; of weights and sums the first of two."""
TILE_BYTES = 16 * 64
ROWS = 16
"""Most rows of one call."""
GROUPS = 8
"""Most groups of one call."""
ROOM = GROUPS * 2 * TILE_BYTES
"""Bytes of their weights, and of their sums: 16 KB."""


class _Unit:
    """Writes instructions of the matrix unit."""

    def __init__(self, e: Emitter) -> None:
        self._e = e

    def configure(self) -> None:
        """Make all eight tiles 16 rows of 64 bytes (palette 1)."""
        room = cgutils.alloca_once(self._e.b, ir.ArrayType(I8, 64))
        image = [1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8
        self._e.b.store(ir.Constant(room.type.pointee, bytearray(image)), room)
        self._call("ldtilecfg", [self._e.b.bitcast(room, I8.as_pointer())])

    def release(self) -> None:
        self._call("tilerelease", [])

    def zero(self, tile: int) -> None:
        self._call("tilezero", [_number(tile)])

    def load(self, tile: int, pointer: ir.Value, stride: ir.Value) -> None:
        self._call("tileloadd64", [_number(tile), pointer, stride])

    def store(self, tile: int, pointer: ir.Value) -> None:
        self._call("tilestored64", [_number(tile), pointer, long(4 * TILE)])

    def add_low(self, sums: int, codes: int, weights: int) -> None:
        """Add unsigned bytes of codes times signed bytes of weights."""
        self._call("tdpbusd", list(map(_number, (sums, codes, weights))))

    def add_high(self, sums: int, codes: int, weights: int) -> None:
        """Add signed bytes of codes times signed bytes of weights."""
        self._call("tdpbssd", list(map(_number, (sums, codes, weights))))

    def _call(self, name: str, values: list[ir.Value]) -> None:
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        function = cgutils.get_or_insert_function(self._e.b.module, kind, f"llvm.x86.{name}")
        self._e.b.call(function, values)


def _number(tile: int) -> ir.Constant:
    return ir.Constant(I8, tile)


@intrinsic
def begin(_typing: Any) -> Any:
    """Prepare the unit for this thread."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, _values: Any) -> Any:
        _Unit(Emitter(context, builder, signature)).configure()
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def end(_typing: Any) -> Any:
    """Leave the unit: a thread that sleeps with tiles in use costs more to switch."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, _values: Any) -> Any:
        _Unit(Emitter(context, builder, signature)).release()
        return context.get_dummy_value()

    return types.void(), generate


def _make_spread(form: str) -> Any:
    """Return spread(w, w_at, groups, panel): weights of each group at low, then at high bytes."""

    @intrinsic
    def spread(_typing: Any, w: Any, w_at: Any, groups: Any, panel: Any) -> Any:
        signature = types.void(w, w_at, groups, panel)

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            e = Emitter(context, builder, signature)
            _, w_at, groups, _ = values
            first_w, first_out = e.pointer(0, values, w_at), e.pointer(3, values, long(0))
            with cgutils.for_range(builder, groups) as loop:
                codes = Codes(e, form, e.plus(first_w, e.times(loop.index, GROUP_BYTES[form])))
                out = e.plus(first_out, e.times(loop.index, 2 * TILE_BYTES))
                with cgutils.for_range(builder, long(codes.steps)) as inner:
                    vectors = codes.pairs(inner.index)
                    low = e.plus(out, e.times(inner.index, 4 * TILE * len(vectors)))
                    for number, pairs in enumerate(vectors):
                        here = e.plus(low, 4 * TILE * number)
                        e.store(builder.and_(pairs, all_of(I16, 255, 2 * TILE)), here)
                        high = builder.shl(pairs, all_of(I16, 8, 2 * TILE))
                        e.store(high, e.plus(here, TILE_BYTES))
            return context.get_dummy_value()

        return signature, generate

    return spread


def _make_multiply(form: str) -> Any:
    """Return multiply(rows, x, x_at, x_stride, scales, sums, s_at, s_stride, w, w_at, groups,
    panel, out, out_at): what `codes` has, for up to 16 rows and GROUPS groups.

    Args:
        x: can be read to its 16th row.
        panel: begins with what `spread` left of the groups; behind that is room for their sums.
    """

    @intrinsic
    def multiply(
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
    ) -> Any:
        signature = types.void(
            rows, x, x_at, x_stride, scales, sums, s_at, s_stride, w, w_at, groups, panel, out,
            out_at,
        )  # fmt: skip

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            e = Emitter(context, builder, signature)
            unit = _Unit(e)
            rows, _, x_at, x_stride, _, _, s_at, s_stride, _, w_at, groups, _, _, at = values
            first_x, first_w = e.pointer(1, values, x_at), e.pointer(8, values, w_at)
            first_scale, first_sum = (e.pointer(i, values, s_at) for i in (4, 5))
            weights, first_out = e.pointer(11, values, long(0)), e.pointer(12, values, at)
            products = e.plus(weights, ROOM)

            with cgutils.for_range(builder, groups) as loop:
                k = e.times(loop.index, 2 * GROUP)
                unit.load(CODES, e.plus(first_x, k), e.times(x_stride, 2))
                for number, add in enumerate((unit.add_low, unit.add_high)):
                    here = e.plus(weights, e.times(loop.index, 2 * TILE_BYTES))
                    unit.load(WEIGHTS + number, e.plus(here, TILE_BYTES * number), long(4 * TILE))
                    unit.zero(SUMS + number)
                    add(SUMS + number, CODES, WEIGHTS + number)
                    here = e.plus(products, e.times(loop.index, 2 * TILE_BYTES))
                    unit.store(SUMS + number, e.plus(here, TILE_BYTES * number))

            def scale(count: int) -> None:
                size = GROUP_BYTES[form]
                codes = [Codes(e, form, e.plus(first_w, g * size)) for g in range(count)]
                with cgutils.for_range(builder, rows) as row:
                    line = e.plus(products, e.times(row.index, 4 * TILE))
                    s = e.times(builder.mul(row.index, s_stride), 4)
                    x_scales, x_sums = e.plus(first_scale, s), e.plus(first_sum, s)
                    where = e.plus(first_out, e.times(row.index, 4 * TILE))
                    total = e.load(where, F32)
                    for g, group in enumerate(codes):
                        low = e.load(e.plus(line, 2 * TILE_BYTES * g), I32)
                        high = e.load(e.plus(line, 2 * TILE_BYTES * g + TILE_BYTES), I32)
                        exact = builder.add(builder.shl(high, all_of(I32, 8)), low)
                        product = builder.sitofp(exact, FLOATS)
                        scaled = group.scaled(product, e.splat(e.plus(x_sums, 4 * g)))
                        total = e.fma(e.splat(e.plus(x_scales, 4 * g)), scaled, total)
                    e.store(total, where)

            e.for_each_count(groups, GROUPS, scale)
            return context.get_dummy_value()

        return signature, generate

    return multiply


spread_int4, spread_int8 = map(_make_spread, ("int4", "int8"))
multiply_int4, multiply_int8 = map(_make_multiply, ("int4", "int8"))
