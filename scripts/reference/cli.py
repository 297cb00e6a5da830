"""The page of all commands and their options, generated from the functions of the commands.

Guarantees: a command that its command line lists is on the page, with every option that its help shows. Not guaranteed: kubectl's
options are described once, at the top. `aerie-lab kubectl` and `helm` forward their arguments, which belong to those tools.

The commands of aerie-drafter import PyTorch, so the page takes seconds to generate.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from aerie.cli.app import COMMANDS
from aerie_drafter.cli import COMMAND_SUMMARIES
from aerie_lab.cli.app import COMMANDS as LAB_COMMANDS
from aerie_lab.cli.app import load_command
from scripts.reference.markdown import GENERATED, join_parts, table

KUBECTL_PANEL = "Options of kubectl"
"""Panel of the options that all commands about resources share."""

INTRODUCTION = """\
# Commands and options

This page lists every command of the three programs, with its options and their defaults. [cli.md](../how-to/cli.md) explains
how to work with `kubectl aerie`, its exit statuses and its output for programs.

| program | purpose |
|---|---|
| [`aerie`](#aerie) | rollouts in a cluster, and tools that need no cluster. `kubectl aerie` is the same program |
| [`aerie-drafter`](#aerie-drafter) | drafters: training, evaluation, export ([tutorial](../tutorials/your-own-drafter.md)) |
| [`aerie-lab`](#aerie-lab) | a cluster on one machine, for tries and tests ([lab.md](../how-to/lab.md)) |

`--help` of a command prints the same. `--version` or `version` of a program prints its release. An option with an empty default
is off, or unset.
"""
KUBECTL_INTRODUCTION = """\
### Options of kubectl

Commands about resources in a cluster take these options of kubectl, after the name of the command. kubectl gets them as they
are."""


@dataclass(frozen=True)
class Command:
    """A command with its options."""

    name: str
    """Name with the program's, such as aerie-lab fault kill."""
    function: Callable[..., Any]


def page() -> str:
    """Return the page as Markdown."""
    aerie_commands = list(iterate_aerie_commands())
    return join_parts(
        GENERATED.format(source="the functions of the commands"),
        INTRODUCTION,
        "## aerie",
        join_parts(KUBECTL_INTRODUCTION, _render_kubectl_options(aerie_commands)),
        *map(_render_command, aerie_commands),
        "## aerie-drafter",
        *map(_render_command, iterate_drafter_commands()),
        "## aerie-lab",
        *map(_render_command, iterate_lab_commands()),
    )


def iterate_aerie_commands() -> Iterator[Command]:
    """Yield the commands of aerie in the order of its help, without hidden ones."""
    for name, entry in COMMANDS.items():
        if entry.is_hidden:
            continue
        command = getattr(importlib.import_module(entry.module), entry.attribute)
        if isinstance(command, typer.Typer):
            yield from iterate_app(command, f"aerie {name}")
        else:
            yield Command(f"aerie {name}", command)


def iterate_drafter_commands() -> Iterator[Command]:
    """Yield the commands of aerie-drafter."""
    for name in COMMAND_SUMMARIES:
        yield Command(f"aerie-drafter {name}", importlib.import_module(f"aerie_drafter.cli.{name}").command)


def iterate_lab_commands() -> Iterator[Command]:
    """Yield the commands of aerie-lab."""
    for name in LAB_COMMANDS:
        command = load_command(name)
        if isinstance(command, typer.Typer):
            yield from iterate_app(command, f"aerie-lab {name}")
        else:
            yield Command(f"aerie-lab {name}", command)


def iterate_app(app: typer.Typer, prefix: str) -> Iterator[Command]:
    """Yield the commands of a typer app and of its groups."""
    for info in app.registered_commands:
        if info.callback is not None and not info.hidden:
            yield Command(f"{prefix} {info.name or info.callback.__name__.replace('_', '-')}", info.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from iterate_app(group.typer_instance, f"{prefix} {group.typer_instance.info.name}")


def list_parameters(function: Callable[..., Any]) -> list[Any]:
    """Return the arguments and options of a command, as typer builds them."""
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return [parameter for parameter in typer.main.get_command(app).params if not parameter.hidden]  # type: ignore[attr-defined]


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _render_command(command: Command) -> str:
    parameters = list_parameters(command.function)
    own = [parameter for parameter in parameters if parameter.rich_help_panel != KUBECTL_PANEL]
    words = [command.name, *(_display_argument(parameter) for parameter in own if _is_argument(parameter))]
    words += ["[OPTIONS]"] if any(not _is_argument(parameter) for parameter in own) else []
    notes = ["The [options of kubectl](#options-of-kubectl) apply too."] if len(own) < len(parameters) else []
    options = [_render_options(command, own)] if own else []
    return join_parts(f"### {command.name}", f"`{' '.join(words)}`", _read_help(command.function), *options, *notes)


def _render_kubectl_options(commands: list[Command]) -> str:
    command = next(command for command in commands if command.name == "aerie list")
    return _render_options(
        command, [parameter for parameter in list_parameters(command.function) if parameter.rich_help_panel == KUBECTL_PANEL]
    )


def _render_options(command: Command, parameters: list[Any]) -> str:
    hints = get_type_hints(command.function)
    rows = [_build_row(parameter, hints[parameter.name]) for parameter in parameters]
    return table(["option", "default", "meaning"], rows)


def _build_row(parameter: Any, hint: Any) -> tuple[str, str, str]:
    name = _display_argument(parameter) if _is_argument(parameter) else ", ".join(parameter.opts)
    if parameter.secondary_opts:
        name += " / " + ", ".join(parameter.secondary_opts)
    choices = ", ".join(f"`{choice}`" for choice in list_choices(hint))
    meaning = [_escape(parameter.help or "")]
    meaning += [f"One of {choices}."] if choices else []
    meaning += [bounds] if (bounds := _display_bounds(parameter.min, parameter.max)) else []
    meaning += [f"Environment variable: `{parameter.envvar}`."] if parameter.envvar else []
    return f"`{name}`", "required" if parameter.required else _display_default(parameter.default), " ".join(meaning)


def list_choices(hint: Any) -> list[str]:
    """Return the values of the enumeration that a type hint contains, such as an optional one."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [str(member.value) for member in hint]
    return [choice for argument in get_args(hint) for choice in list_choices(argument)]


def _display_argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _display_default(default: Any) -> str:
    if default is None or default is False or default == "":
        return ""
    if default is True:
        return "on"
    value = default.value if isinstance(default, Enum) else default
    return f"`{value.as_posix() if isinstance(value, Path) else value}`"


def _display_bounds(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    if high is None:
        return f"At least {low:g}."
    return f"At most {high:g}." if low is None else f"From {low:g} to {high:g}."


def _read_help(function: Callable[..., Any]) -> str:
    """Return the docstring with each paragraph in one line."""
    blocks = re.split(r"\n\s*\n", inspect.getdoc(function) or "")
    return "\n\n".join(_escape(" ".join(block.split())) for block in blocks)


def _escape(text: str) -> str:
    """Return a text in which Markdown finds no HTML; code in backticks stays as it is."""
    return re.sub(r"`[^`]+`|<", lambda match: "&lt;" if match[0] == "<" else match[0], text)
