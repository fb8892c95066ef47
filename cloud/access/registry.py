"""The registry of a decoder's state folder: API keys and devices, in SQLite.

Commands write to it while decoders read; a decoder asks cheaply whether there is something new.
"""

import os
import sqlite3
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex, token_urlsafe
from typing import Self

from cloud.access.roster import DeviceRule, Key, Roster, digest_of
from cloud.settings import LimitSettings
from shared.errors import CapacityError, ConfigError, InputError

VERSION = 1
_BUSY = 2.0
"""Seconds to wait for another writer."""
_SCHEMA = f"""
CREATE TABLE keys (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, tenant TEXT NOT NULL, digest BLOB NOT NULL UNIQUE,
    rate REAL, burst REAL, per_minute REAL, created INTEGER NOT NULL, revoked INTEGER
) STRICT;
CREATE TABLE devices (
    pattern TEXT PRIMARY KEY, tenant TEXT, created INTEGER NOT NULL, revoked INTEGER
) STRICT;
CREATE TABLE orders (
    id INTEGER PRIMARY KEY AUTOINCREMENT, device TEXT NOT NULL, created INTEGER NOT NULL
) STRICT;
CREATE TABLE confirmations (
    order_id INTEGER NOT NULL REFERENCES orders ON DELETE CASCADE, decoder TEXT NOT NULL,
    conversations INTEGER NOT NULL, PRIMARY KEY (order_id, decoder)
) STRICT;
PRAGMA user_version = {VERSION};
"""


class Registry:
    """A registry, open. A context manager; used by one thread.

    Args:
        folder: the state folder; it is made, for this user alone, if there is none.

    Raises:
        ConfigError: the folder cannot be used, or the file there is no registry of this version.
        CapacityError: (of every method) the file cannot be read or written now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "registry.db"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise ConfigError(
                f"state = {folder}: {error.strerror}; choose a folder this user may write in"
            ) from None
        self._open()

    def _open(self) -> None:
        file = self._file_now()
        self.sql = sqlite3.connect(self._path, timeout=_BUSY, isolation_level=None)
        try:
            self.sql.execute("PRAGMA foreign_keys = ON")
            self.sql.execute("PRAGMA journal_mode = WAL")
            with self.writing():
                (version,) = self.sql.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    for statement in _SCHEMA.split(";"):
                        self.sql.execute(statement)
        except (sqlite3.Error, CapacityError) as error:
            self.sql.close()
            raise ConfigError(f"{self._path}: {error}; is it a registry?") from None
        if version not in (0, VERSION):
            self.sql.close()
            raise ConfigError(
                f"{self._path}: version {version}, this program knows {VERSION}: update it"
            )
        self._file, self._seen = file, -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.sql.close()

    @contextmanager
    def writing(self) -> Generator[None, None, None]:
        """Do all of the block, or nothing."""
        with self.asking():
            self.sql.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self.sql.execute("ROLLBACK")
                raise
            self.sql.execute("COMMIT")

    @contextmanager
    def asking(self) -> Generator[None, None, None]:
        """Tell SQLite's errors as ours."""
        try:
            yield
        except sqlite3.Error as error:
            raise CapacityError(
                f"{self._path}: {error}; is its disk full, or another program busy with it?"
            ) from None

    def has_changed(self) -> bool:
        """Tell whether there is something new since the last call; true the first time.

        It costs some microseconds. A file that was put in this one's place is opened.
        """
        if self._file_now() != self._file:
            self.close()
            self._open()
        with self.asking():
            (seen,) = self.sql.execute("PRAGMA data_version").fetchone()
        before, self._seen = self._seen, int(seen)
        return self._seen != before

    def roster(self) -> Roster:
        """Return all keys and devices."""
        with self.asking():
            keys = self.sql.execute("SELECT * FROM keys ORDER BY created, rowid").fetchall()
            devices = self.sql.execute("SELECT * FROM devices ORDER BY created, rowid").fetchall()
        return Roster([_key(*row) for row in keys], [DeviceRule(*row) for row in devices])

    # --- keys

    def add_key(self, name: str, tenant: str, limit: LimitSettings | None) -> tuple[Key, str]:
        """Make a key; return what is kept of it, and the key: nobody can say it again."""
        text = f"dr_{token_urlsafe(32)}"
        key = Key(token_hex(4), name, tenant, digest_of(text), limit, int(time.time()))
        bounds = (limit.rate, limit.burst, limit.per_minute) if limit else (None, None, None)
        with self.writing():
            self.sql.execute(
                "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)",
                (key.id, key.name, key.tenant, key.digest, *bounds, key.created),
            )
        return key, text

    def revoke_key(self, key_id: str) -> None:
        """Revoke a key, for ever.

        Raises:
            InputError: there is none of this id.
        """
        with self.writing():
            found = self.sql.execute(
                "UPDATE keys SET revoked = coalesce(revoked, ?) WHERE id = ?",
                (int(time.time()), key_id),
            )
            if not found.rowcount:
                raise InputError(
                    f"no key has the id {key_id!r}: `deltarelay cloud keys list` shows them"
                )

    # --- devices

    def add_device(self, pattern: str, tenant: str | None = None) -> None:
        """Register a device, or all that a pattern matches; what was revoked may come back.

        Args:
            tenant: None: the one it was registered for, else as the settings say.
        """
        with self.writing():
            self.sql.execute(
                "INSERT INTO devices VALUES (?, ?, ?, NULL) "
                "ON CONFLICT DO UPDATE SET tenant = coalesce(excluded.tenant, tenant), "
                "revoked = NULL",
                (pattern, tenant, int(time.time())),
            )

    def revoke_device(self, pattern: str) -> None:
        """Revoke a device or a pattern, registered or not."""
        now = int(time.time())
        with self.writing():
            self.sql.execute(
                "INSERT INTO devices VALUES (?, NULL, ?, ?) "
                "ON CONFLICT DO UPDATE SET revoked = coalesce(revoked, excluded.revoked)",
                (pattern, now, now),
            )

    def _file_now(self) -> tuple[int, int]:
        try:
            status = self._path.stat()
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from None
        return status.st_dev, status.st_ino


def _key(
    key_id: str,
    name: str,
    tenant: str,
    digest: bytes,
    rate: float | None,
    burst: float | None,
    per_minute: float | None,
    created: int,
    revoked: int | None,
) -> Key:
    limit = None if rate is None else LimitSettings(rate, burst or 0.0, per_minute or 0.0)
    return Key(key_id, name, tenant, digest, limit, created, revoked)
