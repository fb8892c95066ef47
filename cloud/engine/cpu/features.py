"""What this processor, and this process on it, can do."""

import ctypes
import platform

import llvmlite.binding as llvm

FEATURES = llvm.get_host_cpu_features()

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): Linux wants to be asked first."""


def _may_use_amx() -> bool:
    if not FEATURES.get("amx-int8") or platform.system() != "Linux":
        return False
    answer: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return answer == 0


HAS_AMX = _may_use_amx()
"""This process may use the matrix unit, from all of its threads."""
