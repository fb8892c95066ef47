"""How long a step will take, learned from the steps that ran. No torch, no clock.

seconds = mood * (base + rows * row + keys * key), where keys counts what all rows attend to. Steps
of about the same shape are averaged in a cell, and the three weights, none below 0, are a least
squares fit to the cells: so a shape that has not come for a while is not forgotten, however often
another one comes, and noise in many steps of one shape does not tilt the rest. The mood is how
fast the machine is now; it follows within some dozen steps.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloud.engine.batch import Batch

_MOOD = 0.05
"""Part of a surprise that is put down to the machine's mood."""
_OUTLIER = 4.0
"""A step more than so many times longer than predicted, or shorter, surprises no more than that."""
_CELL = 0.1
"""Least weight of a new step in its cell's averages."""
_ROW, _KEY = 1e-2, 1e-5
"""Make rows and keys numbers of the same size as the base."""


@dataclass(slots=True)
class _Cell:
    """Averages over the steps of about one shape."""

    features: NDArray[np.float64]
    seconds: float
    count: int = 1

    def take(self, features: NDArray[np.float64], seconds: float) -> None:
        self.count += 1
        part = max(1 / self.count, _CELL)
        self.features = self.features + part * (features - self.features)
        self.seconds += part * (seconds - self.seconds)


class StepTime:
    """Predicts seconds from the shape of a step."""

    def __init__(self) -> None:
        self._weights = np.zeros(3)
        self._mood = 1.0
        self._cells: dict[tuple[int, int], _Cell] = {}
        """By the powers of two below rows and keys."""
        self.num_steps = 0

    def observe(self, batch: Batch, seconds: float) -> None:
        """Learn from a step that took so long."""
        rows, keys = batch.num_tokens, batch.num_keys
        shape = rows.bit_length(), keys.bit_length()
        expected = self.predict(rows, keys)
        if expected > 0 and seconds > 0 and shape in self._cells:
            surprise = min(max(seconds / expected, 1 / _OUTLIER), _OUTLIER)
            self._mood *= surprise**_MOOD
        features, calm = _features(rows, keys), seconds / self._mood
        if (cell := self._cells.get(shape)) is None:
            self._cells[shape] = _Cell(features, calm)
        else:
            cell.take(features, calm)
        self._weights = _fit(list(self._cells.values()))
        self.num_steps += 1

    def predict(self, rows: int, keys: int) -> float:
        """Return the seconds of a step, at least 0."""
        return self._mood * float(_features(rows, keys) @ self._weights)


def _features(rows: int, keys: int) -> NDArray[np.float64]:
    return np.array([1.0, rows * _ROW, keys * _KEY])


def _fit(cells: list[_Cell]) -> NDArray[np.float64]:
    """Return the weights, none below 0, of the least relative error; well seen cells count more."""
    seconds = np.array([cell.seconds for cell in cells])
    sure = np.sqrt([min(cell.count, 1 / _CELL) for cell in cells]) / np.maximum(seconds, 1e-9)
    features = np.array([cell.features for cell in cells]) * sure[:, None]
    weights, used = np.zeros(3), np.array([True, True, True])
    while used.any():
        weights[:] = 0.0
        weights[used] = np.linalg.lstsq(features[:, used], seconds * sure, rcond=None)[0]
        if (weights >= 0).all():
            break
        used[weights.argmin()] = False  # by what it takes off, it is not there
    return weights
