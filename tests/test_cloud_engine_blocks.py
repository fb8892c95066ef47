"""The pool of KV blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud.engine.blocks import BlockPool
from shared.errors import CapacityError


def test_more_blocks_than_are_free_are_refused_and_nothing_is_taken() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(3)
    with pytest.raises(CapacityError, match="2 KV blocks are wanted, 1 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_block_released_twice_is_a_bug_of_ours() -> None:
    pool = BlockPool(2, 16)
    taken = pool.allocate(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(taken)


def test_tokens_take_whole_blocks() -> None:
    pool = BlockPool(4, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@given(st.lists(st.integers(-3, 5), max_size=40))
def test_the_accounting_sums_to_the_pool_after_every_operation(steps: list[int]) -> None:
    pool = BlockPool(12, 16)
    held: list[list[int]] = []
    for step in steps:
        if step > 0:
            try:
                held.append(pool.allocate(step))
            except CapacityError:
                assert pool.num_free < step
        elif step < 0 and held:
            pool.release(held.pop(-step % len(held)))
        pool.check(held)
        assert pool.num_free + sum(map(len, held)) == pool.num_blocks
