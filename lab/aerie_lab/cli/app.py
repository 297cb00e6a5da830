"""The commands by name. Only the requested one is imported, so that `aerie-lab --help` waits for no large package."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import typer

from aerie.typer_app import build_root_app


@dataclass(frozen=True)
class CommandEntry:
    """Where a command is, and its line in the list of commands."""

    module: str
    """It has a function with the command's name, or a `typer.Typer` with subcommands."""
    summary: str
    """First sentence of its help. A test compares both."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `typer.Typer.command`."""


_CLUSTER = "aerie_lab.cli.cluster_commands"
_FORWARDED_ARGUMENTS = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}
COMMANDS = {
    "demo": CommandEntry(
        "aerie_lab.cli.demo",
        "Install the operator in a cluster, deploy a drafter, promote a better one, roll back a bad one, and clean up.",
    ),
    "traffic": CommandEntry("aerie_lab.cli.traffic", "Send requests to a server, and report errors and latencies."),
    "up": CommandEntry(_CLUSTER, "Start a lab, and print its addresses."),
    "down": CommandEntry(_CLUSTER, "Stop a lab and remove all of it; built binaries stay in the cache."),
    "status": CommandEntry(_CLUSTER, "Show a lab's components, addresses and faults."),
    "kubectl": CommandEntry(_CLUSTER, "Run kubectl against a lab.", _FORWARDED_ARGUMENTS),
    "helm": CommandEntry(_CLUSTER, "Run helm against a lab.", _FORWARDED_ARGUMENTS),
    "logs": CommandEntry(_CLUSTER, "Show the output of a component of the lab."),
    "shell": CommandEntry(
        _CLUSTER,
        "Open a shell with KUBECONFIG and GATEWAY set and the lab's kubectl and helm on the PATH.",
        {"context_settings": {"allow_interspersed_args": False}},
    ),
    "build": CommandEntry(_CLUSTER, "Build binaries ahead of time."),
    "fault": CommandEntry("aerie_lab.cli.fault", "Inject faults, and undo them."),
}
"""All commands, in the order of the help."""


def run_app() -> None:
    """Run the command line of this process."""
    build_app(next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None))()


def build_app(command_name: str | None) -> typer.Typer:
    """Return the app: the named command in full, the others as a line of help."""
    app = build_root_app("A real Kubernetes cluster on this machine, without a container engine: pods are local processes.")
    for name, entry in COMMANDS.items():
        if name != command_name:
            app.command(name, help=entry.summary)(_placeholder_command)
            continue
        command = load_command(name)
        if isinstance(command, typer.Typer):
            app.add_typer(command)
        else:
            app.command(name, **entry.settings)(command)
    return app


def load_command(name: str) -> Any:
    """Import a command, and return its function or its group of subcommands."""
    return getattr(import_module(COMMANDS[name].module), name)


def _placeholder_command() -> None:
    """Stand for a command that was not requested."""
