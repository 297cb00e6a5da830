"""The two consoles: what a program reads goes to `out`, what a person is told goes to `err`."""

from __future__ import annotations

import os

from rich.console import Console
from rich.markup import escape

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """Progress, a line at a time."""
    err.print(f"[dim]lab:[/] {escape(line)}")


def replace_process(command: list[str], environment: dict[str, str]) -> None:
    """Become another program, so that signals, terminal and exit status are its own."""
    out.file.flush()
    os.execvpe(command[0], command, environment)
