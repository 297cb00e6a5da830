"""Evaluates the rules of the resource (CEL) where there is no API server: before a manifest is applied.

The rules themselves are the only source; nothing repeats them in Python. This is the part of CEL that they use: literals, fields,
indices, operators, `? :`, has(), all(), exists(), exists_one(), filter(), and the functions in `_METHODS` and `_FUNCTIONS`
(https://github.com/google/cel-spec/blob/master/doc/langdef.md, https://kubernetes.io/docs/reference/using-api/cel/).

Guarantees: an expression that needs more than that raises CelError when it is compiled, so a test finds it; `&&` and `||` take
the side that decides even when the other one fails, as CEL does; `^` and `$` are the ends of the text, as in RE2. Not guaranteed:
static types (the API server checks these when the definition is applied), RE2's running time, limits on cost.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from aerie.api.types import duration

Scope = Mapping[str, Any]
Expression = Callable[[Scope], Any]


class CelError(Exception):
    """The expression is none of this part of CEL, or fails with these values."""


@functools.cache
def compiled(text: str) -> Expression:
    """A function from variables to the value of the expression, which raises CelError. Raises CelError."""
    parser = _Parser(text)
    found = parser.choice()
    if parser.next:
        parser.fail()
    return found


# -- Values --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Type:
    name: str


_TYPES = {bool: "bool", int: "int", float: "double", str: "string", list: "list", dict: "map", type(None): "null_type"}


def _type(value: Any) -> _Type:
    return _Type(_TYPES.get(type(value), "google.protobuf.Duration"))


def _matches(text: str, pattern: str) -> bool:
    return _regex(pattern).search(text) is not None


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    # Python's `$` also matches before a last line feed; in a class of characters it is one of them.
    ends = re.sub(r"\\.|\[\]?[^\]]*\]|\$", lambda match: r"\Z" if match[0] == "$" else match[0], pattern)
    return re.compile(ends, re.ASCII)


def _format(template: str, values: list[Any]) -> str:
    left = list(values)

    def written(match: re.Match[str]) -> str:
        value = left.pop(0)
        if match[0] == "%d" and not _is(value, int):
            raise CelError("%d takes an int")
        return _written(value)

    return re.sub("%[sd]", written, template)


def _written(value: Any) -> str:
    if isinstance(value, list) and all(_is(entry, int) for entry in value):
        return f"[{', '.join(map(str, value))}]"
    if not _is(value, str) and not _is(value, int):
        raise CelError(f"a {_type(value).name} has no text here")
    return str(value)


def _is(value: Any, kind: type) -> bool:
    return type(value) is kind


_METHODS: dict[str, tuple[type, Callable[..., Any]]] = {
    "matches": (str, _matches),
    "startsWith": (str, str.startswith),
    "split": (str, str.split),
    "format": (str, _format),
    "size": (object, len),
    "isSorted": (list, lambda entries: all(one <= other for one, other in itertools.pairwise(entries))),
    "getSeconds": (timedelta, lambda length: length // timedelta(seconds=1)),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"size": len, "type": _type, "duration": duration.parse}
_MACROS = ("all", "exists", "exists_one", "filter")
_COMPARISONS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "in": lambda value, values: value in values,
}  # fmt: skip
_SUMS = {"+": operator.add, "-": operator.sub}
_PRODUCTS = {"*": operator.mul}


def _apply(function: Callable[..., Any], *values: Any) -> Any:
    try:
        return function(*values)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise CelError(str(error)) from None


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise CelError(f"a {_type(value).name} stands where a bool has to")
    return value


@dataclass(frozen=True)
class _Field:
    """`of.name`, whose presence has() asks for."""

    of: Expression
    name: str

    def __call__(self, scope: Scope) -> Any:
        if not self.given(scope):
            raise CelError(f"no such key: {self.name}")
        return self.of(scope)[self.name]

    def given(self, scope: Scope) -> bool:
        owner = self.of(scope)
        if not isinstance(owner, dict):
            raise CelError(f"a {_type(owner).name} has no fields")
        return self.name in owner


def _decided(parts: list[Expression], scope: Scope, by: bool) -> bool:
    """Whether a part has the value that decides; a part that fails counts only where none does."""
    failed: CelError | None = None
    for part in parts:
        try:
            if _bool(part(scope)) is by:
                return True
        except CelError as error:
            failed = failed or error
    if failed:
        raise failed
    return False


def _each(macro: str, of: Expression, variable: str, body: Expression, scope: Scope) -> Any:
    values = of(scope)
    if not isinstance(values, list | dict):
        raise CelError(f"{macro}() stands at a {_type(values).name}")
    parts: list[Expression] = [lambda outer, value=value: body({**outer, variable: value}) for value in values]  # type: ignore[misc]
    if macro == "all":
        return not _decided(parts, scope, False)
    if macro == "exists":
        return _decided(parts, scope, True)
    held = [value for value, part in zip(values, parts, strict=True) if _bool(part(scope))]
    return held if macro == "filter" else len(held) == 1


# -- Syntax --------------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"\s*(?:(?P<float>\d+[.]\d+)|(?P<int>\d+)|(?P<text>'(?:[^'\\\n]|\\.)*')|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark>&&|\|\||[<>=!]=|[-+*!<>?:.,()\[\]]))"
)
_ESCAPES = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t", "r": "\r"}
_LITERALS = {"true": True, "false": False, "null": None}


class _Parser:
    """One method for each level of CEL's grammar, from the weakest operator to the strongest."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.kind, self.next = "", ""
        self.advance()

    def advance(self) -> None:
        match = _TOKEN.match(self.text, self.at)
        if match is None and self.text[self.at :].strip():
            self.next = self.text[self.at :].strip()[:20]
            self.fail()
        self.kind, self.next = (str(match.lastgroup), match[str(match.lastgroup)]) if match else ("", "")
        self.at = match.end() if match else len(self.text)

    def fail(self) -> NoReturn:
        raise CelError(f"{self.next or 'the end'} cannot stand there in {self.text}")

    def take(self, *marks: str) -> str:
        """The next token, where it is one of these; else nothing."""
        if self.kind not in ("mark", "name") or self.next not in marks:
            return ""
        taken = self.next
        self.advance()
        return taken

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            self.fail()

    def name(self) -> str:
        if self.kind != "name":
            self.fail()
        taken = self.next
        self.advance()
        return taken

    def choice(self) -> Expression:
        condition = self.logic("||", True)
        if not self.take("?"):
            return condition
        yes = self.logic("||", True)
        self.expect(":")
        no = self.choice()
        return lambda scope: yes(scope) if _bool(condition(scope)) else no(scope)

    def logic(self, mark: str, by: bool) -> Expression:
        def part() -> Expression:
            return self.logic("&&", False) if by else self.binary(_COMPARISONS, _SUMS, _PRODUCTS)

        parts = [part()]
        while self.take(mark):
            parts.append(part())
        return parts[0] if len(parts) == 1 else lambda scope: _decided(parts, scope, by) is by

    def binary(self, marks: Mapping[str, Callable[..., Any]], *stronger: Mapping[str, Callable[..., Any]]) -> Expression:
        def part() -> Expression:
            return self.binary(*stronger) if stronger else self.unary()

        found = part()
        while mark := self.take(*marks):
            found = _both(marks[mark], found, part())
        return found

    def unary(self) -> Expression:
        if self.take("!"):
            negated = self.unary()
            return lambda scope: not _bool(negated(scope))
        if self.take("-"):
            amount = self.unary()
            return lambda scope: _apply(operator.neg, amount(scope))
        return self.member()

    def member(self) -> Expression:
        found = self.primary()
        while mark := self.take(".", "["):
            if mark == "[":
                found = _both(operator.getitem, found, self.choice())
                self.expect("]")
                continue
            name = self.name()
            found = self.method(found, name) if self.take("(") else _Field(found, name)
        return found

    def method(self, of: Expression, name: str) -> Expression:
        if name in _MACROS:
            variable = self.name()
            self.expect(",")
            body = self.choice()
            self.expect(")")
            return lambda scope: _each(name, of, variable, body, scope)
        if name not in _METHODS:
            raise CelError(f"there is no method {name} in {self.text}")
        kind, function = _METHODS[name]
        arguments = self.list_until(")")

        def call(scope: Scope) -> Any:
            owner = of(scope)
            if not isinstance(owner, kind):
                raise CelError(f"a {_type(owner).name} has no method {name}")
            return _apply(function, owner, *(argument(scope) for argument in arguments))

        return call

    def list_until(self, end: str) -> list[Expression]:
        found: list[Expression] = []
        while not self.take(end):
            if found:
                self.expect(",")
            found.append(self.choice())
        return found

    def primary(self) -> Expression:
        if self.take("("):
            found = self.choice()
            self.expect(")")
            return found
        if self.take("["):
            entries = self.list_until("]")
            return lambda scope: [entry(scope) for entry in entries]
        kind, text = self.kind, self.next
        if kind not in ("int", "float", "text", "name"):
            self.fail()
        self.advance()
        if kind == "name":
            return self.called(text) if self.take("(") else _named(text)
        value: Any = int(text) if kind == "int" else float(text) if kind == "float" else _unescaped(text)
        return lambda _: value

    def called(self, name: str) -> Expression:
        arguments = self.list_until(")")
        if name == "has" and len(arguments) == 1 and isinstance(field := arguments[0], _Field):
            return field.given
        if name not in _FUNCTIONS:
            raise CelError(f"there is no function {name} in {self.text}")
        return lambda scope: _apply(_FUNCTIONS[name], *(argument(scope) for argument in arguments))


def _both(function: Callable[..., Any], one: Expression, other: Expression) -> Expression:
    return lambda scope: _apply(function, one(scope), other(scope))


def _named(name: str) -> Expression:
    def look_up(scope: Scope) -> Any:
        if name in scope:
            return scope[name]
        raise CelError(f"undeclared reference to {name}")

    if name in _LITERALS:
        return lambda _: _LITERALS[name]
    return (lambda _: _Type(name)) if name in _TYPES.values() else look_up


def _unescaped(text: str) -> str:
    def letter(match: re.Match[str]) -> str:
        if match[1] not in _ESCAPES:
            raise CelError(f"\\{match[1]} is no escape")
        return _ESCAPES[match[1]]

    return re.sub(r"\\(.)", letter, text[1:-1])
