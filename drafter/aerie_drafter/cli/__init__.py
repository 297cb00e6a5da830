"""The command line `aerie-drafter`. A failure is one message on standard error; exit statuses: `aerie.boundary`.

A command is a module of this package with a function `command`, and an entry in COMMAND_SUMMARIES. Only the requested command
is imported, so `aerie-drafter --help` is fast, and a command can import slow packages at module level.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from aerie.boundary import EXIT_FAILED, run_process
from aerie.terminal import print_error
from aerie.typer_app import build_root_app
from aerie_drafter.errors import DrafterError

COMMAND_SUMMARIES = {
    "convert": "Import another project's checkpoint in the format that vLLM serves.",
    "drift": "Measure the drift of a drafter over its steps: state, attention, acceptance.",
    "evaluate": "Measure acceptance length by category, with a drafter and its target or with a running vLLM.",
    "export": "Export a checkpoint for serving with vLLM, with a model card.",
    "generate": "Generate training data: the target's answers to the prompts of a file.",
    "handover": "Write the configuration of TorchSpec or SpecForge for the same training.",
    "inspect": "Describe a checkpoint, and check whether it fits a target.",
    "refresh": "Train a served drafter further on captured prompts, and export it if it is better.",
    "states": "Write the target's hidden states of a training's data, by a running vLLM.",
    "train": "Train a drafter, or resume a training.",
}
"""Summary of each command in `aerie-drafter --help`."""


def main() -> None:
    """Run `aerie-drafter` as this process."""
    run_process("aerie-drafter", "drafter", lambda: lambda: run_cli(sys.argv[1:]))


def run_cli(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status."""
    try:
        build_app(next((argument for argument in arguments if not argument.startswith("-")), None))(
            arguments, prog_name="aerie-drafter"
        )
    except DrafterError as error:
        print_error(error)
        return EXIT_FAILED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def build_app(command_name: str | None) -> typer.Typer:
    """Return the app: the named command in full, the others as a line of help."""
    app = build_root_app(
        "Train, evaluate, convert and export EAGLE 3 and EAGLE 3.1 drafters for vLLM.", pretty_exceptions_enable=False
    )
    for name, line in COMMAND_SUMMARIES.items():
        if name == command_name:
            command = import_module(f"aerie_drafter.cli.{name}").command
            app.command(name)(command)
        else:
            app.command(name, help=line)(_placeholder_command)
    return app


def _placeholder_command() -> None:
    """Stand for a command that was not requested."""
