"""Files that are complete or not there, in a folder that is one process's own."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import BinaryIO

from shared.errors import ConfigError

NEW = ".new"
"""Ends the name of a file that is not complete."""


def own_folder(root: Path) -> int:
    """Make the folder and lock it; return the lock's descriptor."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"snapshots = {str(root)!r}: {error.strerror}: name another") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"snapshots = {str(root)!r}: another decoder uses this folder: name another"
        ) from None
    return lock


@contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """Open a file that takes its name when the block is left without an error."""
    new = path.with_name(path.name + NEW)
    try:
        with open(new, "wb", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
            yield file
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def remove_conversation(folder: Path) -> None:
    """Delete a conversation's folder, and its device's if that was the last one."""
    rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
