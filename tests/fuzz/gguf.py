"""GGUF files: a model file that somebody gave away."""

import tempfile
from functools import cache
from pathlib import Path

from gguf.constants import GGMLQuantizationType as Kind

from shared.errors import ModelError
from shared.nn.checkpoint import load_checkpoint
from tests.small_llama import random_llama, write_gguf
from tests.test_shared_nn_damage import HOSTILE


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="deltarelay-fuzz-"))


def seeds() -> list[bytes]:
    """A whole model, its header alone, and files that were made to hurt."""
    whole = write_gguf(_folder() / "seed.gguf", random_llama(), kind=Kind.Q4_1).read_bytes()
    return [whole, *(content for content, _ in HOSTILE.values() if len(content) < 1 << 16)]


def target(data: bytes) -> None:
    """It is a checkpoint, or one error that names the file."""
    path = _folder() / "m.gguf"
    path.write_bytes(data)
    try:
        checkpoint = load_checkpoint(path)
    except ModelError as error:
        if str(path) not in str(error):
            raise AssertionError(f"no path in {error}") from error
        return
    assert set(checkpoint.weights) >= set(checkpoint.config.shapes())
