"""The command line `aerie`: the operator, and what can be known without one. Thin over the pure core.

Exit status: 0 all is well, 1 refused, 2 it could not be done (a wrong command line, a file that is no resource, a model that
cannot be read), and those of `aerie.boundary`. What a program reads goes to standard output, notes for a person to
standard error.
"""

from __future__ import annotations

from collections.abc import Callable

from aerie.boundary import run_process


def main() -> None:
    """Entry point."""
    run_process("aerie", "", _load_command)


def _load_command() -> Callable[[], int]:
    from aerie.cli.app import run_command_line

    return run_command_line
