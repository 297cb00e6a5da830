"""Typed reads of fields in JSON that an untrusted server has sent.

Guarantees: a value that is read has its type and is within its limits; otherwise `FieldError` names the field and what it has to
be, and quotes nothing of the JSON. Text for users has printable characters only and a maximum length. Not guaranteed: anything
about fields that are not read, so that a newer server may send more of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

MAX_TEXT_CHARACTERS = 400
"""Characters of a text that users get to read."""
_T = TypeVar("_T")


class FieldError(ValueError):
    """A field that is missing or invalid; the message is a clause."""


def parse_object(body: bytes) -> JsonObject:
    """Parse the JSON object in the body of a response. Raises FieldError."""
    try:
        value: object = json.loads(body.decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise FieldError("the body is not JSON") from None
    return JsonObject(value, "the body")


def _reject_constant(_: str) -> NoReturn:
    raise ValueError("no number of JSON")


class JsonObject:
    """An object in JSON."""

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, dict):
            raise FieldError(f"{path} is not an object")
        self._values: dict[str, object] = value
        self._path = "" if path == "the body" else f"{path}."

    def has(self, name: str) -> bool:
        """Return whether there is a field of this name, of whatever value."""
        return name in self._values

    def read_text(self, name: str, pattern: re.Pattern[str]) -> str:
        """Return a text that matches the pattern as a whole. Raises FieldError."""
        value = self._values.get(name)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise FieldError(f"{self._path}{name} does not match {pattern.pattern}")
        return value

    def read_message(self, name: str) -> str:
        """Return a text for users, shortened, without characters that are not printable. Raises FieldError."""
        value = self._values.get(name)
        if not isinstance(value, str):
            raise FieldError(f"{self._path}{name} is not text")
        text = "".join(
            character if character.isprintable() else "?" for character in " ".join(value[: 4 * MAX_TEXT_CHARACTERS].split())
        )
        return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[: MAX_TEXT_CHARACTERS - 1]}…"

    def read_boolean(self, name: str) -> bool:
        """Return true or false. Raises FieldError."""
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise FieldError(f"{self._path}{name} is neither true nor false")
        return value

    def read_number(self, name: str, maximum: float) -> float:
        """Return a number from 0 to `maximum`. Raises FieldError."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum or not math.isfinite(value):
            raise FieldError(f"{self._path}{name} is not a number from 0 to {maximum:g}")
        return float(value)

    def read_integer(self, name: str, maximum: int) -> int:
        """Return an integer from 0 to `maximum`. Raises FieldError."""
        value = self._values.get(name)
        if type(value) is not int or not 0 <= value <= maximum:
            raise FieldError(f"{self._path}{name} is not an integer from 0 to {maximum}")
        return value

    def read_object(self, name: str, read: Callable[[JsonObject], _T]) -> _T:
        """Return what `read` makes of an object. Raises FieldError."""
        return read(JsonObject(self._values.get(name), f"{self._path}{name}"))

    def read_optional(self, name: str, read: Callable[[str], _T]) -> _T | None:
        """Return what `read` makes of the field, or None where it is null. Raises FieldError; a field that is missing is none."""
        if name not in self._values:
            raise FieldError(f"{self._path}{name} is missing")
        return None if self._values[name] is None else read(name)

    def read_list(self, name: str, maximum: int, read: Callable[[JsonObject], _T]) -> tuple[_T, ...]:
        """Return what `read` makes of each object of a list of at most `maximum`. Raises FieldError."""
        values = self._values.get(name)
        if not isinstance(values, list) or len(values) > maximum:
            raise FieldError(f"{self._path}{name} is not a list of at most {maximum}")
        return tuple(read(JsonObject(value, f"{self._path}{name}[{index}]")) for index, value in enumerate(values))

    def read_texts(self, name: str, maximum: int, key_pattern: re.Pattern[str], pattern: re.Pattern[str]) -> dict[str, str]:
        """Return an object of at most `maximum` texts, whose keys and values match the patterns. Raises FieldError."""
        values = self._values.get(name)
        if not isinstance(values, dict) or len(values) > maximum:
            raise FieldError(f"{self._path}{name} is not an object of at most {maximum} fields")
        for key, value in values.items():
            if not key_pattern.fullmatch(key) or not isinstance(value, str) or not pattern.fullmatch(value):
                raise FieldError(f"{self._path}{name} has a field that does not match {key_pattern.pattern}: {pattern.pattern}")
        return values

    def iter_numbers(self, name: str) -> list[tuple[str, str, str]]:
        """Return the numbers of an object of objects: key, inner key, and the number as text. Raises FieldError."""
        groups = self._values.get(name)
        if not isinstance(groups, dict):
            raise FieldError(f"{self._path}{name} is not an object")
        numbers = []
        for key, values in groups.items():
            if not isinstance(values, dict):
                raise FieldError(f"{self._path}{name} has a field that is not an object")
            for inner_key, value in values.items():
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise FieldError(f"{self._path}{name} has a value that is not a number")
                numbers.append((key, inner_key, repr(value)))
        return numbers
