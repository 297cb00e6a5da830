"""Evaluation of the resource's CEL rules without an API server: before a manifest is applied.

The rules themselves are the only source; nothing repeats them in Python. This is the part of CEL that they use: literals,
fields, indices, operators, `? :`, has(), all(), exists(), exists_one(), filter(), and the functions in `_METHODS` and
`_FUNCTIONS` (https://github.com/google/cel-spec/blob/master/doc/langdef.md,
https://kubernetes.io/docs/reference/using-api/cel/).

Guarantees: an expression that needs more than that raises CelError when it is compiled, so a test finds it. `&&` and `||` take
the deciding side even when the other one fails, as CEL does. Regular expressions are RE2's, where the package google-re2 is
installed (the extra `capture`). Not guaranteed: static types (the API server checks these when the definition is applied), limits
on cost. Without that package, patterns are Python's, which has other escapes; only `$` and character classes are as in RE2.
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

try:
    import re2
except ImportError:
    re2 = None
else:
    _RE2_OPTIONS = re2.Options()
    _RE2_OPTIONS.log_errors = False

CelScope = Mapping[str, Any]
CelExpression = Callable[[CelScope], Any]


class CelError(Exception):
    """The expression is not in the supported part of CEL, or fails with these values."""


@functools.cache
def compile_expression(text: str) -> CelExpression:
    """Return a function from variables to the value of the expression. Raises CelError, and so does the function when it is
    called."""
    parser = _Parser(text)
    expression = parser.parse_conditional()
    if parser.token:
        parser.fail()
    return expression


# -- Values --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CelType:
    name: str


_CEL_TYPE_NAMES = {bool: "bool", int: "int", float: "double", str: "string", list: "list", dict: "map", type(None): "null_type"}


def _cel_type(value: Any) -> _CelType:
    return _CelType(_CEL_TYPE_NAMES.get(type(value), "google.protobuf.Duration"))


def _matches(text: str, pattern: str) -> bool:
    return _compile_re2(pattern).search(text) is not None


@functools.cache
def _compile_re2(pattern: str) -> Any:
    if re2 is not None:
        try:
            return re2.compile(pattern, _RE2_OPTIONS)
        except re2.error as error:
            raise ValueError(str(error)) from None
    # Python's `$` also matches before a final line feed. Inside a character class it is a literal.
    translated = re.sub(r"\\.|\[\]?[^\]]*\]|\$", lambda match: r"\Z" if match[0] == "$" else match[0], pattern)
    return re.compile(translated, re.ASCII)


def _format_template(template: str, values: list[Any]) -> str:
    remaining = list(values)

    def format_next(match: re.Match[str]) -> str:
        value = remaining.pop(0)
        if match[0] == "%d" and not _has_exact_type(value, int):
            raise CelError("%d takes an int")
        return _to_text(value)

    return re.sub("%[sd]", format_next, template)


def _to_text(value: Any) -> str:
    if isinstance(value, list) and all(_has_exact_type(entry, int) for entry in value):
        return f"[{', '.join(map(str, value))}]"
    if not _has_exact_type(value, str) and not _has_exact_type(value, int):
        raise CelError(f"a {_cel_type(value).name} has no text here")
    return str(value)


def _has_exact_type(value: Any, kind: type) -> bool:
    return type(value) is kind


_METHODS: dict[str, tuple[type, Callable[..., Any]]] = {
    "matches": (str, _matches),
    "startsWith": (str, str.startswith),
    "split": (str, str.split),
    "format": (str, _format_template),
    "size": (object, len),
    "isSorted": (list, lambda entries: all(first <= second for first, second in itertools.pairwise(entries))),
    "getSeconds": (timedelta, lambda length: length // timedelta(seconds=1)),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"size": len, "type": _cel_type, "duration": duration.parse_duration}
_MACROS = ("all", "exists", "exists_one", "filter")
_COMPARISON_OPERATORS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "in": lambda value, values: value in values,
}  # fmt: skip
_ADDITIVE_OPERATORS = {"+": operator.add, "-": operator.sub}
_MULTIPLICATIVE_OPERATORS = {"*": operator.mul}


def _apply(function: Callable[..., Any], *values: Any) -> Any:
    try:
        return function(*values)
    except (TypeError, ValueError, LookupError, ArithmeticError, re.error) as error:
        raise CelError(str(error)) from None


def _require_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise CelError(f"a {_cel_type(value).name} stands where a bool has to")
    return value


@dataclass(frozen=True)
class _FieldAccess:
    """Field access `operand.name`; has() tests its presence."""

    operand: CelExpression
    name: str

    def __call__(self, scope: CelScope) -> Any:
        if not self.is_present(scope):
            raise CelError(f"no such key: {self.name}")
        return self.operand(scope)[self.name]

    def is_present(self, scope: CelScope) -> bool:
        owner = self.operand(scope)
        if not isinstance(owner, dict):
            raise CelError(f"a {_cel_type(owner).name} has no fields")
        return self.name in owner


def _any_part_equals(parts: list[CelExpression], scope: CelScope, deciding_value: bool) -> bool:
    """Return whether a part has the deciding value; a part that fails counts only where none has it."""
    first_error: CelError | None = None
    for part in parts:
        try:
            if _require_bool(part(scope)) is deciding_value:
                return True
        except CelError as error:
            first_error = first_error or error
    if first_error:
        raise first_error
    return False


def _evaluate_macro(macro: str, operand: CelExpression, variable: str, body: CelExpression, scope: CelScope) -> Any:
    values = operand(scope)
    if not isinstance(values, list | dict):
        raise CelError(f"{macro}() stands at a {_cel_type(values).name}")
    parts: list[CelExpression] = [lambda outer, value=value: body({**outer, variable: value}) for value in values]  # type: ignore[misc]
    if macro == "all":
        return not _any_part_equals(parts, scope, False)
    if macro == "exists":
        return _any_part_equals(parts, scope, True)
    matching = [value for value, part in zip(values, parts, strict=True) if _require_bool(part(scope))]
    return matching if macro == "filter" else len(matching) == 1


# -- Syntax --------------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"\s*(?:(?P<float>\d+[.]\d+)|(?P<int>\d+)|(?P<text>'(?:[^'\\\n]|\\.)*')|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark>&&|\|\||[<>=!]=|[-+*!<>?:.,()\[\]]))"
)
_ESCAPES = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t", "r": "\r"}
_LITERALS = {"true": True, "false": False, "null": None}


class _Parser:
    """Parser with one method for each level of CEL's grammar, from the weakest operator to the strongest."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.token_kind, self.token = "", ""
        self.advance()

    def advance(self) -> None:
        match = _TOKEN.match(self.text, self.position)
        if match is None and self.text[self.position :].strip():
            self.token = self.text[self.position :].strip()[:20]
            self.fail()
        self.token_kind, self.token = (str(match.lastgroup), match[str(match.lastgroup)]) if match else ("", "")
        self.position = match.end() if match else len(self.text)

    def fail(self) -> NoReturn:
        raise CelError(f"{self.token or 'the end'} cannot stand there in {self.text}")

    def accept(self, *tokens: str) -> str:
        """Consume and return the next token, if it is one of these; else return an empty string."""
        if self.token_kind not in ("mark", "name") or self.token not in tokens:
            return ""
        token = self.token
        self.advance()
        return token

    def expect(self, expected_token: str) -> None:
        if not self.accept(expected_token):
            self.fail()

    def parse_name(self) -> str:
        if self.token_kind != "name":
            self.fail()
        name = self.token
        self.advance()
        return name

    def parse_conditional(self) -> CelExpression:
        condition = self.parse_logical("||", True)
        if not self.accept("?"):
            return condition
        if_true = self.parse_logical("||", True)
        self.expect(":")
        if_false = self.parse_conditional()
        return lambda scope: if_true(scope) if _require_bool(condition(scope)) else if_false(scope)

    def parse_logical(self, operator_token: str, deciding_value: bool) -> CelExpression:
        def part() -> CelExpression:
            return (
                self.parse_logical("&&", False)
                if deciding_value
                else self.parse_binary(_COMPARISON_OPERATORS, _ADDITIVE_OPERATORS, _MULTIPLICATIVE_OPERATORS)
            )

        parts = [part()]
        while self.accept(operator_token):
            parts.append(part())
        return parts[0] if len(parts) == 1 else lambda scope: _any_part_equals(parts, scope, deciding_value) is deciding_value

    def parse_binary(
        self, operators: Mapping[str, Callable[..., Any]], *stronger: Mapping[str, Callable[..., Any]]
    ) -> CelExpression:
        def part() -> CelExpression:
            return self.parse_binary(*stronger) if stronger else self.parse_unary()

        expression = part()
        while token := self.accept(*operators):
            expression = _binary_expression(operators[token], expression, part())
        return expression

    def parse_unary(self) -> CelExpression:
        if self.accept("!"):
            operand = self.parse_unary()
            return lambda scope: not _require_bool(operand(scope))
        if self.accept("-"):
            operand = self.parse_unary()
            return lambda scope: _apply(operator.neg, operand(scope))
        return self.parse_member()

    def parse_member(self) -> CelExpression:
        expression = self.parse_primary()
        while token := self.accept(".", "["):
            if token == "[":
                expression = _binary_expression(operator.getitem, expression, self.parse_conditional())
                self.expect("]")
                continue
            name = self.parse_name()
            expression = self.parse_method_call(expression, name) if self.accept("(") else _FieldAccess(expression, name)
        return expression

    def parse_method_call(self, operand: CelExpression, method_name: str) -> CelExpression:
        if method_name in _MACROS:
            variable = self.parse_name()
            self.expect(",")
            body = self.parse_conditional()
            self.expect(")")
            return lambda scope: _evaluate_macro(method_name, operand, variable, body, scope)
        if method_name not in _METHODS:
            raise CelError(f"there is no method {method_name} in {self.text}")
        kind, function = _METHODS[method_name]
        arguments = self.parse_list(")")

        def call(scope: CelScope) -> Any:
            owner = operand(scope)
            if not isinstance(owner, kind):
                raise CelError(f"a {_cel_type(owner).name} has no method {method_name}")
            return _apply(function, owner, *(argument(scope) for argument in arguments))

        return call

    def parse_list(self, end: str) -> list[CelExpression]:
        elements: list[CelExpression] = []
        while not self.accept(end):
            if elements:
                self.expect(",")
            elements.append(self.parse_conditional())
        return elements

    def parse_primary(self) -> CelExpression:
        if self.accept("("):
            expression = self.parse_conditional()
            self.expect(")")
            return expression
        if self.accept("["):
            entries = self.parse_list("]")
            return lambda scope: [entry(scope) for entry in entries]
        kind, text = self.token_kind, self.token
        if kind not in ("int", "float", "text", "name"):
            self.fail()
        self.advance()
        if kind == "name":
            return self.parse_function_call(text) if self.accept("(") else _name_expression(text)
        value: Any = int(text) if kind == "int" else float(text) if kind == "float" else _unescape(text)
        return lambda _: value

    def parse_function_call(self, function_name: str) -> CelExpression:
        arguments = self.parse_list(")")
        if function_name == "has" and len(arguments) == 1 and isinstance(field := arguments[0], _FieldAccess):
            return field.is_present
        if function_name not in _FUNCTIONS:
            raise CelError(f"there is no function {function_name} in {self.text}")
        return lambda scope: _apply(_FUNCTIONS[function_name], *(argument(scope) for argument in arguments))


def _binary_expression(function: Callable[..., Any], left: CelExpression, right: CelExpression) -> CelExpression:
    return lambda scope: _apply(function, left(scope), right(scope))


def _name_expression(name: str) -> CelExpression:
    def look_up(scope: CelScope) -> Any:
        if name in scope:
            return scope[name]
        raise CelError(f"undeclared reference to {name}")

    if name in _LITERALS:
        return lambda _: _LITERALS[name]
    return (lambda _: _CelType(name)) if name in _CEL_TYPE_NAMES.values() else look_up


def _unescape(text: str) -> str:
    def replacement(match: re.Match[str]) -> str:
        if match[1] not in _ESCAPES:
            raise CelError(f"\\{match[1]} is no escape")
        return _ESCAPES[match[1]]

    return re.sub(r"\\(.)", replacement, text[1:-1])
