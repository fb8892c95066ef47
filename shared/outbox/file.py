"""The SQLite file of an outbox: changes in, items out, bounds kept. One thread at a time.

WAL mode: https://sqlite.org/wal.html. A commit with `synchronous = NORMAL` is in the kernel's hands
and outlives the process; one with FULL, and all before it, is on the disk
(https://sqlite.org/pragma.html).
"""

import contextlib
import logging
import sqlite3
import zlib
from collections.abc import Callable, Collection, Generator, Iterable
from pathlib import Path

from shared.errors import ConfigError, LinkError
from shared.outbox.changes import Bounds, Change, Counts, Cut, Item, Kind, Put, Remember

log = logging.getLogger(__name__)

_VERSION = 1
_MARK = _VERSION | (_VERSION ^ 0xFFFF) << 16 & 0x7FFFFFFF
"""Kept as SQLite's `user_version`: the halves contradict each other, so that damage is seen."""
_SCHEMA = """
CREATE TABLE items (
    stream TEXT NOT NULL, seq INTEGER NOT NULL, kind INTEGER NOT NULL, at REAL NOT NULL,
    crc INTEGER NOT NULL, payload BLOB NOT NULL, PRIMARY KEY (stream, seq)
) WITHOUT ROWID;
CREATE INDEX items_by_age ON items (kind, at);
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""


class OutboxFile:
    """An open file.

    Args:
        clock: seconds since 1970.
        counts: told of what is dropped and of files set aside.

    Raises:
        LinkError: it cannot be opened, and cannot be replaced either.
        ConfigError: it was written by a later version.
    """

    def __init__(
        self, path: Path, bounds: Bounds, counts: Counts, clock: Callable[[], float]
    ) -> None:
        self.path = path
        self._bounds, self._counts, self._clock = bounds, counts, clock
        self.size = 0
        """Bytes of all payloads."""
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            self.start_over(error)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def items(self) -> list[Item]:
        """Return all items, stream by stream, in order.

        Raises:
            sqlite3.DatabaseError: one of them is damaged.
        """
        query = "SELECT kind, stream, seq, crc, payload FROM items ORDER BY stream, seq"
        items: list[Item] = []
        with _nonsense_is_damage():
            for kind, stream, seq, crc, payload in self._db.execute(query):
                if zlib.crc32(payload) != crc:
                    raise sqlite3.DatabaseError(f"item {seq} of {stream} is damaged")
                items.append(Item(Kind(kind), stream, seq, payload))
        return items

    def recall(self, name: str) -> bytes | None:
        """Return what is remembered under a name.

        Raises:
            sqlite3.DatabaseError: the file is damaged.
        """
        with _nonsense_is_damage():
            row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
            return None if row is None else bytes(row[0])

    def commit(self, changes: Iterable[Change], *, sync: bool) -> None:
        """Make changes, all or none of them; `sync`: they and all before are on the disk then.

        Raises:
            sqlite3.OperationalError: the disk takes nothing.
            sqlite3.DatabaseError: the file is damaged.
        """
        db, size = self._db, self.size
        db.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
        db.execute("BEGIN IMMEDIATE")
        try:
            with _nonsense_is_damage():
                for change in changes:
                    self._apply(change)
            if sync:  # a commit without a change would sync nothing
                db.execute("INSERT OR REPLACE INTO facts VALUES ('synced', ?)", (b"",))
            db.execute("COMMIT")
        except sqlite3.DatabaseError:
            self.size = size
            with contextlib.suppress(sqlite3.DatabaseError):
                db.execute("ROLLBACK")
            raise

    def trim(self, pinned: Collection[str]) -> None:
        """Drop what is too old, and then what is worth least until the rest is in bounds.

        Raises:
            sqlite3.DatabaseError: the file is damaged, or the disk takes nothing.
        """
        before = self._counts.dropped.total()
        with _nonsense_is_damage():
            self._trim(pinned)
        dropped = self._counts.dropped.total() - before
        if dropped:
            log.warning("%s: full or too old: dropped %d items undelivered", self.path, dropped)

    @property
    def is_full(self) -> bool:
        """It holds more than it may."""
        return self.size > self._bounds.num_bytes

    def start_over(self, error: sqlite3.Error) -> None:
        """Set a damaged file aside, and begin another.

        Raises:
            LinkError: that fails, too.
        """
        bad = self.path.with_name(f"{self.path.name}.bad")
        log.error("%s is damaged (%s): set aside as %s, begun anew", self.path, error, bad.name)
        self._counts.bad_files += 1
        if hasattr(self, "_db"):
            self._db.close()
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").replace(f"{bad}{suffix}")
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as again:
            raise LinkError(f"{self.path}: {again}; check the disk") from None

    # --- inside

    def _open(self) -> sqlite3.Connection:
        try:  # the caller sees to it that one thread at a time is here
            db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        except sqlite3.OperationalError as error:
            raise LinkError(f"{self.path}: {error}; check the folder and its rights") from None
        try:
            with _nonsense_is_damage():
                self._prepare(db)
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA busy_timeout = 5000")
        mark = db.execute("PRAGMA user_version").fetchone()[0]
        version = mark & 0xFFFF
        if mark != 0 and mark >> 16 != (version ^ 0xFFFF) & 0x7FFF:
            raise sqlite3.DatabaseError(f"version mark {mark:#010x} is none")
        if version > _VERSION:
            raise ConfigError(
                f"{self.path}: written by version {version} of the outbox, this is {_VERSION}: "
                "update, or move the file away"
            )
        db.execute("PRAGMA journal_mode = WAL")
        if mark == 0:
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_MARK}; COMMIT;")
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        query = "SELECT coalesce(sum(length(payload)), 0) FROM items"
        self.size = int(db.execute(query).fetchone()[0])
        self.path.chmod(0o600)

    def _apply(self, change: Change) -> None:
        match change:
            case Put(item):
                self._delete("stream = ? AND seq = ?", (item.stream, item.seq))
                crc = zlib.crc32(item.payload)
                row = (item.stream, item.seq, int(item.kind), self._clock(), crc, item.payload)
                self._db.execute("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)", row)
                self.size += len(item.payload)
            case Cut(stream, seq):
                self._delete("stream = ? AND seq >= ?", (stream, seq))
            case Remember(name, value):
                self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def _trim(self, pinned: Collection[str]) -> None:
        too_old = self._clock() - self._bounds.age
        for kind in (Kind.TELEMETRY, Kind.FEATURES, Kind.SUMMARY):
            self._drop(kind, "kind = ? AND at < ?", (int(kind), too_old))
            while self.is_full and self._drop_oldest(kind):
                pass
        for stream, newest in self._streams_of_words():
            if (self.is_full or newest < too_old) and stream not in pinned:
                self._drop(Kind.WORDS, "stream = ?", (stream,))

    def _delete(self, where: str, values: tuple[object, ...]) -> int:
        """Delete items; return how many."""
        query = f"DELETE FROM items WHERE {where} RETURNING length(payload)"
        sizes = [row[0] for row in self._db.execute(query, values).fetchall()]
        self.size -= sum(sizes)
        return len(sizes)

    def _drop(self, kind: Kind, where: str, values: tuple[object, ...]) -> None:
        """Delete items that nobody has got yet."""
        count = self._delete(where, values)
        if count:
            self._counts.dropped[kind] += count

    def _drop_oldest(self, kind: Kind) -> bool:
        """Drop up to a hundred of a kind; return whether there were any."""
        query = "SELECT stream, seq FROM items WHERE kind = ? ORDER BY at LIMIT 100"
        oldest = self._db.execute(query, (int(kind),)).fetchall()
        for place in oldest:
            if self.is_full:
                self._drop(kind, "stream = ? AND seq = ?", tuple(place))
        return bool(oldest)

    def _streams_of_words(self) -> list[tuple[str, float]]:
        """Return streams of words with the time of their newest item, the oldest first."""
        query = "SELECT stream, max(at) FROM items WHERE kind = 0 GROUP BY stream ORDER BY max(at)"
        return self._db.execute(query).fetchall()


@contextlib.contextmanager
def _nonsense_is_damage() -> Generator[None, None, None]:
    """Values of another kind than were written say that the file is damaged."""
    try:
        yield
    except (ValueError, TypeError, OverflowError) as error:
        raise sqlite3.DatabaseError(str(error)) from None
