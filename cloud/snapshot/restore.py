"""Puts the blocks of snapshots back into the pool, before the decoder serves.

Files are read and checked whole in threads, while this one copies what is good into blocks that
nobody uses and publishes them: sequences find them there as they find what others ran. A damaged
file never touches the pool; what it held is prefilled.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from cloud.engine.cache import BLOCK, KVCache
from cloud.engine.engine import Engine
from cloud.snapshot.format import block_keys
from cloud.snapshot.store import Kept, SnapshotStore
from shared.errors import InputError

READERS = 2
AHEAD = 3
"""Conversations that are read while one is copied."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A conversation to restore: its files, and what its sequence is going to be."""

    kept: Kept
    namespace: Hashable
    ids: list[int]


@dataclass(frozen=True, slots=True)
class _Found:
    """What was read of a conversation: blocks by their keys, and the files that are damaged."""

    blocks: dict[bytes, torch.Tensor]
    damaged: list[tuple[Path, InputError]]


def restore_blocks(
    store: SnapshotStore, engine: Engine, cache: KVCache, wanted: Iterable[Wanted]
) -> None:
    """Put back what there is of each conversation, up to the first block that is missing.

    Args:
        wanted: the ones to be given up first come first.
    """
    for one, found in _read_ahead(store, wanted):
        for path, error in found.damaged:
            store.reject(one.kept, path, error)
        keys = block_keys(one.namespace, one.ids, BLOCK)
        there = next((n for n, key in enumerate(keys) if key not in found.blocks), len(keys))

        def write(number: int, block: int, keys: list[bytes] = keys, found: _Found = found) -> None:
            cache.load(block, found.blocks[keys[number]])

        written = engine.restore(one.namespace, one.ids[: there * BLOCK], write)
        store.counts.tokens_restored += written * BLOCK
        store.counts.bytes_restored += written * cache.block_bytes


def _read_ahead(store: SnapshotStore, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, _Found]]:
    with ThreadPoolExecutor(READERS, "snapshot") as readers:
        reading: deque[tuple[Wanted, Future[_Found]]] = deque()
        for one in wanted:
            reading.append((one, readers.submit(_read, store, one)))
            if len(reading) > AHEAD:
                first, found = reading.popleft()
                yield first, found.result()
        for first, found in reading:
            yield first, found.result()


def _read(store: SnapshotStore, one: Wanted) -> _Found:
    keys = set(block_keys(one.namespace, one.ids, BLOCK))
    found = _Found({}, [])
    for path, head in one.kept.segments.items():
        if keys.isdisjoint(head.keys):
            continue
        try:
            blocks = store.read_segment(path, head)
        except InputError as error:
            found.damaged.append((path, error))
            continue
        rows = torch.frombuffer(blocks, dtype=torch.uint8).view(len(head.keys), head.block_bytes)
        found.blocks.update(zip(head.keys, rows, strict=True))
    return found
