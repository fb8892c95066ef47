"""Where sockets and caches are, and whose folders are good enough."""

import os
from pathlib import Path

import pytest

from shared import paths
from shared.errors import ConfigError
from shared.paths import cache_folder, default_socket, state_folder


def test_folders_follow_the_environment_and_have_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, default, folder in (
        ("XDG_CACHE_HOME", ".cache", cache_folder),
        ("XDG_STATE_HOME", ".local/state", state_folder),
    ):
        monkeypatch.setenv(variable, "/var/somewhere")
        assert folder() == Path("/var/somewhere/deltarelay")
        for useless in ("", "relative"):
            monkeypatch.setenv(variable, useless)
            assert folder() == tmp_path / default / "deltarelay"


def test_the_default_socket_is_in_a_folder_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runtime"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert default_socket() == folder / "deltarelay.sock"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="writable by nobody else"):
        default_socket()
    folder.chmod(0o700)
    another = os.getuid() + 1
    monkeypatch.setattr(paths.os, "getuid", lambda: another)
    with pytest.raises(ConfigError, match="must be this user's"):
        default_socket()


def test_a_link_in_the_place_of_the_folder_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of somebody").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "of somebody")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(link))
    with pytest.raises(ConfigError, match="must be this user's"):
        default_socket()
