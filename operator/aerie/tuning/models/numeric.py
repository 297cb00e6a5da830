"""The few numerics that the models share. Randomness always comes in as a generator that the caller has seeded."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
Whole = npt.NDArray[np.integer[Any]]


def logit(share: Array) -> Array:
    """Of shares kept inside (0, 1)."""
    kept = np.clip(share, 1e-4, 1 - 1e-4)
    found: Array = np.log(kept) - np.log1p(-kept)
    return found


def logistic(x: Array) -> Array:
    """Its inverse."""
    found: Array = 1.0 / (1.0 + np.exp(-np.clip(x, -50.0, 50.0)))
    return found


def draw_normal(mean: Array, covariance: Array, draws: int, random: np.random.Generator) -> Array:
    """Draws of a normal vector, one a row. `covariance` may be singular up to rounding."""
    room = 1e-9 * (float(np.trace(covariance)) / len(mean) + 1e-9)
    spread = np.linalg.cholesky(covariance + room * np.eye(len(mean)))
    found: Array = mean + random.standard_normal((draws, len(mean))) @ spread.T
    return found


def quantiles(values: Array, *shares: float) -> tuple[float, ...]:
    """Quantiles of draws."""
    return tuple(float(q) for q in np.quantile(values, shares))
