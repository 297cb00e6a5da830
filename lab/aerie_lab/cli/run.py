"""Runs a command, and turns what it raises into a sentence and an exit status."""

from __future__ import annotations

from rich.markup import escape

from aerie_lab.cli.app import app
from aerie_lab.cli.console import err
from aerie_lab.errors import LabError

_INTERRUPTED = 130
"""128 + SIGINT, as a shell has it; typer ends so when Ctrl-C comes."""


def run() -> int:
    """The exit status."""
    try:
        app()
    except LabError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}")
        return 1
    except SystemExit as end:  # typer has said what was wrong with the arguments
        if end.code == _INTERRUPTED:
            err.print("interrupted; the next `aerie-lab up` or `down` clears what is left")
        return end.code if isinstance(end.code, int) else 0
    return 0
