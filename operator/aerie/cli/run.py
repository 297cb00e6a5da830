"""Runs a command, and turns what it raises into a sentence and an exit status."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.markup import escape

from aerie.api import ResourceError
from aerie.cli.catalog import catalog
from aerie.cli.console import CommandError, err
from aerie.cli.operator import operator
from aerie.cli.preflight import preflight
from aerie.cli.preflight_job import preflight_job
from aerie.cli.tune import app as tune
from aerie.engine.arguments import ArgumentError
from aerie.engine.catalog import CatalogError
from aerie.engine.checkpoint import CheckpointError

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


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit status. `arguments`: those of the process where they are not given."""
    try:
        app(args=arguments)  # ends by raising SystemExit, also after a wrong command line or Ctrl-C
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except _EXPECTED as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}")
        return 2
    return 0
