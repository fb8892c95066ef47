"""How threads share the work of a step.

Work comes in phases of many small tasks. A thread claims tasks with a counter, and a phase is over
when all its tasks are done, whoever did them. So a thread that wakes late, or loses its core to
another process, slows nobody down by more than the tasks in its hands.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Counters = NDArray[np.int64]

_LINE = 8
"""64-bit words of a cache line: counters on lines of their own do not slow each other down."""
_ENTERED, _LEFT, _PHASES = 0, _LINE, 2 * _LINE
"""Words of the counters: helpers that came in (negative: closed), that have left, the phases'."""
_CLOSED = -(1 << 40)
_SHARES = 4
"""Claims into which each thread's part of a phase is cut."""
_SPINS = 2000
"""Looks at a counter before a waiting thread offers its core to others."""


class Crew(NamedTuple):
    """Who works on a step, as one member sees it."""

    member: int  # 0: the thread that wants the result
    members: int
    counters: int
    """Address of the counters: an array would leave a reference behind in every generator."""


def counters_for(phases: int) -> Counters:
    """Return counters for one run of a program of so many phases."""
    return np.zeros(_PHASES + 2 * _LINE * phases, np.int64)


def _pointer(builder: ir.IRBuilder, values: Any) -> ir.Value:
    offset = builder.mul(values[1], ir.Constant(values[1].type, 8))
    return builder.inttoptr(builder.add(values[0], offset), ir.IntType(64).as_pointer())


@intrinsic
def fetch_add(_typing: Any, counters: Any, index: Any, amount: Any) -> Any:
    """Add to word `index` (int64) at the address `counters`; return what it was."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        where = _pointer(builder, values)
        return builder.atomic_rmw("add", where, values[2], "seq_cst")

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def load(_typing: Any, counters: Any, index: Any) -> Any:
    """Return word `index`; what was written before it was raised is seen behind it."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        where = _pointer(builder, values)
        return builder.load_atomic(where, "acquire", 8)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def offer_core(_typing: Any) -> Any:
    """Let other threads run if they want to: sched_yield(2)."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        function = cgutils.get_or_insert_function(builder.module, kind, "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@numba.njit(nogil=True)
def _wait_for(counters: int, index: int, value: int) -> None:
    spins = 0
    while load(counters, index) < value:
        spins += 1
        if spins > _SPINS:
            spins = 0
            offer_core()


@numba.njit(nogil=True)
def tasks(crew: Crew, phase: int, total: int) -> Iterator[int]:
    """Yield the tasks below `total` that this member takes; end when all of the phase are done."""
    claimed = _PHASES + 2 * phase * _LINE
    share = max(1, total // (crew.members * _SHARES))
    first = fetch_add(crew.counters, claimed, share)
    while first < total:
        end = min(first + share, total)
        for task in range(first, end):
            yield task
        fetch_add(crew.counters, claimed + _LINE, end - first)
        first = fetch_add(crew.counters, claimed, share)
    _wait_for(crew.counters, claimed + _LINE, total)


@numba.njit(nogil=True)
def enter(crew: Crew) -> bool:
    """Come in; False if the work is done already."""
    return crew.member == 0 or fetch_add(crew.counters, _ENTERED, 1) >= 0


@numba.njit(nogil=True)
def leave(crew: Crew) -> None:
    """Go; member 0 closes the door and waits until everybody is out."""
    if crew.member > 0:
        fetch_add(crew.counters, _LEFT, 1)
    else:
        _wait_for(crew.counters, _LEFT, fetch_add(crew.counters, _ENTERED, _CLOSED))
