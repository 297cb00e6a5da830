"""The commands by name. Only the requested command is imported, so that each starts as fast as it can."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from aerie.cli.runner import run_app
from aerie.typer_app import build_root_app


@dataclass(frozen=True)
class CommandEntry:
    """Where a command is, and its line in the list of commands."""

    module: str
    attribute: str
    """A function, or a `typer.Typer` with subcommands."""
    summary: str
    """First sentence of its help. A test compares both."""
    panel: str = "Without a cluster"
    is_hidden: bool = False


_FLEET = "aerie.cli.fleet.commands"
FLEET_PANEL = "SpeculativeDeployments in a cluster"
"""Panel of the commands about resources, which kubectl reads and writes."""
COMMANDS = {
    "list": CommandEntry(
        _FLEET,
        "list_resources",
        "List SpeculativeDeployments: who serves, what is in progress, and what waits for a user.",
        FLEET_PANEL,
    ),
    "status": CommandEntry(
        _FLEET,
        "status",
        "Show one SpeculativeDeployment: whether clients are served, what is in progress, what it needs, and what you can do.",
        FLEET_PANEL,
    ),
    "history": CommandEntry(
        _FLEET, "history", "Show past rollouts and trials of a SpeculativeDeployment, newest first.", FLEET_PANEL
    ),
    "explain": CommandEntry(
        _FLEET,
        "explain",
        "Explain a SpeculativeDeployment's drafter and setting: the last verdict, and the last decision of tuning.",
        FLEET_PANEL,
    ),
    "report": CommandEntry(
        "aerie.cli.report.command",
        "report",
        "Write the record of a rollout's decision: verdict, criteria, curves, traffic and versions, as HTML, Markdown or SVG.",
        FLEET_PANEL,
    ),
    "wait": CommandEntry(
        _FLEET, "wait", "Wait until the present spec of a SpeculativeDeployment has come to an end.", FLEET_PANEL
    ),
    "promote": CommandEntry(_FLEET, "promote", "Promote the candidate: end or skip its analysis.", FLEET_PANEL),
    "rollback": CommandEntry(
        _FLEET,
        "rollback",
        "Roll back the candidate, or revert a promotion while the previous revision is retained.",
        FLEET_PANEL,
    ),
    "retry": CommandEntry(_FLEET, "retry", "Roll out a rejected revision again, from its preflight on.", FLEET_PANEL),
    "pause": CommandEntry(_FLEET, "pause", "Have Aerie change nothing of a SpeculativeDeployment.", FLEET_PANEL),
    "resume": CommandEntry(_FLEET, "resume", "Have Aerie continue a paused SpeculativeDeployment.", FLEET_PANEL),
    "plan": CommandEntry(
        "aerie.cli.plan.command",
        "plan",
        "Show what an apply would do before it is applied: the rollout, preflight, pods and GPUs, time, and what users notice.",
        FLEET_PANEL,
    ),
    "doctor": CommandEntry(
        "aerie.cli.commands.doctor",
        "doctor",
        "Check whether Aerie can work in this cluster: definition, operator, rights, resources, clock.",
        FLEET_PANEL,
    ),
    "savings": CommandEntry(
        "aerie.cli.fleet.savings_command",
        "savings",
        "Show the replica-hours that speculation settings have saved, and what trials have cost.",
        FLEET_PANEL,
    ),
    "diagnose": CommandEntry(
        "aerie.cli.commands.diagnose",
        "diagnose",
        "Diagnose one engine: whether its drafter is useful, which K fits, what it lacks.",
    ),
    "preflight": CommandEntry(
        "aerie.cli.commands.preflight",
        "preflight",
        "Check target, drafter and engine of a SpeculativeDeployment, or of a Deployment that runs vLLM, before it is applied.",
    ),
    "forecast": CommandEntry(
        "aerie.cli.commands.forecast",
        "forecast",
        "Forecast the rollout of a new drafter: its chances, its time, and how many users meet the drafter before the verdict.",
    ),
    "catalog": CommandEntry(
        "aerie.cli.commands.catalog", "catalog", "List published drafters, all or those for one target, best first."
    ),
    "tune": CommandEntry(
        "aerie.cli.commands.tune",
        "tune",
        "Recommend num_speculative_tokens with the expected gain, from metrics of running engines.",
    ),
    "notifications": CommandEntry("aerie.cli.commands.notifications", "app", "Try the receivers of notifications."),
    "completion": CommandEntry(
        "aerie.cli.commands.completion", "completion", "Print the script that completes command lines in a shell."
    ),
    "complete": CommandEntry(
        "aerie.cli.commands.completion", "complete", "Print the candidates for the last word.", is_hidden=True
    ),
    "operator": CommandEntry(
        "aerie.cli.commands.operator",
        "operator",
        "Run the operator: watch SpeculativeDeployments and reconcile them.",
        "Processes",
    ),
    "evaluator": CommandEntry(
        "aerie.cli.commands.evaluator",
        "evaluator",
        "Send requests to an engine with the new drafter and to one with the stable drafter, and count what their answers took.",
        "Processes",
    ),
    "recorder": CommandEntry(
        "aerie.cli.commands.recorder",
        "recorder",
        "Record a share of mirrored requests, redacted, as files from which a drafter can be trained.",
        "Processes",
    ),
    "preflight-job": CommandEntry("aerie.cli.commands.preflight_job", "preflight_job", "", "Processes", is_hidden=True),
    "check-installation": CommandEntry(
        "aerie.cli.commands.check_installation", "check_installation", "", "Processes", is_hidden=True
    ),
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


def build_app(command_name: str | None) -> typer.Typer:
    """Return the app: the named command in full, the others as a line of help."""
    app = build_root_app("Speculative decoding in vLLM fleets: rollouts in a cluster, and commands that need none.")
    for name, entry in COMMANDS.items():
        if name != command_name:
            app.command(name, help=entry.summary, hidden=entry.is_hidden, rich_help_panel=entry.panel)(_placeholder_command)
            continue
        command = getattr(importlib.import_module(entry.module), entry.attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _placeholder_command() -> None:
    """Stand for a command that was not requested."""


def run_command_line(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status of a command line. `arguments`: those of the process where they are None."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_app(build_app(find_command_name(arguments)), arguments, is_expected)


def find_command_name(arguments: Sequence[str]) -> str | None:
    """Return the command of a command line: the options before it have no values."""
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def is_expected(error: Exception) -> bool:
    """Return whether the error's message is for the user. A module that is not imported has raised none."""
    return any(
        isinstance(error, getattr(sys.modules[module], name))
        for module, name in _EXPECTED_ERRORS.items()
        if module in sys.modules
    )
