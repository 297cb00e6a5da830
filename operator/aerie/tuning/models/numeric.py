"""Numeric helpers that the models share. The caller passes in a seeded generator for all randomness."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.integer[Any]]


def logit(shares: FloatArray) -> FloatArray:
    """Return the logits of shares, clipped into (0, 1)."""
    clipped = np.clip(shares, 1e-4, 1 - 1e-4)
    logits: FloatArray = np.log(clipped) - np.log1p(-clipped)
    return logits


def logistic(x: FloatArray) -> FloatArray:
    """Return the inverse of `logit`, elementwise."""
    shares: FloatArray = 1.0 / (1.0 + np.exp(-np.clip(x, -50.0, 50.0)))
    return shares


def draw_normal(mean: FloatArray, covariance: FloatArray, draws: int, random: np.random.Generator) -> FloatArray:
    """Draw normal vectors, one a row. `covariance` may be singular up to rounding."""
    jitter = 1e-9 * (float(np.trace(covariance)) / len(mean) + 1e-9)
    factor = np.linalg.cholesky(covariance + jitter * np.eye(len(mean)))
    vectors: FloatArray = mean + random.standard_normal((draws, len(mean))) @ factor.T
    return vectors


def quantiles(values: FloatArray, *shares: float) -> tuple[float, ...]:
    """Return the quantiles of draws at these shares."""
    return tuple(float(quantile) for quantile in np.quantile(values, shares))
