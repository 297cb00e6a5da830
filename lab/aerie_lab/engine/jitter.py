"""The chance in step times: log-normal factors, drawn many at a time because a single draw costs as much as a hundred.

Guaranteed: one seed is one sequence of factors, however far a caller looks ahead.
"""

from __future__ import annotations

import numpy as np

from aerie_lab.engine.acceptance import Floats

_BLOCK = 512


class Jitter:
    """The log-normal factors on the times of an engine's steps, one after the other, drawn many at a time."""

    def __init__(self, noise: float, random: np.random.Generator) -> None:
        self._noise = noise
        self._random = random
        self._factors: Floats = np.ones(1)
        self._at = 0

    def ahead(self, count: int) -> Floats:
        """The factor of the step in flight, and `count - 1` of those that follow."""
        while self._at + count > len(self._factors):
            block = np.exp(self._noise * self._random.standard_normal(_BLOCK))
            self._factors, self._at = np.concatenate((self._factors[self._at :], block)), 0
        return self._factors[self._at : self._at + count]

    def move(self, steps: int) -> None:
        """So many steps later another one is in flight."""
        self._at += steps

    def next(self) -> float:
        """The factor of the next step, which is then in flight."""
        if self._at + 1 >= len(self._factors):
            self.ahead(2)
        self._at += 1
        return self._factors.item(self._at)
