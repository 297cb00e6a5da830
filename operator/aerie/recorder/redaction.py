"""Replaces what the patterns of the resource match, in every text of a prompt.

Guarantees: pure. Patterns are RE2, so the time of a match grows linearly with the text. They are applied in order, each to all
texts: of messages, tool definitions, tool calls and template arguments, at whatever depth. A number is matched as its text, and
becomes a text where something matches. A text that is JSON itself, such as the arguments of a tool call, is matched twice: the
values and names in it, without escapes, and then the whole. Replacements are literal. A role is never changed. What is inserted
into a prompt has a limit: short matches with long replacements can make it many times larger. Not guaranteed: names of fields
inside of tools and template arguments are not redacted, a match does not reach from one text into the next, and escapes are not
resolved in a text that is JSON in part only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import re2

from aerie.recorder.prompts import Prompt

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False


MAX_INSERTED_CHARACTERS = 2 * 2**20
"""Limit of the characters that replacements insert into a prompt."""


class TooManyReplacementsError(Exception):
    """The replacements in a prompt exceed the limit."""


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
        """Return the prompt with all matches replaced. Raises TooManyReplacementsError, and RecursionError for one that is nested
        too deeply."""
        if not self._patterns:
            return prompt
        inserted = 0
        unmatched: set[str] = set()  # a list of many numbers repeats them, and each pattern takes microseconds for each

        def insert(replacement: str) -> str:
            nonlocal inserted
            inserted += len(replacement)
            if inserted > MAX_INSERTED_CHARACTERS:
                raise TooManyReplacementsError
            return replacement

        def replace(text: str) -> str:
            if text in unmatched:
                return text
            replaced = text
            for compiled, replacement in self._patterns:
                replaced = compiled.sub(lambda _match, replacement=replacement: insert(replacement), replaced)
            if replaced == text:
                unmatched.add(text)
            return replaced

        def redact_text(text: str) -> str:
            document = _parse_json(text)
            redacted = redact_value(document, replace)
            # Unchanged where nothing matches, so that the drafter is trained on what was sent.
            return replace(text if redacted == document else json.dumps(redacted, ensure_ascii=False))

        def redact_value(value: Any, redact_name: Callable[[str], str] = str) -> Any:
            if isinstance(value, str):
                return redact_text(value)
            if isinstance(value, dict):
                return {redact_name(name): redact_value(item, redact_name) for name, item in value.items()}
            if isinstance(value, list):
                return [redact_value(item, redact_name) for item in value]
            if isinstance(value, int | float) and not isinstance(value, bool):
                text = _format_number(value)
                redacted = replace(text)
                return value if redacted == text else redacted
            return value

        messages = tuple(redact_value(message) | {"role": message["role"]} for message in prompt.messages)
        return Prompt(messages, tuple(map(redact_value, prompt.tools)), redact_value(prompt.template_arguments))


def _parse_json(text: str) -> Any:
    """Return the content of a text that is a JSON object, list or text; None for others."""
    if not text.lstrip().startswith(("{", "[", '"')):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _format_number(value: float) -> str:
    """Return the digits of a number, without an exponent if it is whole."""
    return str(int(value)) if isinstance(value, int) or value.is_integer() else repr(value)


def _compile(pattern: str) -> Any:
    try:
        return re2.compile(pattern, _OPTIONS)
    except re2.error as error:
        detail = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else error.args[0]
        raise PatternError(f"The pattern {pattern!r} is no RE2 expression ({detail}): correct it.") from None
