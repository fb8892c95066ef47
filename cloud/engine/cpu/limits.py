"""What the machine allows: how fast all threads of a team read memory."""

import time

import numba
import numpy as np
from numpy.typing import NDArray

from cloud.engine.cpu.phases import Crew, enter, leave, tasks
from cloud.engine.cpu.team import Team

_PIECE = 1 << 17
"""Words a task reads: 1 MiB."""
_PIECES = 256


@numba.njit(nogil=True, cache=True)
def _read(crew: Crew, words: NDArray[np.int64], sums: NDArray[np.int64]) -> None:
    if not enter(crew):
        return
    for piece in tasks(crew, 0, len(sums)):
        total = np.int64(0)
        for i in range(piece * _PIECE, (piece + 1) * _PIECE):
            total += words[i]
        sums[piece] = total
    leave(crew)


def read_rate(team: Team) -> float:
    """Return the bytes a second that the team reads from memory beyond every cache."""
    words, sums = np.ones(_PIECE * _PIECES, np.int64), np.empty(_PIECES, np.int64)
    best = 0.0
    for _ in range(4):
        began = time.perf_counter()
        team.run(_read, 1, words, sums)
        best = max(best, words.nbytes / (time.perf_counter() - began))
    return best
