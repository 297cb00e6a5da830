"""The command line `aerie-drafter`. Whatever cannot be done is one sentence on standard error; exit statuses: `aerie.boundary`.

A command is a module of this package with a function `command`, and a line in COMMANDS. Only the module of the command that
was named is imported, so `aerie-drafter --help` is quick and a command may import what it likes at its top.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from aerie.boundary import EXIT_FAILED, run_process
from aerie.terminal import VersionOption, print_error
from aerie_drafter.errors import DrafterError

COMMAND_SUMMARIES = {
    "convert": "Bring in another project's checkpoint, as what vLLM serves.",
    "drift": "Show how a drafter drifts step by step: state, attention, acceptance.",
    "evaluate": "Measure acceptance length by category, of a drafter and its target or of a running vLLM.",
    "export": "Make of a checkpoint what vLLM serves, with a model card.",
    "generate": "Let the target answer the prompts of a file: what a drafter is best trained on.",
    "inspect": "Tell what a checkpoint is, and whether it fits a target.",
    "train": "Train a drafter, or go on with a training that was stopped.",
}
"""What `aerie-drafter --help` says of each."""


def main() -> None:
    """Entry point."""
    run_process("aerie-drafter", "drafter", lambda: lambda: run_cli(sys.argv[1:]))


def run_cli(arguments: Sequence[str]) -> int:
    """The exit status of `aerie-drafter` with these arguments."""
    try:
        build_app(next((one for one in arguments if not one.startswith("-")), None))(arguments, prog_name="aerie-drafter")
    except DrafterError as error:
        print_error(error)
        return EXIT_FAILED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def build_app(command_name: str | None) -> typer.Typer:
    """The commands: the one that is named as it is, the others as a line of help."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        help="EAGLE 3 and EAGLE 3.1 drafters: train them, judge them, and make of them what vLLM serves.",
    )
    app.callback()(_root_callback)
    for name, line in COMMAND_SUMMARIES.items():
        if name == command_name:
            app.command(name)(import_module(f"aerie_drafter.cli.{name}").command)
        else:
            app.command(name, help=line)(_placeholder_command)
    return app


def _root_callback(version: VersionOption = False) -> None: ...


def _placeholder_command() -> None:
    """Nothing: stands for commands that were not named."""
