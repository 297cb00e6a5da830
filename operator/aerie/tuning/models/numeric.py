"""The few numerics that the models share. Randomness always comes in as a generator that the caller has seeded."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.integer[Any]]


def logit(share: FloatArray) -> FloatArray:
    """Of shares kept inside (0, 1)."""
    kept = np.clip(share, 1e-4, 1 - 1e-4)
    found: FloatArray = np.log(kept) - np.log1p(-kept)
    return found


def logistic(x: FloatArray) -> FloatArray:
    """Its inverse."""
    found: FloatArray = 1.0 / (1.0 + np.exp(-np.clip(x, -50.0, 50.0)))
    return found


def draw_normal(mean: FloatArray, covariance: FloatArray, draws: int, random: np.random.Generator) -> FloatArray:
    """Draws of a normal vector, one a row. `covariance` may be singular up to rounding."""
    room = 1e-9 * (float(np.trace(covariance)) / len(mean) + 1e-9)
    spread = np.linalg.cholesky(covariance + room * np.eye(len(mean)))
    found: FloatArray = mean + random.standard_normal((draws, len(mean))) @ spread.T
    return found


def quantiles(values: FloatArray, *shares: float) -> tuple[float, ...]:
    """Quantiles of draws."""
    return tuple(float(q) for q in np.quantile(values, shares))
