"""The pool of KV blocks: which are free, how many holders each has. No torch, no I/O."""

from collections.abc import Iterable

from shared.errors import CapacityError


class BlockPool:
    """Counts holders of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks.

        Raises:
            CapacityError: there are fewer; nothing is taken.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} KV blocks are wanted, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one hold on each of `blocks`."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is released twice"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Assert that the block tables `held` account for every block of the pool."""
        counts = [0] * self.num_blocks
        for table in held:
            for block in table:
                counts[block] += 1
        assert counts == self._holders, "block holders differ from the tables that hold them"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert all((counts[b] == 0) == (b in free) for b in range(self.num_blocks))
