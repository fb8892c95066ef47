"""Orders to forget a device: a command leaves one in the registry, every running decoder carries it
out and confirms.

A decoder that runs holds a lock on a file of its own, which the kernel lets go of however it ends.
So a command knows for whose confirmation it has to wait, without heartbeats and whatever died.
"""

import fcntl
import os
import time
from contextlib import suppress
from dataclasses import dataclass

from cloud.access.registry import Registry
from shared.errors import ConfigError

KEEP = 3600
"""Seconds after which an order that nobody took back is dropped."""
_PREFIX = "running-"


@dataclass(frozen=True, slots=True)
class Order:
    """Forget a device."""

    id: int
    device: str


class Orders:
    """The orders in a registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    # --- a decoder's side

    def waiting_for(self, decoder: str) -> list[Order]:
        """Return the orders that a decoder has not confirmed."""
        with self._registry.asking():
            rows = self._registry.sql.execute(
                "SELECT id, device FROM orders WHERE id NOT IN "
                "(SELECT order_id FROM confirmations WHERE decoder = ?) ORDER BY id",
                (decoder,),
            ).fetchall()
        return [Order(*row) for row in rows]

    def confirm(self, order: Order, decoder: str, conversations: int) -> None:
        """Say that a decoder has carried out an order, and how many conversations went."""
        with self._registry.writing():
            self._registry.sql.execute(
                "INSERT OR IGNORE INTO confirmations SELECT id, ?, ? FROM orders WHERE id = ?",
                (decoder, conversations, order.id),
            )

    # --- a command's side

    def give(self, device: str) -> Order:
        """Leave an order for the decoders that run."""
        now = int(time.time())
        with self._registry.writing():
            self._registry.sql.execute("DELETE FROM orders WHERE created < ?", (now - KEEP,))
            row = self._registry.sql.execute(
                "INSERT INTO orders (device, created) VALUES (?, ?)", (device, now)
            )
        assert row.lastrowid is not None
        return Order(row.lastrowid, device)

    def take_back(self, order: Order) -> None:
        """Remove an order."""
        with self._registry.writing():
            self._registry.sql.execute("DELETE FROM orders WHERE id = ?", (order.id,))

    def confirmed(self, order: Order) -> dict[str, int]:
        """Return who has carried it out, and how many conversations went there."""
        with self._registry.asking():
            return dict(
                self._registry.sql.execute(
                    "SELECT decoder, conversations FROM confirmations WHERE order_id = ?",
                    (order.id,),
                ).fetchall()
            )

    def running(self) -> set[str]:
        """Return the decoders that run with this state folder; what dead ones left is removed."""
        found: set[str] = set()
        for path in self._registry.folder.glob(f"{_PREFIX}*"):
            with suppress(FileNotFoundError), path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.add(path.name.removeprefix(_PREFIX))
                else:
                    path.unlink(missing_ok=True)
        return found


class Attendance:
    """A running decoder's file, locked until `close`.

    Raises:
        ConfigError: the state folder cannot be written to.
    """

    def __init__(self, registry: Registry, decoder: str) -> None:
        self._path = registry.folder / f"{_PREFIX}{decoder}"
        self._file = self._lock()
        while not os.fstat(self._file).st_nlink:  # a command took it for a dead decoder's
            os.close(self._file)
            self._file = self._lock()

    def close(self) -> None:
        """The decoder ends."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _lock(self) -> int:
        try:
            file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from None
        fcntl.flock(file, fcntl.LOCK_EX)
        return file
