"""The two consoles, and the one error that a command raises on purpose."""

from __future__ import annotations

from aerie.terminal import err, out, plain

__all__ = ["CommandError", "err", "out", "plain"]


class CommandError(Exception):
    """What was asked cannot be done; `str(error)` is a sentence that says why and what to do."""
