"""The command line `aerie`: the operator, and tools that need none. A thin layer over the pure core.

Exit status: 0 success; 1 rejected; 2 the command failed (a wrong command line, a file without a valid resource, an unreadable
model); 3 and 4: `aerie.cli.fleet.commands`; and those of `aerie.boundary`. Results for programs go to standard
output, messages for the user to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from aerie.boundary import run_process


def main() -> None:
    """Run the command line as this process: the entry point."""
    run_process("aerie", "", _load_command)


def _load_command() -> Callable[[], int]:
    # The memory of these two is bounded: they import none of the other commands.
    if sys.argv[1:2] == ["evaluator"]:
        from aerie.cli.commands.evaluator import run_evaluator_command_line

        return run_evaluator_command_line
    if sys.argv[1:2] == ["recorder"]:
        from aerie.cli.commands.recorder import run_recorder_command_line

        return run_recorder_command_line
    from aerie.cli.app import run_command_line

    return run_command_line
