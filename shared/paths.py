"""Where this user's sockets and caches are."""

import os
from pathlib import Path

from shared.errors import ConfigError


def default_socket() -> Path:
    """Return where a decoder of this user listens by default, in this user's own folder.

    Raises:
        ConfigError: the folder is not this user's alone.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) if runtime else Path(f"/tmp/deltarelay-{os.getuid()}")
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{folder} must be this user's and writable by nobody else: somebody else could listen "
            "there; set XDG_RUNTIME_DIR, or name another socket"
        )
    return folder / "deltarelay.sock"


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/deltarelay`, by default below ~/.cache."""
    return _folder("XDG_CACHE_HOME", ".cache")


def state_folder() -> Path:
    """Return `$XDG_STATE_HOME/deltarelay`, by default below ~/.local/state."""
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, default: str) -> Path:
    root = Path(os.environ.get(variable, ""))
    return (root if root.is_absolute() else Path.home() / default) / "deltarelay"
