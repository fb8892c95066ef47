"""Where this user's sockets and caches are."""

import os
from pathlib import Path


def default_socket() -> Path:
    """Return where a decoder of this user listens by default, in this user's own folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) if runtime else Path(f"/tmp/deltarelay-{os.getuid()}")
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / "deltarelay.sock"


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/deltarelay`, by default below ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (root if root.is_absolute() else Path.home() / ".cache") / "deltarelay"
