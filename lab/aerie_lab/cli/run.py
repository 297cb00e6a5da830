"""Runs a command, and turns what it raises on purpose into a sentence and an exit status."""

from __future__ import annotations

from aerie.boundary import EXIT_FAILED, EXIT_INTERRUPTED
from aerie.terminal import err, print_error
from aerie_lab.cli.app import run_app
from aerie_lab.errors import LabError


def run() -> int:
    """Return the exit status."""
    try:
        run_app()
    except LabError as error:
        print_error(error)
        return EXIT_FAILED
    except SystemExit as end:  # typer has printed the error in the arguments
        if end.code == EXIT_INTERRUPTED:
            err.print("interrupted; the next `aerie-lab up` or `down` clears what is left")
        return end.code if isinstance(end.code, int) else 0
    return 0
