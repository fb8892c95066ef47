"""The whole step compiled for the CPU: weights as stored, every core, one program.

`tiles` lays weights out, `simd` has the inner loops, `matmul` and `attention` are what a layer
consists of, `phases` and `team` spread it over threads, `step` is the program, `runner` its door.

Every value is computed in an order that depends on nothing but its place in the model: not on how
many rows run together, nor on which thread takes them. So a reply is the same to the last bit
however its words arrived, after an eviction, and in any company.
"""

import shutil
import time
from pathlib import Path

import numba

from cloud.engine.cpu.features import HAS_AMX
from shared.digest import sha256
from shared.paths import cache_folder

_SOURCES = sorted(Path(__file__).parent.glob("*.py"))
_KEY = sha256(b"".join(path.read_bytes() for path in _SOURCES))[:16] + "-amx" * HAS_AMX
COMPILED = cache_folder() / "kernels" / _KEY
"""Where compiled programs are kept: a change of any of our sources makes all of them new."""
setattr(numba.config, "CACHE_DIR", str(COMPILED))  # noqa: B010
_KEPT_DAYS = 30


def forget_old_programs() -> None:
    """Remove what other versions compiled and nobody has used for a month."""
    COMPILED.mkdir(parents=True, exist_ok=True)
    COMPILED.touch()
    for folder in COMPILED.parent.iterdir():
        if time.time() - folder.stat().st_mtime > _KEPT_DAYS * 86400:
            shutil.rmtree(folder, ignore_errors=True)
