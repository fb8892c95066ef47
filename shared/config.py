"""Settings: a TOML file and `--set a.b=c`, into a frozen struct; unknown keys are refused."""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.errors import ConfigError

Settings = TypeVar("Settings", bound=msgspec.Struct)


def load_settings(
    kind: type[Settings], path: Path | None = None, changes: Iterable[str] = ()
) -> Settings:
    """Return `kind` from the TOML file at `path`, with `changes` (`a.b=c`) laid over it.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown, a value has the wrong type;
            the message names the key's path.
    """
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
    place = str(path) if path is not None else "--set"
    for change in changes:
        _lay_over(table, change)
    _refuse_unknown(kind, table, place, "")
    try:
        return msgspec.convert(table, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}") from None


def _lay_over(table: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set {name}: expected key=value or section.key=value")
    *sections, key = name.strip().split(".")
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {name}: {section!r} is a value, not a section")
        table = inner
    try:
        table[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[key] = text  # a bare word is a string


def _refuse_unknown(kind: Any, table: dict[str, Any], place: str, prefix: str) -> None:
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {prefix}{close[0]!s}?" if close else ""
            names = ", ".join(sorted(known))
            raise ConfigError(f"{place}: unknown key {prefix}{key}{hint} (known here: {names})")
        inner = known[key]
        if (
            isinstance(value, dict)
            and isinstance(inner, type)
            and issubclass(inner, msgspec.Struct)
        ):
            _refuse_unknown(inner, value, place, f"{prefix}{key}.")
