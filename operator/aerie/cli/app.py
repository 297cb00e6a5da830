"""The commands."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from aerie.api import ResourceError
from aerie.cli.commands.catalog import catalog
from aerie.cli.commands.evaluator import evaluator
from aerie.cli.commands.operator import operator
from aerie.cli.commands.plan import plan
from aerie.cli.commands.preflight import preflight
from aerie.cli.commands.preflight_job import preflight_job
from aerie.cli.commands.tune_offline import app as tune
from aerie.cli.console import CommandError
from aerie.cli.runner import run_app
from aerie.engine.arguments import ArgumentError
from aerie.engine.models.checkpoint import CheckpointError
from aerie.engine.models.drafter_catalog import CatalogError
from aerie.terminal import VersionOption

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Speculative decoding in vLLM fleets: the operator, and commands that need none.",
)
app.command()(preflight)
app.command()(plan)
app.command()(catalog)
app.command()(operator)
app.command()(evaluator)
app.command(hidden=True)(preflight_job)
app.add_typer(tune, name="tune")

_EXPECTED_ERRORS = (CommandError, CheckpointError, CatalogError, ResourceError, ArgumentError)


@app.callback()
def _handle_global_options(version: VersionOption = False) -> None: ...


def run_command_line(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status of a command line. `arguments`: those of the process where they are None."""
    return run_app(app, arguments, _EXPECTED_ERRORS)
