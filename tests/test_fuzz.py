"""Every door for a moment: mutated seeds, and what hypothesis makes of nothing."""

import importlib
import signal
import tracemalloc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from random import Random
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import TARGETS
from tests.fuzz.mutation import mutants

SECONDS = 5.0
"""Of this process's time for one input, ten times over: `tracemalloc` slows everything down."""
MEGABYTES = 64
COUNTS = {"gguf": 60, "tokenizer": 40, "adapter": 150, "body": 60}
OTHERS = 150


@contextmanager
def bounded() -> Generator[None, None, None]:
    """Fail what runs for too long or takes too much memory."""

    def too_long(_signal: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"one input takes more than {SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert peak < MEGABYTES << 20, f"one input takes {peak} bytes"


def target_of(name: str) -> Callable[[bytes], None]:
    target: Callable[[bytes], None] = importlib.import_module(f"tests.fuzz.{name}").target
    return target


@pytest.mark.parametrize("name", TARGETS)
def test_no_mutated_input_gets_through_a_door(name: str) -> None:
    seeds: list[bytes] = importlib.import_module(f"tests.fuzz.{name}").seeds()
    target = target_of(name)
    for number, data in enumerate([*seeds, *mutants(seeds, COUNTS.get(name, OTHERS), Random(1))]):
        try:
            with bounded():
                target(data)
        except BaseException as error:
            error.add_note(f"input {number} of {name}: {data[:4096].hex()}")
            raise


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_that_hypothesis_thinks_of_gets_through_a_door(name: str) -> None:
    target = target_of(name)

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.binary(max_size=600))
    def run(data: bytes) -> None:
        target(data)

    run()
