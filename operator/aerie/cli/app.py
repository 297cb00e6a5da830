"""The commands by name. A command's module is imported when that command runs, so that each starts as fast as it can."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
import typer
from typer.core import TyperCommand, TyperGroup

from aerie.cli.runner import run_app
from aerie.terminal import VersionOption


@dataclass(frozen=True)
class CommandEntry:
    """Where a command is, and what the list of commands says of it."""

    module: str
    attribute: str
    summary: str
    """First sentence of its help. A test compares both."""
    panel: str = "Without a cluster"
    is_hidden: bool = False


_FLEET, _FLEET_PANEL = "aerie.cli.fleet.commands", "SpeculativeDeployments in a cluster"
COMMANDS = {
    "list": CommandEntry(
        _FLEET,
        "list_resources",
        "List SpeculativeDeployments: who serves, what is in progress, and what waits for a person.",
        _FLEET_PANEL,
    ),
    "status": CommandEntry(
        _FLEET,
        "status",
        "Show one SpeculativeDeployment: whether clients are served, what is in progress, what it needs, and what you can do.",
        _FLEET_PANEL,
    ),
    "history": CommandEntry(
        _FLEET, "history", "Show past rollouts and trials of a SpeculativeDeployment, newest first.", _FLEET_PANEL
    ),
    "wait": CommandEntry(
        _FLEET, "wait", "Wait until the present spec of a SpeculativeDeployment has come to an end.", _FLEET_PANEL
    ),
    "promote": CommandEntry(_FLEET, "promote", "Promote the candidate: end or skip its analysis.", _FLEET_PANEL),
    "rollback": CommandEntry(
        _FLEET,
        "rollback",
        "Roll back the candidate, or take a promotion back while the previous revision is retained.",
        _FLEET_PANEL,
    ),
    "retry": CommandEntry(_FLEET, "retry", "Roll out a rejected revision again, from its preflight on.", _FLEET_PANEL),
    "pause": CommandEntry(_FLEET, "pause", "Have Aerie change nothing of a SpeculativeDeployment.", _FLEET_PANEL),
    "resume": CommandEntry(_FLEET, "resume", "Have Aerie continue a paused SpeculativeDeployment.", _FLEET_PANEL),
    "preflight": CommandEntry(
        "aerie.cli.commands.preflight",
        "preflight",
        "Check target, drafter and engine of a SpeculativeDeployment, or of a Deployment that runs vLLM, before it is applied.",
    ),
    "plan": CommandEntry(
        "aerie.cli.commands.plan",
        "plan",
        "Forecast the rollout of a new drafter: its chances, its time, and how many users meet the drafter before the verdict.",
    ),
    "catalog": CommandEntry(
        "aerie.cli.commands.catalog", "catalog", "List published drafters, all or those for one target, best first."
    ),
    "tune": CommandEntry(
        "aerie.cli.commands.tune_offline", "app", "Recommend speculation settings from the metrics of engines."
    ),
    "operator": CommandEntry(
        "aerie.cli.commands.operator", "operator", "Run the operator: watch SpeculativeDeployments and reconcile them.", "Processes"
    ),
    "evaluator": CommandEntry(
        "aerie.cli.commands.evaluator",
        "evaluator",
        "Send requests to an engine with the new drafter and to one with the stable drafter, and count what their answers took.",
        "Processes",
    ),
    "preflight-job": CommandEntry("aerie.cli.commands.preflight_job", "preflight_job", "", "Processes", is_hidden=True),
}
"""All commands, in the order of the help."""

_EXPECTED_ERRORS = {
    "aerie.cli.console": "CommandError",
    "aerie.engine.models.checkpoint": "CheckpointError",
    "aerie.engine.models.drafter_catalog": "CatalogError",
    "aerie.api.types.base": "ResourceError",
    "aerie.engine.arguments": "ArgumentError",
}
"""Errors whose message is for the user, by module."""


class _LazyGroup(TyperGroup):
    """A group whose commands are imported when they run."""

    _shows_help = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        if self._shows_help:
            return TyperCommand(cmd_name, help=entry.summary, hidden=entry.is_hidden, rich_help_panel=entry.panel)
        return load_command(cmd_name)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self._shows_help = True
        super().format_help(ctx, formatter)


def load_command(name: str) -> click.Command:
    """Import a command."""
    entry = COMMANDS[name]
    target = getattr(importlib.import_module(entry.module), entry.attribute)
    if not isinstance(target, typer.Typer):
        function, target = target, typer.Typer(add_completion=False, rich_markup_mode="rich")
        arguments: dict[str, Any] = {}
        if entry.module == _FLEET:
            from aerie.cli.fleet.options import KubectlCommand  # not needed by other commands

            arguments["cls"] = KubectlCommand
        target.command(name, **arguments)(function)
    return typer.main.get_command(target)


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Speculative decoding in vLLM fleets: rollouts in a cluster, and commands that need none.",
)


@app.callback()
def _handle_global_options(version: VersionOption = False) -> None: ...


def run_command_line(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status of a command line. `arguments`: those of the process where they are None."""
    return run_app(app, arguments, is_expected)


def is_expected(error: Exception) -> bool:
    """Return whether the error's message is for the user. A module that is not imported has raised none."""
    return any(
        isinstance(error, getattr(sys.modules[module], name)) for module, name in _EXPECTED_ERRORS.items() if module in sys.modules
    )
