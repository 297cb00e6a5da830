"""The two consoles, and the one error that a command raises on purpose."""

from __future__ import annotations

from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class CommandError(Exception):
    """What was asked cannot be done; `str(error)` is a sentence that says why and what to do."""
