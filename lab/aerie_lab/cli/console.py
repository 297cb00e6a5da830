"""The two consoles: `out` for output that programs read, `err` for notes to the user."""

from __future__ import annotations

import os

from aerie.terminal import err, out, sanitize_text

__all__ = ["err", "out", "print_progress", "replace_process"]


def print_progress(line: str) -> None:
    """Progress, a line at a time."""
    err.print(f"[dim]lab:[/] {sanitize_text(line)}")


def replace_process(command: list[str], environment: dict[str, str]) -> None:
    """Become another program, so that signals, terminal and exit status are its own."""
    out.file.flush()
    os.execvpe(command[0], command, environment)
