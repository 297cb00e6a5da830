"""The checks, by subject. The import of this package fills the table."""

from __future__ import annotations

from aerie.engine.preflight.checks import eagle31, engine, fit, options, parallelism, serving, weights

__all__ = ["eagle31", "engine", "fit", "options", "parallelism", "serving", "weights"]
