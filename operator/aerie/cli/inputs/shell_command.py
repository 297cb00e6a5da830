"""The command line of vLLM inside a container's command: as it stands there, or in a script of a shell.

Guarantees: pure. A value that is not known here stays in a word with its `$` (`is_known`). A script with more than
simple commands (conditions, loops, functions, here-documents, nested substitutions) is a ValueError, since what of it runs cannot
be told.
Not guaranteed: what a script changes by `unset`, `eval`, `read` or by reading another file.
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
"""What a command prints."""


_MAX_EXPANDED_CHARACTERS = 2 * 2**20


class ExpansionBudget:
    """How many characters may still be put in for variables, since variables of variables grow without bound."""

    def __init__(self) -> None:
        self._remaining_characters = _MAX_EXPANDED_CHARACTERS

    def consume(self, text: str) -> str:
        """The text. Raises ValueError: there is no room for it."""
        self._remaining_characters -= len(text)
        if self._remaining_characters < 0:
            raise ValueError(f"the variables put in have more than {_MAX_EXPANDED_CHARACTERS >> 20} MiB")
        return text


@dataclass(frozen=True)
class VllmCommand:
    """A command that runs vLLM."""

    serve_arguments: list[str]
    """Those behind `vllm serve`."""
    environment: Mapping[str, str]


def is_fully_expanded(word: str) -> bool:
    """Whether a word has all its values."""
    return _UNEXPANDED.search(word) is None


def expand_kubernetes_variables(text: str, environment: Mapping[str, str], budget: ExpansionBudget) -> str:
    """A text with each `$(NAME)` as Kubernetes puts it in: what is not known stays as it is, and `$$` is a `$`.

    Raises ValueError: there is no room for it.
    """
    return _KUBERNETES_REFERENCE.sub(lambda found: budget.consume(environment.get(found[1], found[0]) if found[1] else "$"), text)


def extract_shell_script(words: Sequence[str]) -> str | None:
    """The script that a command hands to a shell; None where it is no shell's."""
    if not words or PurePosixPath(words[0]).name not in _SHELLS:
        return None
    for place, word in enumerate(words[1:], 1):
        if not word.startswith("-"):
            return None
        if re.fullmatch(r"-[a-z]*c[a-z]*", word):
            return words[place + 1] if place + 1 < len(words) else None
    return None


def find_serve_arguments(words: Sequence[str]) -> list[str] | None:
    """The words behind `vllm serve`, or behind one of its modules; None where neither is there."""
    for place, word in enumerate(words):
        one, two = [*words[place + 1 : place + 3], "", ""][:2]
        if PurePosixPath(word).name == "vllm" and one == "serve":
            return list(words[place + 2 :])
        if word == "-m" and one == "vllm.entrypoints.openai.api_server":
            return list(words[place + 2 :])
        if word == "-m" and (one, two) == ("vllm.entrypoints.cli.main", "serve"):
            return list(words[place + 3 :])
    return None


def find_vllm_commands(script: str, environment: Mapping[str, str], budget: ExpansionBudget) -> list[VllmCommand]:
    """The commands of a script that run vLLM, the first two. Raises ValueError: it has more than simple commands, or no room."""
    known, exported = dict(environment), set(environment)
    found: list[VllmCommand] = []
    for words in _iter_simple_commands(script):
        export = words[0] == "export"
        own: dict[str, str] = {}
        place = int(export)
        while place < len(words) and (assigned := _ASSIGNMENT.fullmatch(words[place])):
            own[assigned[1]] = " ".join(_expand_word(assigned[2], ChainMap(own, known), budget))
            place += 1
        if export or place == len(words):
            known |= own
            exported |= {*own, *words[place:]} if export else set()
            continue
        values = [value for word in words[place:] for value in _expand_word(word, known, budget)]
        if (behind := find_serve_arguments(values)) is not None:
            inherited = {name: known[name] for name in exported if name in known}
            found.append(VllmCommand(behind, inherited | own))
            if len(found) > 1:
                break
    return found


def _iter_simple_commands(script: str) -> Iterator[list[str]]:
    """The words of each, as they are written. Raises ValueError."""
    words: list[str] = []
    place = 0
    while place < len(script):
        token = _TOKEN.match(script, place)
        if token is None:
            line = script.count("\n", 0, place) + 1
            raise ValueError(f"its line {line} has more than simple commands, or a quotation that does not end")
        place = token.end()
        if token["word"] is not None:
            if not words and token["word"] in _COMPOUND_KEYWORDS:
                raise ValueError(f"it has '{token['word']}', and what of it runs cannot be told")
            words.append(token["word"])
        elif token["end"] is not None and words:
            yield words
            words = []
    if words:
        yield words


def _expand_word(word: str, variables: Mapping[str, str], budget: ExpansionBudget) -> list[str]:
    """What a word as it is written becomes: one word, or those of a value that stands there without quotes."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name is None:
            return found[4] or ("" if found[0] == "\\\n" else _COMMAND_SUBSTITUTION)
        return budget.consume(variables.get(name, found[0] if found[2] is None else found[2]))

    if re.search(r"['\"\\`(]", word) is None and "$" in word:
        return _EXPANSION.sub(value, word).split()
    pieces = _QUOTED_PIECE.findall(word)
    return [
        "".join(single + escaped.strip("\n") + _EXPANSION.sub(value, double + bare) for single, double, escaped, bare in pieces)
    ]
