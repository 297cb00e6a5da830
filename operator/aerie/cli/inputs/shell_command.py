"""Finds the command line of vLLM in a container's command: directly, or in a shell script.

Guarantees: pure. An unknown value stays in a word with its `$` (`is_fully_expanded`). A script with more than simple commands
(conditions, loops, functions, here-documents, nested substitutions) is a ValueError, because it is undecidable which of its
commands run. Not guaranteed: changes that a script makes by `unset`, `eval`, `read` or by reading another file.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

_SHELLS = frozenset({"ash", "bash", "dash", "sh", "zsh"})
_COMPOUND_KEYWORDS = frozenset({"case", "for", "function", "if", "select", "until", "while"})
_WORD_PATTERN = r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\$\([^()]*\)|`[^`]*`|\$\{[^{}]*\}|\\.|\$(?![({])|[^\s;&|()<>'"`\\$])+"""
_TOKEN = re.compile(
    rf"""(?P<blank>(?:[ \t\r]|\\\n)+|\#[^\n]*)
       | (?P<redirection>(?:\d*(?:>>?|<)|&>>?)&?[ \t]*{_WORD_PATTERN})
       | (?P<end>[;&|()\n]+)
       | (?P<word>{_WORD_PATTERN})""",
    re.VERBOSE | re.DOTALL,
)
_QUOTED_PIECE = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)|((?:\$\([^()]*\)|`[^`]*`|[^'"\\])+)""", re.DOTALL)
_EXPANSION = re.compile(r"""\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)|\$\([^()]*\)|`[^`]*`|\\([$`"\\])|\\\n""", re.ASCII)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
_KUBERNETES_REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
_UNEXPANDED = re.compile(r"\$[\w({@*?]")
_COMMAND_SUBSTITUTION = "$(...)"
"""Placeholder for the output of a command."""


_MAX_EXPANDED_CHARACTERS = 2 * 2**20


class ExpansionBudget:
    """Number of characters that variables may still expand to, because variables of variables grow without bound."""

    def __init__(self) -> None:
        self._remaining_characters = _MAX_EXPANDED_CHARACTERS

    def consume(self, text: str) -> str:
        """Return the text, and charge its characters. Raises ValueError: the budget is exceeded."""
        self._remaining_characters -= len(text)
        if self._remaining_characters < 0:
            raise ValueError(f"the expanded variables have more than {_MAX_EXPANDED_CHARACTERS >> 20} MiB")
        return text


@dataclass(frozen=True)
class VllmCommand:
    """A command that runs vLLM."""

    serve_arguments: list[str]
    """Arguments of `vllm serve`."""
    environment: Mapping[str, str]


def is_fully_expanded(word: str) -> bool:
    """Return whether all values of a word are known."""
    return _UNEXPANDED.search(word) is None


def expand_kubernetes_variables(text: str, environment: Mapping[str, str], budget: ExpansionBudget) -> str:
    """Return a text with each `$(NAME)` replaced as Kubernetes does: an unknown name stays as it is, and `$$` is a `$`.

    Raises ValueError: the budget is exceeded.
    """
    return _KUBERNETES_REFERENCE.sub(lambda match: budget.consume(environment.get(match[1], match[0]) if match[1] else "$"), text)


def extract_shell_script(words: Sequence[str]) -> str | None:
    """Return the script that a command passes to a shell; None where the command is no shell."""
    if not words or PurePosixPath(words[0]).name not in _SHELLS:
        return None
    for index, word in enumerate(words[1:], 1):
        if not word.startswith("-"):
            return None
        if re.fullmatch(r"-[a-z]*c[a-z]*", word):
            return words[index + 1] if index + 1 < len(words) else None
    return None


def find_serve_arguments(words: Sequence[str]) -> list[str] | None:
    """Return the words after `vllm serve`, or after one of its modules; None where neither occurs."""
    for index, word in enumerate(words):
        next_word, second_word = [*words[index + 1 : index + 3], "", ""][:2]
        if PurePosixPath(word).name == "vllm" and next_word == "serve":
            return list(words[index + 2 :])
        if word == "-m" and next_word == "vllm.entrypoints.openai.api_server":
            return list(words[index + 2 :])
        if word == "-m" and (next_word, second_word) == ("vllm.entrypoints.cli.main", "serve"):
            return list(words[index + 3 :])
    return None


def find_vllm_commands(script: str, environment: Mapping[str, str], budget: ExpansionBudget) -> list[VllmCommand]:
    """Return the first two commands of a script that run vLLM. Raises ValueError: the script has more than simple commands, or
    exceeds the budget."""
    variables, exported = dict(environment), set(environment)
    commands: list[VllmCommand] = []
    for words in _iter_simple_commands(script):
        is_export = words[0] == "export"
        assignments: dict[str, str] = {}
        index = int(is_export)
        while index < len(words) and (match := _ASSIGNMENT.fullmatch(words[index])):
            assignments[match[1]] = " ".join(_expand_word(match[2], ChainMap(assignments, variables), budget))
            index += 1
        if is_export or index == len(words):
            variables |= assignments
            exported |= {*assignments, *words[index:]} if is_export else set()
            continue
        values = [value for word in words[index:] for value in _expand_word(word, variables, budget)]
        if (arguments := find_serve_arguments(values)) is not None:
            inherited = {name: variables[name] for name in exported if name in variables}
            commands.append(VllmCommand(arguments, inherited | assignments))
            if len(commands) > 1:
                break
    return commands


def _iter_simple_commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each command, as they are written. Raises ValueError."""
    words: list[str] = []
    position = 0
    while position < len(script):
        token = _TOKEN.match(script, position)
        if token is None:
            line = script.count("\n", 0, position) + 1
            raise ValueError(f"line {line} has more than simple commands, or an unterminated quote")
        position = token.end()
        if token["word"] is not None:
            if not words and token["word"] in _COMPOUND_KEYWORDS:
                raise ValueError(f"it contains '{token['word']}', so that the executed commands are unknown")
            words.append(token["word"])
        elif token["end"] is not None and words:
            yield words
            words = []
    if words:
        yield words


def _expand_word(word: str, variables: Mapping[str, str], budget: ExpansionBudget) -> list[str]:
    """Return the expansion of a written word: one word, or those of an unquoted value."""

    def expand(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name is None:
            return match[4] or ("" if match[0] == "\\\n" else _COMMAND_SUBSTITUTION)
        return budget.consume(variables.get(name, match[0] if match[2] is None else match[2]))

    if re.search(r"['\"\\`(]", word) is None and "$" in word:
        return _EXPANSION.sub(expand, word).split()
    pieces = _QUOTED_PIECE.findall(word)
    return [
        "".join(single + escaped.strip("\n") + _EXPANSION.sub(expand, double + bare) for single, double, escaped, bare in pieces)
    ]
