"""Writes a conversation's snapshot while its decoder serves: what is new of it, a little at a time.

Runs in a thread of its own. The engine copies blocks into a buffer of ours between two steps, for
a millisecond or one block, and checks each time that they still are what was asked for; CRC and
disk are our thread's business. So nothing is held in the pool, and nobody waits for a disk.
"""

import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from cloud.engine.cache import BLOCK, KVCache
from cloud.engine.engine import Engine
from cloud.engine.sequence import Sequence
from cloud.snapshot.format import SavedConversation, block_keys
from cloud.snapshot.store import SnapshotStore
from cloud.worker import Worker
from shared.errors import CapacityError

Answer = TypeVar("Answer")
Sight = Callable[[], Sequence | None]
"""Returns a conversation's sequence, if it has one now; for the engine's thread."""

PAUSE = 0.001
"""Seconds the engine copies between two steps; it ends with a whole block."""
PIECE = 8
"""Most blocks it copies then."""
MANY = 8
"""Blocks that are written while their turn is open."""
PATIENCE = 10.0
"""Seconds within which the engine must come to us."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A sequence, seen between two steps."""

    namespace: Hashable
    ids: list[int]
    """Settled ones."""
    published: int
    """Leading blocks whose keys and values are in the pool."""

    @classmethod
    def of(cls, sequence: Sequence) -> "Prefix":
        """Look at a sequence; only the engine's thread may."""
        settled = sequence.ids[: sequence.settled]
        published = min(sequence.published, len(settled) // BLOCK)
        return cls(sequence.namespace, settled, published)

    def has(self, sequence: Sequence | None, num_blocks: int) -> bool:
        """Tell whether the sequence's first blocks are still those that were seen."""
        end = num_blocks * BLOCK
        return (
            sequence is not None
            and sequence.published >= num_blocks
            and sequence.namespace == self.namespace
            and sequence.ids[:end] == self.ids[:end]
        )


class _ChangedError(Exception):
    """The conversation took back what was being copied."""


class SnapshotWriter:
    """Writes conversations, one at a time.

    Args:
        bytes_per_second: of keys and values, in the long run.
    """

    def __init__(
        self, store: SnapshotStore, worker: Worker, cache: KVCache, bytes_per_second: float
    ) -> None:
        self._store, self._worker, self._cache = store, worker, cache
        self._pace = cache.block_bytes / bytes_per_second
        """Seconds of a block."""
        self._buffer = torch.zeros(PIECE, cache.block_bytes, dtype=torch.uint8)
        self._rows: NDArray[np.uint8] = self._buffer.numpy()

    def write(self, saved: SavedConversation, sight: Sight, *, idle: bool, hurry: bool) -> bool:
        """Write the log, and the blocks that are in the pool and not in a file.

        Args:
            idle: nobody speaks: write however few blocks there are.
            hurry: the decoder is about to end: as fast as possible.

        Returns:
            Whether nothing is left to be written as long as the conversation does not change.

        Raises:
            OSError: the disk refuses.
            CapacityError: the engine stands still, or the conversation is beyond the quota.
        """
        kept = self._store.put_log(saved)
        prefix = self._ask(lambda _engine: _look(sight))
        if prefix is None:
            return True
        keys = block_keys(prefix.namespace, prefix.ids, BLOCK)
        wanted = set(keys)
        written = {
            key
            for head in kept.segments.values()
            if 2 * len(wanted.intersection(head.keys)) >= len(head.keys)  # else it is compacted
            for key in head.keys
        }
        missing = [n for n in range(prefix.published) if keys[n] not in written]
        if missing and (idle or hurry or len(missing) >= MANY):
            try:
                blocks = self._copied(sight, prefix, missing, 0.0 if hurry else self._pace)
                self._store.put_blocks(kept, [keys[n] for n in missing], blocks)
            except _ChangedError:
                return False
            missing = []
        self._store.drop_spare(kept, wanted)
        return not missing and prefix.published in (0, len(keys))

    def _copied(
        self, sight: Sight, prefix: Prefix, numbers: list[int], pace: float
    ) -> Iterator[memoryview]:
        """Yield the bytes of blocks, a piece between two steps; a piece is valid until the next."""
        until = numbers[-1] + 1

        def copy(wanted: list[int], _engine: Engine) -> int:
            sequence, began = sight(), time.perf_counter()
            if sequence is None or not prefix.has(sequence, until):
                return 0
            for count, number in enumerate(wanted):
                if time.perf_counter() - began > PAUSE:
                    return count
                self._cache.save(sequence.blocks[number], self._buffer[count])
            return len(wanted)

        done = 0
        while done < len(numbers):
            piece = partial(copy, numbers[done : done + PIECE])
            count = self._ask(piece)
            if count == 0:
                raise _ChangedError
            yield self._rows[:count].reshape(-1).data
            done += count
            time.sleep(count * pace)

    def _ask(self, question: Callable[[Engine], Answer]) -> Answer:
        """Return what `question` finds between two steps."""
        if not self._worker.is_alive:
            raise CapacityError("the engine has stopped: see the log")
        answer: Future[Answer] = Future()

        def chore(engine: Engine) -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question(engine))
                except BaseException as error:  # it is ours, not the engine's
                    answer.set_exception(error)

        self._worker.submit_chore(chore)
        try:
            return answer.result(PATIENCE)
        except TimeoutError:
            answer.cancel()
            raise CapacityError(
                f"the engine did not come to a snapshot within {PATIENCE:g} s: see the log"
            ) from None


def _look(sight: Sight) -> Prefix | None:
    sequence = sight()
    return None if sequence is None else Prefix.of(sequence)
