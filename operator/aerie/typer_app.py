"""The typer app of every command line, so that all programs have the same help, `--version` and `version`.

Guarantees: help breaks no sentence where the source does. An option table shows what a value may be, and no type names. A
program's `version` prints the same as its `--version`.
Not guaranteed: the layout of the help, which is typer's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

_VALUE = "VALUE"
"""Placeholder of an option's value in help, where neither choices nor a placeholder of its own are known."""


class App(typer.Typer):
    """An app, or a group of commands in one."""

    def __init__(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {"cls": _Group, "no_args_is_help": True, "add_completion": False, "rich_markup_mode": "rich"}
        super().__init__(**(defaults | settings))

    def command(self, name: str | None = None, **settings: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Return the decorator that adds a command."""
        return super().command(name, cls=_Command, **settings)


def build_root_app(help_text: str, **settings: Any) -> App:
    """Return the app of a whole program: with `--version`, and with `version` for those who try that."""
    app = App(help=help_text, **settings)
    app.callback()(_handle_global_options)
    app.command("version", hidden=True)(_print_version)
    return app


def join_help_lines(text: str | None) -> str:
    """Return a help text with the lines of each paragraph joined: typer would break them where the source does."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


class _Command(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _prepare_help(self, ctx)
        super().format_help(ctx, formatter)


class _Group(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _prepare_help(self, ctx)
        super().format_help(ctx, formatter)


def _prepare_help(command: Any, context: Any) -> None:
    command.help = join_help_lines(command.help)
    for parameter in command.get_params(context):
        placeholder = _find_placeholder(parameter, context)
        parameter.display_type_rich = functools.partial(lambda text, **_: text, placeholder)


def _find_placeholder(parameter: Any, context: Any) -> str | None:
    """Return what help shows for the value of a parameter; None for a flag, and for an argument, which has its name."""
    if parameter.type_descriptor.is_choice:
        return str(parameter.display_type(context))
    if parameter.param_type_name == "argument" or parameter.is_flag:
        return None
    return parameter.metavar or _VALUE


def _print_version() -> None:
    """Show the version."""
    from importlib.metadata import version  # not needed otherwise

    typer.echo(f"aerie {version('aerie-operator')}")


def _handle_version_option(is_requested: bool) -> None:
    if is_requested:
        _print_version()
        raise typer.Exit


def _handle_global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_handle_version_option, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...
