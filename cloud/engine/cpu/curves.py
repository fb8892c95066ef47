"""What is not a product: exponentials, gates, softmax weights, rounding to codes; 16 at a time."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cloud.engine.cpu.simd import (
    F32,
    FLOATS,
    GROUP,
    I16,
    I32,
    INTEGERS,
    TILE,
    Emitter,
    all_of,
    long,
)

_MOST_CODE = 32767.0
_LOWEST = -1e30


class _Curves:
    """Writes functions of vectors of 16 floats."""

    def __init__(self, e: Emitter) -> None:
        self._e, self._b = e, e.b

    def exp(self, x: ir.Value) -> ir.Value:
        """e^x for x <= 0, to about 2 ulp (Cody-Waite reduction, Taylor to degree 6)."""
        b, fma = self._b, self._e.fma
        x = self.larger(x, floats(-87.0))
        n = self._call("floor", fma(x, floats(1.4426950408889634), floats(0.5)))
        r = fma(n, floats(-0.693359375), x)
        r = fma(n, floats(2.12194440e-4), r)
        p = floats(1 / 720)
        for factor in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            p = fma(p, r, floats(factor))
        power = b.shl(b.add(b.fptosi(n, INTEGERS), all_of(I32, 127)), all_of(I32, 23))
        return b.fmul(p, b.bitcast(power, FLOATS))

    def larger(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self._b.select(self._b.fcmp_ordered(">", x, y), x, y)

    def absolute(self, x: ir.Value) -> ir.Value:
        return self._call("fabs", x)

    def rounded(self, x: ir.Value) -> ir.Value:
        """To the nearest integer, ties to even."""
        return self._b.fptosi(self._call("rint", x), INTEGERS)

    def largest(self, x: ir.Value) -> ir.Value:
        return self._reduce("fmax", x, [])

    def sum(self, x: ir.Value) -> ir.Value:
        """Add up halves, then halves of that: the order depends on places alone."""
        width = TILE // 2
        while width:
            places = [i + width if i < width else 0 for i in range(TILE)]
            moved = self._b.shuffle_vector(x, x, ir.Constant(INTEGERS, places))
            x = self._b.fadd(x, moved)
            width //= 2
        return self._b.extract_element(x, ir.Constant(I32, 0))

    def count(self, x: ir.Value) -> ir.Value:
        """Add up integers."""
        return self._reduce("add", x, [])

    def all_of(self, x: ir.Value) -> ir.Value:
        """Put one value into all 16 places."""
        empty = ir.Constant(FLOATS, ir.Undefined)
        one = self._b.insert_element(empty, x, ir.Constant(I32, 0))
        return self._b.shuffle_vector(one, empty, all_of(I32, 0))

    def _call(self, name: str, x: ir.Value) -> ir.Value:
        kind = ir.FunctionType(FLOATS, [FLOATS])
        where = self._b.module
        return self._b.call(cgutils.get_or_insert_function(where, kind, f"llvm.{name}.v16f32"), [x])

    def _reduce(self, name: str, x: ir.Value, first: list[ir.Value]) -> ir.Value:
        element, short = (F32, "f32") if x.type == FLOATS else (I32, "i32")
        kind = ir.FunctionType(element, [*(v.type for v in first), x.type])
        name = f"llvm.vector.reduce.{name}.v16{short}"
        function = cgutils.get_or_insert_function(self._b.module, kind, name)
        return self._b.call(function, [*first, x])


def floats(value: float) -> ir.Constant:
    return ir.Constant(FLOATS, [value] * TILE)


@intrinsic
def gate_rows(_typing: Any, rows: Any, gate: Any, up: Any) -> Any:
    """SwiGLU of a tile, in place: gate[:rows] = silu(gate) * up, both (rows, TILE)."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        e = Emitter(context, builder, signature)
        curves, one = _Curves(e), floats(1.0)
        gates, ups = e.pointer(1, values, long(0)), e.pointer(2, values, long(0))
        with cgutils.for_range(builder, values[0]) as row:
            here = e.times(row.index, 4 * TILE)
            g, u = e.load(e.plus(gates, here), F32), e.load(e.plus(ups, here), F32)
            power = curves.exp(builder.fneg(curves.absolute(g)))
            sigmoid = builder.fdiv(one, builder.fadd(one, power))
            is_low = builder.fcmp_ordered("<", g, floats(0.0))
            sigmoid = builder.select(is_low, builder.fmul(power, sigmoid), sigmoid)
            e.store(builder.fmul(builder.fmul(g, sigmoid), u), e.plus(gates, here))
        return context.get_dummy_value()

    return types.void(rows, gate, up), generate


@intrinsic
def soften(_typing: Any, scores: Any, at: Any, visible: Any, count: Any, top: Any) -> Any:
    """Turn scores into weights e^(score - most), and those from `visible` up to `count` into 0.

    Args:
        at: index of the first score; `count`, a multiple of 16, are there.
        top: the largest score before these.

    Returns:
        The largest score now, and the sum of the weights.
    """
    result = types.UniTuple(types.float32, 2)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        e = Emitter(context, builder, signature)
        curves = _Curves(e)
        _, at, visible, count, top = values
        first = e.pointer(0, values, at)
        places = ir.Constant(INTEGERS, list(range(TILE)))
        seen = curves.all_of(builder.sitofp(visible, F32))
        most = cgutils.alloca_once_value(builder, curves.all_of(top))
        mass = cgutils.alloca_once_value(builder, floats(0.0))
        with cgutils.for_range_slice(builder, long(0), count, long(TILE), inc=True) as (p, _):
            x = e.load(e.plus(first, e.times(p, 4)), F32)
            x = builder.select(is_seen(builder, p, places, seen, curves), x, floats(_LOWEST))
            builder.store(curves.larger(x, builder.load(most)), most)
        largest = curves.largest(builder.load(most))
        everywhere = curves.all_of(largest)
        with cgutils.for_range_slice(builder, long(0), count, long(TILE), inc=True) as (p, _):
            where = e.plus(first, e.times(p, 4))
            weight = curves.exp(builder.fsub(e.load(where, F32), everywhere))
            known = is_seen(builder, p, places, seen, curves)
            weight = builder.select(known, weight, floats(0.0))
            e.store(weight, where)
            builder.store(builder.fadd(builder.load(mass), weight), mass)
        total = curves.sum(builder.load(mass))
        return context.make_tuple(builder, result, [largest, total])

    return result(scores, at, visible, count, top), generate


def is_seen(
    builder: ir.IRBuilder, p: ir.Value, places: ir.Value, seen: ir.Value, curves: _Curves
) -> ir.Value:
    """Return which of the places p..p + 16 are below `seen`."""
    start = curves.all_of(builder.sitofp(p, F32))
    here = builder.fadd(builder.sitofp(places, FLOATS), start)
    return builder.fcmp_ordered("<", here, seen)


@intrinsic
def encode_groups(
    _typing: Any, x: Any, x_at: Any, groups: Any, codes: Any, scales: Any, sums: Any, s_at: Any
) -> Any:
    """Round groups of 32 floats to 16-bit codes, with the scale and the sum of codes of each.

    Args:
        x_at: index of the first float, and of its code.
        s_at: index of the first group's scale and sum.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        e = Emitter(context, builder, signature)
        curves = _Curves(e)
        _, x_at, groups, _, _, _, s_at = values
        first, out = e.pointer(0, values, x_at), e.pointer(3, values, x_at)
        scales, sums = e.pointer(4, values, s_at), e.pointer(5, values, s_at)
        most_code, zero = ir.Constant(F32, _MOST_CODE), ir.Constant(F32, 0.0)
        with cgutils.for_range(builder, groups) as loop:
            here = e.plus(first, e.times(loop.index, 4 * GROUP))
            halves = [e.load(e.plus(here, 4 * TILE * i), F32) for i in range(2)]
            most = curves.largest(curves.larger(*map(curves.absolute, halves)))
            some = builder.fcmp_ordered(">", most, zero)
            by = curves.all_of(builder.select(some, builder.fdiv(most_code, most), zero))
            rounded = [curves.rounded(builder.fmul(half, by)) for half in halves]
            target = e.plus(out, e.times(loop.index, 2 * GROUP))
            for i, whole in enumerate(rounded):
                short = builder.trunc(whole, ir.VectorType(I16, TILE))
                e.store(short, e.plus(target, 2 * TILE * i))
            number = e.times(loop.index, 4)
            total = builder.sitofp(curves.count(builder.add(*rounded)), F32)
            for value, place in ((builder.fdiv(most, most_code), scales), (total, sums)):
                builder.store(value, builder.bitcast(e.plus(place, number), F32.as_pointer()))
        return context.get_dummy_value()

    return types.void(x, x_at, groups, codes, scales, sums, s_at), generate
