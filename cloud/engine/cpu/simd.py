"""Inner loops in vector instructions, built as LLVM IR for numba.

All of them compute out[r, j] += sum over k of x[r, k] * w[k, j] for 16 columns j at once: one fused
multiply-add for each k, in ascending order. So a value depends neither on how many rows are
computed together nor on which of these functions does it. w[k] is 16 float32, bfloat16 (as uint16),
float16 or int8 values; `codes` has the loops over integer codes.

A function takes arrays with the index of the first value in them, in elements of the array; strides
count the same. Bounds are for the callers to know.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cloud.engine.cpu.features import FEATURES

TILE = 16
"""Columns of a tile: two AVX2 registers or one of AVX-512."""
GROUP = 32
"""Values of k that share a scale."""
LINE = 64
"""Bytes of a cache line."""
ROWS = 12 if FEATURES.get("avx512bw") else 6
"""Most rows of one call with floats: their sums fill the registers."""

F32, F16 = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS = ir.VectorType(F32, TILE)
INTEGERS = ir.VectorType(I32, TILE)
PAIRS = ir.VectorType(I16, 2 * TILE)


_FORM_OF = {types.float32: "f32", types.uint16: "bf16", types.int8: "i8"}
_SIZES = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1}


class Emitter:
    """Writes IR: pointers are to bytes, indices are 64-bit values or Python ints."""

    def __init__(self, context: Any, builder: ir.IRBuilder, signature: Any) -> None:
        self._context, self.b, self._types = context, builder, signature.args

    def pointer(self, number: int, values: Sequence[Any], at: Any) -> ir.Value:
        """Return a byte pointer to element `at` of the array that is argument `number`."""
        array = self._types[number]
        data = self._context.make_array(array)(self._context, self.b, values[number]).data
        return self.b.bitcast(self.b.gep(data, [at]), I8.as_pointer())

    def size(self, number: int) -> int:
        """Return the bytes of an element of the array that is argument `number`."""
        return int(self._types[number].dtype.bitwidth // 8)

    def form(self, number: int) -> str:
        """Return the form of the elements of the array that is argument `number`."""
        return _FORM_OF[self._types[number].dtype]

    def times(self, value: Any, factor: int) -> ir.Value:
        return self.b.mul(value, ir.Constant(I64, factor))

    def plus(self, pointer: ir.Value, offset: Any) -> ir.Value:
        offset = ir.Constant(I64, offset) if isinstance(offset, int) else offset
        return self.b.gep(pointer, [offset])

    def load(self, pointer: ir.Value, element: ir.Type, count: int = TILE) -> ir.Value:
        kind = ir.VectorType(element, count)
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=1)

    def store(self, value: ir.Value, pointer: ir.Value) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=4)

    def splat(self, pointer: ir.Value) -> ir.Value:
        """Load one float into all 16 places."""
        value = self.b.load(self.b.bitcast(pointer, F32.as_pointer()))
        empty = ir.Constant(FLOATS, ir.Undefined)
        one = self.b.insert_element(empty, value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, empty, all_of(I32, 0))

    def splat_pair(self, pointer: ir.Value) -> ir.Value:
        """Load two int16 into all 16 pairs."""
        value = self.b.load(self.b.bitcast(pointer, I32.as_pointer()), align=2)
        empty = ir.Constant(INTEGERS, ir.Undefined)
        one = self.b.insert_element(empty, value, ir.Constant(I32, 0))
        return self.b.bitcast(self.b.shuffle_vector(one, empty, all_of(I32, 0)), PAIRS)

    def every_second(self, pairs: ir.Value, parity: int) -> ir.Value:
        """Return one of each pair, as floats."""
        return self.b.sitofp(self._half(pairs, parity), FLOATS)

    def _half(self, pairs: ir.Value, parity: int) -> ir.Value:
        empty = ir.Constant(PAIRS, ir.Undefined)
        return self.b.shuffle_vector(pairs, empty, order(range(parity, 2 * TILE, 2)))

    def add_pairs(self, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return total + a[k] b[k] + a[k + 1] b[k + 1], pair by pair, in 32 bits."""
        lanes = 2 * TILE if FEATURES.get("avx512bw") else TILE
        if FEATURES.get("avx2"):
            return self.b.add(total, self._multiply_pairs(a, b, lanes))
        products = (
            self.b.mul(*(self.b.sext(self._half(v, parity), INTEGERS) for v in (a, b)))
            for parity in (0, 1)
        )
        return self.b.add(total, self.b.add(*products))

    def _multiply_pairs(self, a: ir.Value, b: ir.Value, lanes: int) -> ir.Value:
        """vpmaddwd; together with the addition it becomes vpdpwssd where that exists."""
        name = "avx512.pmaddw.d.512" if lanes == 2 * TILE else "avx2.pmadd.wd"
        part, whole = ir.VectorType(I16, lanes), ir.VectorType(I32, lanes // 2)
        kind = ir.FunctionType(whole, [part, part])
        function = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.x86.{name}")
        if lanes == 2 * TILE:
            return self.b.call(function, [a, b])
        halves = ((self._lanes(a, at, lanes), self._lanes(b, at, lanes)) for at in (0, lanes))
        low, high = (self.b.call(function, list(pair)) for pair in halves)
        return self.b.shuffle_vector(low, high, order(range(TILE)))

    def _lanes(self, value: ir.Value, first: int, count: int) -> ir.Value:
        empty = ir.Constant(value.type, ir.Undefined)
        return self.b.shuffle_vector(value, empty, order(range(first, first + count)))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        function = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.fma.v{TILE}f32")
        return self.b.call(function, [a, b, c])

    def prefetch(self, pointer: ir.Value, size: int) -> None:
        """Ask for `size` bytes that are read soon."""
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        for line in range(0, size, LINE):
            read, soon, data = (ir.Constant(I32, number) for number in (0, 3, 1))
            self.b.call(function, [self.plus(pointer, line), read, soon, data])

    def halves(self, pointer: ir.Value) -> ir.Value:
        return self.b.fpext(self.load(pointer, F16), FLOATS)

    def element(self, pointer: ir.Value, form: str) -> ir.Value:
        """Load 16 values of a form as floats."""
        match form:
            case "f32":
                return self.load(pointer, F32)
            case "f16":
                return self.halves(pointer)
            case "bf16":
                wide = self.b.zext(self.load(pointer, I16), ir.VectorType(I32, TILE))
                return self.b.bitcast(self.b.shl(wide, all_of(I32, 16)), FLOATS)
            case _:
                wide = self.b.sext(self.load(pointer, I8), ir.VectorType(I32, TILE))
                return self.b.sitofp(wide, FLOATS)

    def for_each_count(self, rows: ir.Value, most: int, emit: Callable[[int], None]) -> None:
        """Emit a variant for each number of rows from 1 to `most`, and a jump to the right one."""
        done = self.b.append_basic_block("done")
        switch = self.b.switch(rows, done)
        for count in range(1, most + 1):
            block = self.b.append_basic_block(f"rows{count}")
            switch.add_case(ir.Constant(I64, count), block)
            self.b.position_at_end(block)
            emit(count)
            self.b.branch(done)
        self.b.position_at_end(done)

    def sums(self, out: ir.Value, stride: ir.Value, count: int) -> "Sums":
        """Load the sums of `count` rows."""
        return Sums(self, [self.plus(out, self.b.mul(stride, long(4 * r))) for r in range(count)])


class Sums:
    """The 16 sums of each row, in registers until they are stored."""

    def __init__(self, emitter: Emitter, rows: Sequence[ir.Value]) -> None:
        self._e, self._rows = emitter, rows
        self._slots = [cgutils.alloca_once(emitter.b, FLOATS) for _ in rows]
        for slot, row in zip(self._slots, rows, strict=True):
            emitter.b.store(emitter.load(row, F32), slot)

    def add(self, xs: Sequence[ir.Value], weights: ir.Value) -> None:
        """Add weights times the float each of `xs` points to."""
        for row, x in enumerate(xs):
            self.add_one(row, x, weights)

    def add_one(self, row: int, x: ir.Value, weights: ir.Value) -> None:
        """Add weights times the float `x` points to, to one row."""
        slot = self._slots[row]
        self._e.b.store(self._e.fma(self._e.splat(x), weights, self._e.b.load(slot)), slot)

    def store(self) -> None:
        for slot, row in zip(self._slots, self._rows, strict=True):
            self._e.store(self._e.b.load(slot), row)


def order(places: range) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, len(places)), list(places))


def long(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def all_of(element: ir.Type, value: int, count: int = TILE) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, count), [value] * count)


def _make_dot(form: str | None) -> Any:
    """Return dot(rows, x, x_at, x_stride, w, w_at, w_stride, depth, out, out_at, out_stride).

    Args:
        form: of the elements of `w`; None: that of its type.
    """

    @intrinsic
    def dot(
        _typing: Any,
        rows: Any,
        x: Any,
        x_at: Any,
        x_stride: Any,
        w: Any,
        w_at: Any,
        w_stride: Any,
        depth: Any,
        out: Any,
        out_at: Any,
        out_stride: Any,
    ) -> Any:
        signature = types.void(
            rows, x, x_at, x_stride, w, w_at, w_stride, depth, out, out_at, out_stride
        )

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            e = Emitter(context, builder, signature)
            rows, _, x_at, x_stride, _, w_at, w_stride, depth, _, out_at, out_stride = values
            first_x = e.pointer(1, values, x_at)
            first_w = e.pointer(4, values, w_at)
            first_out = e.pointer(8, values, out_at)
            step, kind = e.times(w_stride, e.size(4)), form or e.form(4)

            def emit(count: int) -> None:
                sums = e.sums(first_out, out_stride, count)
                starts = [e.plus(first_x, e.times(x_stride, 4 * r)) for r in range(count)]
                with cgutils.for_range(builder, depth) as loop:
                    weights = e.element(e.plus(first_w, builder.mul(loop.index, step)), kind)
                    at = e.times(loop.index, 4)
                    sums.add([e.plus(start, at) for start in starts], weights)
                sums.store()

            e.for_each_count(rows, ROWS, emit)
            return context.get_dummy_value()

        return signature, generate

    return dot


def _make_widen(form: str | None) -> Any:
    """Return widen(w, w_at, count, panel): `count` times 16 values as float32.

    Args:
        form: of the elements of `w`; None: that of its type.
    """

    @intrinsic
    def widen(_typing: Any, w: Any, w_at: Any, count: Any, panel: Any) -> Any:
        signature = types.void(w, w_at, count, panel)

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            e = Emitter(context, builder, signature)
            _, w_at, count, _ = values
            first_w, first_out = e.pointer(0, values, w_at), e.pointer(3, values, long(0))
            kind = form or e.form(0)
            with cgutils.for_range(builder, count) as loop:
                at = e.times(loop.index, _SIZES[kind] * TILE)
                value = e.element(e.plus(first_w, at), kind)
                e.store(value, e.plus(first_out, e.times(loop.index, 4 * TILE)))
            return context.get_dummy_value()

        return signature, generate

    return widen


dot, dot_f32, dot_bf16, dot_f16 = map(_make_dot, (None, "f32", "bf16", "f16"))
widen, widen_f32, widen_bf16, widen_f16 = map(_make_widen, (None, "f32", "bf16", "f16"))


@numba.njit(inline="always")
def exp(x: np.float32) -> np.float32:
    """e^x for x <= 0 in float32, to about 2 ulp (Cody-Waite reduction, Taylor to degree 6)."""
    x = max(np.float32(x), np.float32(-87.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return p * np.uint32(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23)).view(np.float32)


@intrinsic
def prefetch(_typing: Any, array: Any, at: Any, lines: Any) -> Any:
    """Ask for cache lines that are read soon, from element `at` of an array on."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        e = Emitter(context, builder, signature)
        first = e.pointer(0, values, values[1])
        with cgutils.for_range(builder, values[2]) as loop:
            e.prefetch(e.plus(first, e.times(loop.index, LINE)), LINE)
        return context.get_dummy_value()

    return types.void(array, at, lines), generate


@intrinsic
def encode(_typing: Any, value: Any, like: Any) -> Any:
    """Return a float32 as an element of the array `like`: itself, bfloat16 bits or an int8 code.

    Both round to nearest even.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        number = values[0]
        match _FORM_OF[signature.args[1].dtype]:
            case "f32":
                return number
            case "bf16":  # the upper half of a float32
                bits = builder.bitcast(number, I32)
                odd = builder.and_(builder.lshr(bits, _int(16)), _int(1))
                rounded = builder.add(builder.add(bits, _int(0x7FFF)), odd)
                return builder.trunc(builder.lshr(rounded, _int(16)), I16)
            case _:
                kind = ir.FunctionType(F32, [F32])
                rint = cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.f32")
                return builder.fptosi(builder.call(rint, [number]), I8)

    return like.dtype(types.float32, like), generate


def _int(value: int) -> ir.Constant:
    return ir.Constant(I32, value)
