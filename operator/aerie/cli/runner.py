"""Runs a command line, and converts expected errors to a message and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from aerie.boundary import EXIT_FAILED
from aerie.terminal import print_error

_KUBECTL_PLUGIN_NAME = "kubectl-aerie"


def run_app(app: typer.Typer, arguments: Sequence[str] | None, is_expected: Callable[[Exception], bool]) -> int:
    """Return the exit status of a command line. `arguments`: those of the process where they are None. `is_expected`: whether an
    error's message is for the user."""
    program_name = "kubectl aerie" if Path(sys.argv[0]).name == _KUBECTL_PLUGIN_NAME else "aerie"
    try:
        app(args=arguments, prog_name=program_name)  # ends by raising SystemExit, also after a wrong command line or Ctrl-C
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except Exception as error:
        if not is_expected(error):
            raise
        print_error(error)
        return EXIT_FAILED
    return 0
