"""`aerie completion` and `kubectl_complete-aerie`: completion of command lines in shells, and in kubectl's own completion.

    shell script, or kubectl ──► candidates of the words ──► names of commands, options, values and resources

Guarantees: a completion prints candidates or nothing, and never an error. Only names of resources and namespaces cause a request.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Annotated, Any

import typer

from aerie.cli.app import COMMANDS, FLEET_PANEL
from aerie.cli.fleet.kubectl import Kubectl

_NO_FILE_NAMES, _FILE_NAMES = 4, 0
"""Directives of kubectl: whether the shell adds names of files. https://pkg.go.dev/github.com/spf13/cobra#ShellCompDirective"""
_KUBECTL_FLAGS = frozenset({"-n", "--namespace", "--context", "--kubeconfig", "--cluster", "--user", "--as"})
_REQUEST_TIMEOUT = "--request-timeout=3s"
SCRIPTS = {
    "bash": """_aerie() {
  local IFS=$'\\n'
  COMPREPLY=($(compgen -W "$(aerie complete -- "${COMP_WORDS[@]:1:COMP_CWORD}")" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _aerie aerie
""",
    "zsh": """#compdef aerie
_aerie() {
  local -a candidates
  candidates=("${(@f)$(aerie complete -- "${(@)words[2,CURRENT]}")}")
  if [[ -n "${candidates[1]}" ]]; then compadd -a candidates; else _files; fi
}
compdef _aerie aerie
""",
    "fish": """complete -c aerie -a '(aerie complete -- (commandline -opc)[2..] (commandline -ct))'
""",
}
"""Scripts that connect a shell to `aerie complete`, by shell."""


class Shell(StrEnum):
    """A shell."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="Shell.", show_default=False)]) -> None:
    """Print the script that completes command lines in a shell. Load it with: source <(aerie completion bash)."""
    typer.echo(SCRIPTS[shell], nl=False)


def complete(
    words: Annotated[list[str] | None, typer.Argument(help="Words of the command line, the last one incomplete.")] = None,
) -> None:
    """Print the candidates for the last word."""
    for candidate in find_candidates(words or [""]):
        typer.echo(candidate)


def main() -> None:
    """Run `kubectl_complete-aerie`, which kubectl calls with the words after `kubectl aerie`."""
    words = sys.argv[1:] or [""]
    candidates = find_candidates(words)
    typer.echo("".join(f"{candidate}\n" for candidate in candidates) + f":{_NO_FILE_NAMES if candidates else _FILE_NAMES}")


def find_candidates(words: Sequence[str]) -> list[str]:
    """Return what the last word may become; empty where that is a file or unknown."""
    *earlier, token = words
    index = next((index for index, item in enumerate(earlier) if not item.startswith("-")), None)
    if index is None:
        names = [name for name, entry in COMMANDS.items() if not entry.is_hidden]
        return _filter(["--help", "--version"] if token.startswith("-") else names, token)
    entry = COMMANDS.get(earlier[index])
    if entry is None:
        return []
    parameters = list(_read_parameters(getattr(importlib.import_module(entry.module), entry.attribute)))
    previous = next((parameter for parameter in parameters if earlier[-1] in parameter.names), None)
    if previous is not None and not previous.is_flag:
        return _filter(_list_values(previous, earlier), token)
    if token.startswith("-"):
        return _filter(
            [name for parameter in parameters for name in parameter.names if name.startswith("--")] + ["--help"], token
        )
    positional = next((parameter for parameter in parameters if not parameter.names), None)
    if positional is not None and positional.values:
        return _filter(positional.values, token)
    if positional is not None and entry.panel == FLEET_PANEL and not _has_argument(earlier[index + 1 :], parameters):
        return _filter(_list_names("speculativedeployments.aerie.dev", earlier), token)
    return []


@dataclass(frozen=True)
class _Parameter:
    """A parameter of a command."""

    names: tuple[str, ...]
    """Names of an option; none for an argument."""
    is_flag: bool
    values: tuple[str, ...]
    """Possible values, where they are known."""


def _read_parameters(command: Any) -> Iterator[_Parameter]:
    """Yield the parameters of a command, as typer reads them from its signature."""
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, *metadata = typing.get_args(parameter.annotation) or (parameter.annotation,)
        option = next((item for item in metadata if isinstance(item, typer.models.OptionInfo)), None)
        names = () if option is None else _read_names(option, parameter.name)
        values = tuple(str(item.value) for item in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ()
        yield _Parameter(names, kind is bool, values)


def _read_names(option: Any, parameter_name: str) -> tuple[str, ...]:
    """Return the names of an option. In an annotation, typer has the first one in the place of the default."""
    names = (option.default, *(option.param_decls or ()))
    return tuple(name for name in names if isinstance(name, str) and name.startswith("-")) or (
        f"--{parameter_name.replace('_', '-')}",
    )


def _has_argument(words: Sequence[str], parameters: Sequence[_Parameter]) -> bool:
    takes_value = {name for parameter in parameters if not parameter.is_flag for name in parameter.names}
    return any(
        not token.startswith("-") and (index == 0 or words[index - 1] not in takes_value) for index, token in enumerate(words)
    )


def _list_values(parameter: _Parameter, words: Sequence[str]) -> Sequence[str]:
    if "--namespace" in parameter.names:
        return _list_names("namespaces", words)
    return parameter.values


def _list_names(kind: str, words: Sequence[str]) -> Sequence[str]:
    """Return the names of the objects of a kind; none if they cannot be listed."""
    flags = [
        token
        for index, token in enumerate(words)
        if token.partition("=")[0] in _KUBECTL_FLAGS or (index and words[index - 1] in _KUBECTL_FLAGS)
    ]
    if flags and flags[-1] in _KUBECTL_FLAGS:
        flags.pop()  # its value is the word to complete
    return Kubectl((*flags, _REQUEST_TIMEOUT)).list_names(kind)


def _filter(candidates: Sequence[str], token: str) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(token)]
