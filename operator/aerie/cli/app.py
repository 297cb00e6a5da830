"""Runs a command, and converts expected errors to a message and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from aerie.api import ResourceError
from aerie.boundary import EXIT_FAILED
from aerie.cli.commands.catalog import catalog
from aerie.cli.commands.operator import operator
from aerie.cli.commands.preflight import preflight
from aerie.cli.commands.preflight_job import preflight_job
from aerie.cli.commands.tune_offline import app as tune
from aerie.cli.console import CommandError
from aerie.engine.arguments import ArgumentError
from aerie.engine.models.checkpoint import CheckpointError
from aerie.engine.models.drafter_catalog import CatalogError
from aerie.terminal import VersionOption, print_error

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Speculative decoding in vLLM fleets: the operator, and commands that need none.",
)
app.command()(preflight)
app.command()(catalog)
app.command()(operator)
app.command(hidden=True)(preflight_job)
app.add_typer(tune, name="tune")

_EXPECTED_ERRORS = (CommandError, CheckpointError, CatalogError, ResourceError, ArgumentError)
_KUBECTL_PLUGIN_NAME = "kubectl-aerie"


@app.callback()
def _handle_global_options(version: VersionOption = False) -> None: ...


def run_command_line(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status of a command line. `arguments`: those of the process where they are None."""
    program_name = "kubectl aerie" if Path(sys.argv[0]).name == _KUBECTL_PLUGIN_NAME else "aerie"
    try:
        app(args=arguments, prog_name=program_name)  # ends by raising SystemExit, also after a wrong command line or Ctrl-C
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except _EXPECTED_ERRORS as error:
        print_error(error)
        return EXIT_FAILED
    return 0
