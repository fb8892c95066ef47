"""PEFT folders: an adapter that somebody gave away."""

import struct
import tempfile
from functools import cache
from pathlib import Path

from shared.errors import ModelError
from shared.peft_folder import CONFIG, TENSORS, read_adapter
from tests.small_adapters import adapter_folder, edit_config

_LENGTH = struct.Struct("<H")
"""An input is the length of adapter_config.json, that file, and the tensors."""


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="deltarelay-fuzz-"))


def _input(folder: Path) -> bytes:
    config = (folder / CONFIG).read_bytes()
    return _LENGTH.pack(len(config)) + config + (folder / TENSORS).read_bytes()


def seeds() -> list[bytes]:
    """Adapters with and without patterns."""
    plain = adapter_folder(_folder() / "plain", 1, rank=1, layers=(0,), parts=("q", "down"))
    other = adapter_folder(_folder() / "other", 2, rank=2, layers=(1,), parts=("v",))
    edit_config(other, rank_pattern={r".*\.v_proj": 2}, alpha_pattern={"layers.[0-9]+.x": 1.5})
    return [_input(plain), _input(other)]


def target(data: bytes) -> None:
    """It is an adapter, or one error that names the file."""
    if len(data) < _LENGTH.size:
        return
    (length,) = _LENGTH.unpack_from(data)
    folder = _folder() / "fuzzed"
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_bytes(data[_LENGTH.size :][:length])
    (folder / TENSORS).write_bytes(data[_LENGTH.size :][length:])
    try:
        adapter = read_adapter(folder)
    except ModelError as error:
        if str(folder) not in str(error):
            raise AssertionError(f"no path in {error}") from error
        return
    assert adapter.digest
    assert adapter.rank >= 1
