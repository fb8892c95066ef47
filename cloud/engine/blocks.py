"""The pool of KV blocks: which are free, how many hold each, which are kept for a prefix to come.

No torch, no I/O. A published block (`prefix`) that nobody holds any more stays as it is until its
room is wanted, the longest unused first.
"""

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Ids

from cloud.engine.prefix import PrefixIndex
from shared.errors import CapacityError


class BlockPool:
    """Counts holders of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: dict[int, None] = {}
        """Published blocks that nobody holds, the longest unused first."""
        self._holders = [0] * num_blocks
        self._index = PrefixIndex()
        self.num_adopted = 0
        """Tokens whose keys and values a sequence found here rather than ran, so far."""

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; what idle ones among them held is forgotten.

        Raises:
            CapacityError: there are fewer; nothing is taken.
        """
        if count > self.num_free:
            raise CapacityError(f"{count} KV blocks are wanted, {self.num_free} are free")
        while len(self._free) < count:
            self.withdraw(next(iter(self._idle)))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def release(self, blocks: Ids[int]) -> None:
        """Give up one hold on each of `blocks`; of a table's blocks the last goes first."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is released twice"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._put_down(block)

    # --- prefixes

    def is_shared(self, block: int) -> bool:
        """Tell whether more than one holds it."""
        return self._holders[block] > 1

    def find(self, namespace: Hashable, parent: int | None, tokens: Ids[int]) -> int | None:
        """Take a hold on the published block of these tokens; None: there is none."""
        block = self._index.find(namespace, parent, tokens)
        if block is not None:
            self._idle.pop(block, None)
            self._holders[block] += 1
        return block

    def publish(self, namespace: Hashable, parent: int | None, tokens: Ids[int], block: int) -> int:
        """Publish a full block; return the one to hold in its place: it, or an equal one."""
        known = self.find(namespace, parent, tokens)
        if known is None:
            self._index.add(namespace, parent, tokens, block)
            return block
        self.release([block])
        return known

    def claim(
        self, namespace: Hashable, parent: int | None, tokens: Ids[int]
    ) -> tuple[int, bool] | None:
        """Take a hold on the block of these tokens, and publish an unused one if there is none.

        Returns:
            The block, and whether its keys and values are still to be written; None: every block
            holds something.
        """
        known = self.find(namespace, parent, tokens)
        if known is not None:
            return known, False
        if not self._free:
            return None
        [block] = self.allocate(1)
        self._index.add(namespace, parent, tokens, block)
        return block, True

    def withdraw(self, block: int) -> None:
        """Forget what a block and all behind it hold: nobody finds them from now on."""
        for dropped in self._index.drop(block):
            if dropped in self._idle:
                del self._idle[dropped]
                self._free.append(dropped)

    def drop_idle(self, of: Callable[[Hashable], bool]) -> None:
        """Forget what blocks that nobody holds have kept, of the namespaces that `of` picks."""
        for block in [b for b in self._idle if of(self._index.namespace(b))]:
            self.withdraw(block)

    def _put_down(self, block: int) -> None:
        if block in self._index:
            self._idle[block] = None
        else:
            self._free.append(block)

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Assert that the block tables `held` account for every block of the pool."""
        counts = [0] * self.num_blocks
        for table in held:
            for block in table:
                counts[block] += 1
        assert counts == self._holders, "block holders differ from the tables that hold them"
        free = [*self._free, *self._idle]
        assert len(set(free)) == len(free), "a block is free twice"
        assert all((counts[b] == 0) == (b in set(free)) for b in range(self.num_blocks))
        assert all(block in self._index for block in self._idle), "an idle block holds nothing"
        assert not any(block in self._index for block in self._free), "a free block holds something"
