"""The outbox: one thread writes to its file, in groups.

What the thread is given is in the file (and so outlives a `kill -9`) as soon as it comes to it. A
group with a driver's words is on the disk itself (and so outlives a power loss) within
`SYNC_WITHIN`, or at once if somebody waits for it. Telemetry is not synced. While the disk takes
nothing, writes wait in memory and the outbox is red.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.errors import LinkError
from shared.outbox.changes import Bounds, Change, Counts, Item, Kind, Put, num_bytes
from shared.outbox.file import OutboxFile

log = logging.getLogger(__name__)

SYNC_WITHIN = 0.1
"""Seconds after which words are on the disk itself."""
RETRY = 1.0
"""Seconds between two tries to write while the disk takes nothing."""
TRIM_EVERY = 600.0
"""Seconds between two looks for items that are too old."""


@dataclass(frozen=True, slots=True)
class _Write:
    changes: tuple[Change, ...]
    urgent: bool
    then: Callable[[], object] | None


class Outbox:
    """An open outbox; its methods may be called from any thread.

    Args:
        path: the file; its folder must exist.
        clock: seconds since 1970.
        on_lost: called from the writing thread when what was written before may be gone (the file
            was damaged, or memory ran out while the disk took nothing): write it anew.

    Raises:
        LinkError: the file cannot be opened, and cannot be replaced either.
        ConfigError: it was written by a later version.
    """

    def __init__(
        self,
        path: Path,
        bounds: Bounds | None = None,
        *,
        clock: Callable[[], float] = time.time,
        on_lost: Callable[[], object] = lambda: None,
    ) -> None:
        self._bounds, self._on_lost = bounds or Bounds(), on_lost
        self.counts = Counts()
        self.trouble = ""
        """Why the outbox is red; empty: it is not."""
        self._pinned: frozenset[str] = frozenset()
        self._queue: list[_Write] = []
        self._held: tuple[Change, ...] = ()
        """Refused by the disk."""
        self._changed = threading.Condition()
        self._closing = False
        self._sync_at: float | None = None
        self._trim_at = 0.0
        self._file = OutboxFile(path, self._bounds, self.counts, clock)
        self._using = threading.Lock()
        """Held by the thread that is at the file."""
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def items(self) -> list[Item]:
        """Return everything in the file, stream by stream, in order.

        A damaged item is as good as a damaged file: it is set aside, and nothing is returned.
        """
        with self._using:
            try:
                return self._file.items()
            except sqlite3.DatabaseError as error:
                self._file.start_over(error)
                return []

    def recall(self, name: str) -> bytes | None:
        """Return what is remembered under a name; nothing is, if the file is damaged."""
        with self._using:
            try:
                return self._file.recall(name)
            except sqlite3.DatabaseError as error:
                self._file.start_over(error)
                return None

    def pin(self, stream: str) -> None:
        """Never drop this stream: it is in use."""
        self._pinned |= {stream}

    def unpin(self, stream: str) -> None:
        """It is in use no more."""
        self._pinned -= {stream}

    def write(
        self, *changes: Change, urgent: bool = False, then: Callable[[], object] | None = None
    ) -> None:
        """Have changes written, behind earlier ones.

        Args:
            urgent: on the disk itself, at once.
            then: called from the writing thread when they are there, or when the disk refused them
                and they wait in memory: the outbox is red then.
        """
        with self._changed:
            self._queue.append(_Write(changes, urgent, then))
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, and close the file."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._file.close()

    # --- the writing thread

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                if not self._queue and not self._closing:
                    self._changed.wait(self._patience())
                group, self._queue = self._queue, []
                closing = self._closing
            with self._using:
                self._write_group(group, closing=closing)
            for write in group:
                if write.then is not None:
                    write.then()

    def _patience(self) -> float | None:
        if self._held:
            return RETRY
        if self._sync_at is not None:
            return max(0.0, self._sync_at - time.monotonic())
        return None

    def _write_group(self, group: list[_Write], *, closing: bool) -> None:
        changes = self._held + tuple(change for write in group for change in write.changes)
        now = time.monotonic()
        if self._sync_at is None and any(_is_words(change) for change in changes):
            self._sync_at = now + SYNC_WITHIN
        due = self._sync_at is not None and (closing or now >= self._sync_at)
        sync = due or any(write.urgent for write in group)
        try:
            if changes or sync:
                self._file.commit(changes, sync=sync)
            if self._file.is_full or now >= self._trim_at:
                self._trim_at = now + TRIM_EVERY
                self._file.trim(self._pinned)
        except sqlite3.OperationalError as error:
            self._hold(changes, error)
        except sqlite3.DatabaseError as error:
            self._replace_file(error)
            self._hold(changes, error)
        else:
            self._held = ()
            self._sync_at = None if sync else self._sync_at
            self.counts.written += len(changes)
            self._colour()

    def _replace_file(self, damage: sqlite3.Error) -> None:
        try:
            self._file.start_over(damage)
        except LinkError as error:  # tried again with the next write
            log.error("%s", error)
        self._on_lost()

    def _colour(self) -> None:
        """Say whether the file has room for what cannot be dropped."""
        path, before = self._file.path, self.trouble
        self.trouble = ""
        if self._file.is_full:
            self.trouble = (
                f"{path}: open conversations alone take {self._file.size} bytes of "
                f"{self._bounds.num_bytes}: end one, or raise the bound"
            )
        if self.trouble and not before:
            log.error(self.trouble)
        elif before and not self.trouble:
            log.warning("%s: writing again", path)

    def _hold(self, changes: tuple[Change, ...], error: sqlite3.Error) -> None:
        """The disk took nothing: keep the changes in memory, the most valuable if not all fit."""
        self.counts.failures += 1
        if not self.trouble:
            log.error(
                "%s: %s; what is written waits in memory: free space on this disk",
                self._file.path,
                error,
            )
        self.trouble = f"{self._file.path}: {error}"
        self._held = changes
        for kind in reversed(Kind):
            if num_bytes(self._held) <= self._bounds.memory:
                return
            kept = tuple(c for c in self._held if not (isinstance(c, Put) and c.item.kind is kind))
            self.counts.dropped[kind] += len(self._held) - len(kept)
            self._held = kept
        self._on_lost()


def _is_words(change: Change) -> bool:
    return isinstance(change, Put) and change.item.kind is Kind.WORDS
