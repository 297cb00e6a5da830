"""Runs a command, and turns what it raises on purpose into a sentence and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from aerie.api import ResourceError
from aerie.boundary import FAILED
from aerie.cli.commands.catalog import catalog
from aerie.cli.commands.operator import operator
from aerie.cli.commands.preflight import preflight
from aerie.cli.commands.preflight_job import preflight_job
from aerie.cli.commands.tune_offline import app as tune
from aerie.cli.console import CommandError
from aerie.engine.arguments import ArgumentError
from aerie.engine.models.checkpoint import CheckpointError
from aerie.engine.models.drafter_catalog import CatalogError
from aerie.terminal import Version, refuse

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Speculative decoding in vLLM fleets: the operator, and what can be known without one.",
)
app.command()(preflight)
app.command()(catalog)
app.command()(operator)
app.command(hidden=True)(preflight_job)
app.add_typer(tune, name="tune")

_EXPECTED = (CommandError, CheckpointError, CatalogError, ResourceError, ArgumentError)
_PLUGIN = "kubectl-aerie"


@app.callback()
def _group(version: Version = False) -> None: ...


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit status. `arguments`: those of the process where they are not given."""
    called = "kubectl aerie" if Path(sys.argv[0]).name == _PLUGIN else "aerie"
    try:
        app(args=arguments, prog_name=called)  # ends by raising SystemExit, also after a wrong command line or Ctrl-C
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except _EXPECTED as error:
        refuse(error)
        return FAILED
    return 0
