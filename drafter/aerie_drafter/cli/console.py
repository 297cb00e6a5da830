"""The two consoles: what was asked for goes to `out`, what happened on the way to `err`."""

from __future__ import annotations

from aerie.terminal import err, out

__all__ = ["err", "out"]
