"""Which full blocks hold the keys and values of which prefix: a trie of blocks. No torch, no I/O.

An entry is found by its tokens and by the entry before it, so that equal tokens behind different
words are different entries, and no hash can be mistaken for another. The first entry's parent is
the sequence's namespace (adapter, tenant): nothing is shared across those.
"""

from collections.abc import Hashable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

Key = tuple[Hashable, int | None, tuple[int, ...]]
"""A namespace, the block before (None: the prefix begins here), and the block's tokens."""


@dataclass(slots=True)
class _Entry:
    key: Key
    children: set[int] = field(default_factory=set[int])


class PrefixIndex:
    """Blocks by what they hold."""

    def __init__(self) -> None:
        self._blocks: dict[Key, int] = {}
        self._entries: dict[int, _Entry] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, namespace: Hashable, parent: int | None, tokens: Ids[int]) -> int | None:
        """Return the block that holds `tokens` behind block `parent` (None: at the beginning)."""
        return self._blocks.get((namespace, parent, tuple(tokens)))

    def namespace(self, block: int) -> Hashable:
        """Return the namespace of a block that is known."""
        return self._entries[block].key[0]

    def add(self, namespace: Hashable, parent: int | None, tokens: Ids[int], block: int) -> None:
        """Say what a block holds; its parent must be known, and no other block hold the same."""
        key = (namespace, parent, tuple(tokens))
        assert key not in self._blocks, "another block holds this already"
        assert block not in self._entries, "this block holds something already"
        if parent is not None:
            self._entries[parent].children.add(block)
        self._blocks[key] = block
        self._entries[block] = _Entry(key)

    def drop(self, block: int) -> list[int]:
        """Forget a block and all behind it; return those that were known."""
        dropped: list[int] = []
        waiting = [block]
        while waiting:
            one = waiting.pop()
            entry = self._entries.pop(one, None)
            if entry is None:
                continue
            del self._blocks[entry.key]
            parent = entry.key[1]
            if parent in self._entries:
                self._entries[parent].children.discard(one)
            waiting += entry.children
            dropped.append(one)
        return dropped
