"""A sequence's table of blocks: what it shares with others, and what is its own. No torch, no I/O.

Full blocks of settled ids are published; the first `published` blocks of a table are such. A block
that others may read is never written: who takes words back inside of one gets a copy.
"""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Ids

from cloud.engine.blocks import BlockPool
from cloud.engine.sequence import Sequence

Copy = tuple[int, int]
"""Source and target of a block's keys and values."""


def adopt(pool: BlockPool, sequence: Sequence) -> None:
    """Take the published blocks that hold what comes next in the sequence."""
    size = pool.block_size
    most = len(sequence.ids) - (sequence.generation is not None)  # a last id to draw behind
    while sequence.cached == len(sequence.blocks) * size == sequence.published * size:
        end = sequence.cached + size
        if sequence.is_scored or end > min(most, sequence.settled):
            return
        parent = sequence.blocks[-1] if sequence.blocks else None
        block = pool.find(sequence.namespace, parent, sequence.ids[sequence.cached : end])
        if block is None:
            return
        sequence.blocks.append(block)
        sequence.cached = end
        sequence.published += 1
        sequence.adopted += size
        pool.num_adopted += size


def publish(pool: BlockPool, sequence: Sequence) -> None:
    """Publish the full blocks of settled ids."""
    size = pool.block_size
    full = min(sequence.cached, sequence.settled) // size
    for number in range(sequence.published, full):
        parent = sequence.blocks[number - 1] if number else None
        tokens = sequence.ids[number * size : (number + 1) * size]
        block = sequence.blocks[number]
        sequence.blocks[number] = pool.publish(sequence.namespace, parent, tokens, block)
        sequence.published = number + 1


def restore(
    pool: BlockPool, namespace: Hashable, ids: Ids[int], write: Callable[[int, int], None]
) -> int:
    """Publish the full blocks of `ids` as if a sequence had run them, while there are unused ones.

    Args:
        write: puts the keys and values of the ids' block of a number into a block of the pool.

    Returns:
        How many blocks were written; others were there already.
    """
    size = pool.block_size
    held: list[int] = []
    written = 0
    for number in range(len(ids) // size):
        parent = held[-1] if held else None
        found = pool.claim(namespace, parent, ids[number * size : (number + 1) * size])
        if found is None:
            break
        block, is_new = found
        if is_new:
            write(number, block)
            written += 1
        held.append(block)
    pool.release(held)
    return written


def truncate(pool: BlockPool, sequence: Sequence) -> Copy | None:
    """Give up the blocks behind the cached ids, and the right of others to the last if it changes.

    Returns:
        What is to be copied before the sequence runs: its last block is shared.
    """
    kept = pool.blocks_for(sequence.cached)
    cut = sequence.cached // pool.block_size  # the first block that is not full any more
    for block in sequence.blocks[cut : sequence.published]:
        if not pool.is_shared(block):
            pool.withdraw(block)  # and all behind it
            break
    sequence.published = min(sequence.published, cut)
    pool.release(sequence.blocks[kept:])
    del sequence.blocks[kept:]
    if kept == cut or not pool.is_shared(sequence.blocks[cut]):
        return None
    shared = sequence.blocks.pop()
    pool.release([shared])
    if pool.num_free == 0:  # no room for a copy: its few ids are run again
        sequence.cached = cut * pool.block_size
        return None
    sequence.blocks += pool.allocate(1)
    return shared, sequence.blocks[cut]


def evict(pool: BlockPool, sequence: Sequence) -> None:
    """Give up all blocks. The ids stay, to be prefilled when they are wanted."""
    sequence.parked = sequence.remaining == 0
    pool.release(sequence.blocks)
    sequence.blocks = []
    sequence.cached = sequence.published = 0
    sequence.evictions += 1
