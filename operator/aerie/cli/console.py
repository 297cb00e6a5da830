"""The two consoles, and the one error that a command raises on purpose."""

from __future__ import annotations

from aerie.terminal import err, out

__all__ = ["CommandError", "err", "out"]


class CommandError(Exception):
    """What was asked cannot be done; `str(error)` is a sentence that says why and what to do."""
