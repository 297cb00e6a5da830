"""The two consoles: what was asked for goes to `out`, what happened on the way to `err`."""

from __future__ import annotations

from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)
