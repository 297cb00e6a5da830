"""The checks, by what they are about. Importing this package fills the table."""

from __future__ import annotations

from aerie.engine.preflight.checks import engine, fit, norms, options, serving, weights

__all__ = ["engine", "fit", "norms", "options", "serving", "weights"]
