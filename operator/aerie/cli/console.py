"""The two consoles, and the error that a command raises for its user."""

from __future__ import annotations

from aerie.terminal import err, out

__all__ = ["CommandError", "err", "out"]


class CommandError(Exception):
    """The command cannot be carried out; `str(error)` is a message with the reason and what to do."""
