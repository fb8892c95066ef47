"""How long a step will take, learned from the steps that ran. No torch, no clock.

seconds = base + rows * row + keys * key, where keys counts what all rows attend to: fitted by least
squares in which older steps weigh less (recursive least squares with forgetting, Haykin, Adaptive
Filter Theory, ch. 10). It follows the machine's moods within some dozen steps.
"""

import numpy as np
from numpy.typing import NDArray

from cloud.engine.batch import Batch

FORGET = 0.98
"""Weight of a step against the one after it."""
_ROW, _KEY = 1e-2, 1e-5
"""Make rows and keys numbers of the same size as the base."""


class StepTime:
    """Predicts seconds from the shape of a step."""

    def __init__(self) -> None:
        self._weights = np.zeros(3)
        self._covariance = np.eye(3) * 1e3
        self.num_steps = 0

    def observe(self, batch: Batch, seconds: float) -> None:
        """Learn from a step that took so long."""
        x = _features(batch.num_tokens, batch.num_keys)
        gain = self._covariance @ x / (FORGET + x @ self._covariance @ x)
        self._weights += gain * (seconds - x @ self._weights)
        covariance = (self._covariance - np.outer(gain, x @ self._covariance)) / FORGET
        self._covariance = np.clip(covariance, -1e6, 1e6)  # a long run of equal steps winds it up
        self.num_steps += 1

    def predict(self, rows: int, keys: int) -> float:
        """Return the seconds of a step, at least 0."""
        return max(0.0, float(_features(rows, keys) @ self._weights))


def _features(rows: int, keys: int) -> NDArray[np.float64]:
    return np.array([1.0, rows * _ROW, keys * _KEY])
