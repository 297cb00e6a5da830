"""Random log-normal factors of step times, drawn many at a time because a single draw costs as much as a hundred.

Guaranteed: one seed is one sequence of factors, however far a caller looks ahead.
"""

from __future__ import annotations

import numpy as np

from aerie_lab.engine.performance_model.acceptance import FloatArray

_FACTORS_PER_DRAW = 512


class StepTimeNoise:
    """The log-normal factors on the times of an engine's steps, one after the other, drawn many at a time."""

    def __init__(self, log_sd: float, random: np.random.Generator) -> None:
        self._log_sd = log_sd
        self._random = random
        self._factors: FloatArray = np.ones(1)
        self._position = 0

    def peek(self, count: int) -> FloatArray:
        """Return the factor of the step in flight, and `count - 1` of those that follow."""
        while self._position + count > len(self._factors):
            block = np.exp(self._log_sd * self._random.standard_normal(_FACTORS_PER_DRAW))
            self._factors, self._position = np.concatenate((self._factors[self._position :], block)), 0
        return self._factors[self._position : self._position + count]

    def skip(self, steps: int) -> None:
        """Skip the factors of so many steps."""
        self._position += steps

    def next_factor(self) -> float:
        """Return the factor of the next step, which is then in flight."""
        if self._position + 1 >= len(self._factors):
            self.peek(2)
        self._position += 1
        return self._factors.item(self._position)
