"""How much work waits for the engine. No torch, no clock."""

from collections.abc import Iterable
from dataclasses import dataclass

from cloud.engine.blocks import BlockPool
from cloud.engine.pace import StepTime
from cloud.engine.sequence import Lane, Sequence

_ROWS = 64
"""Tokens of the step by which time is predicted."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits."""

    seconds: float
    """Predicted, for all tokens that wait to be prefilled; drafts do not count."""
    held: float
    """Part of the pool whose blocks belong to sequences with something to do, 0 to 1."""


def backlog_of(sequences: Iterable[Sequence], pool: BlockPool, times: StepTime) -> Backlog:
    """Return what waits for an engine."""
    tokens = keys = blocks = 0
    for sequence in sequences:
        if (left := sequence.remaining) == 0:
            continue
        blocks += len(sequence.blocks)
        if not sequence.decoding and sequence.lane is not Lane.AHEAD:
            tokens += left
            keys += left * (sequence.cached + left // 2)
    seconds = 0.0
    if tokens:
        seconds = times.predict(_ROWS, keys * _ROWS // tokens) * tokens / _ROWS
    return Backlog(seconds, min(1.0, blocks / pool.num_blocks))
