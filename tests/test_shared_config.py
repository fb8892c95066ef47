"""Settings: what is misspelt is named with its path."""

from pathlib import Path

import msgspec
import pytest

from shared.config import load_settings
from shared.errors import ConfigError


class Inner(msgspec.Struct, frozen=True):
    size: int = 1


class Outer(msgspec.Struct, frozen=True):
    name: str = ""
    inner: Inner = Inner()
    listen: list[str] = []


def test_a_file_and_changes_are_laid_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('name = "x"\n[inner]\nsize = 2\n')
    assert load_settings(Outer) == Outer()
    assert load_settings(Outer, path) == Outer("x", Inner(2))
    changed = load_settings(Outer, path, ["inner.size=3", 'listen=["a"]', "name=plain word"])
    assert changed == Outer("plain word", Inner(3), ["a"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[inner]\nsiez = 2\n", r"unknown key inner\.siez; did you mean inner\.size\?"),
        ("nome = 1\n", r"unknown key nome; did you mean name\?"),
        ("inner = 5\n", "inner"),
        ("[inner]\nsize = 'two'\n", r"\$\.inner\.size"),
        ("name = \n", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_settings(Outer, path)


@pytest.mark.parametrize("change", ["name", "=3", "name.deep=3", "inner.size.deep=1"])
def test_a_change_of_another_form_is_refused(change: str) -> None:
    with pytest.raises(ConfigError):
        load_settings(Outer, None, ["name=x", "inner.size=2", change])


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(Outer, tmp_path / "none.toml")
