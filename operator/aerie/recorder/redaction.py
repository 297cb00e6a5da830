"""Replaces what the patterns of the resource match, in every text of a prompt.

Guarantees: pure. Patterns are RE2, so the time of a match grows linearly with the text. They are applied in order, each to all
texts: of messages, tool definitions, tool calls and template arguments, at whatever depth. Replacements are literal. A role is
never changed. Not guaranteed: names of fields inside of tools and template arguments are not redacted, and a match does not reach
from one text into the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import re2

from aerie.recorder.prompts import Prompt

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False


class PatternError(ValueError):
    """A pattern that RE2 does not accept; the message is a full sentence."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern, and the text that replaces its matches."""

    pattern: str
    replacement: str


class Redaction:
    """Compiled patterns. Raises PatternError."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self._patterns = [(_compile(item.pattern), item.replacement) for item in patterns]

    def redact(self, prompt: Prompt) -> Prompt:
        """Return the prompt with all matches replaced. Raises RecursionError for one that is nested too deeply."""
        messages = tuple(self._redact_value(message) | {"role": message["role"]} for message in prompt.messages)
        return Prompt(messages, tuple(map(self._redact_value, prompt.tools)), self._redact_value(prompt.template_arguments))

    def _redact_value(self, value: Any) -> Any:
        if isinstance(value, str):
            for compiled, replacement in self._patterns:
                value = compiled.sub(lambda _match, text=replacement: text, value)
            return value
        if isinstance(value, dict):
            return {name: self._redact_value(item) for name, item in value.items()}
        return [self._redact_value(item) for item in value] if isinstance(value, list) else value


def _compile(pattern: str) -> Any:
    try:
        return re2.compile(pattern, _OPTIONS)
    except re2.error as error:
        detail = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else error.args[0]
        raise PatternError(f"The pattern {pattern!r} is no RE2 expression ({detail}): correct it.") from None
