"""Common base of all models of the resource: their configuration, schema rules, and the types of single values.

A model declares everything about its fields once: type, bounds, default, and the purpose in the docstring below the field.
crd.py generates the CustomResourceDefinition from it, and docs/reference/resource.md is generated from that.

Reading is lenient about unknown fields (an object that a newer Aerie wrote), and exact about known ones. The API server runs
the schema's CEL rules (`ValidationRule`), and validation/admission.py runs them before anything is applied. A model does not
repeat them, except for the few that later code relies on.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel, to_snake
from pydantic_core import ErrorDetails, core_schema

from aerie.api.types import duration

JsonObject = dict[str, Any]

DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


class ResourceError(ValueError):
    """A document is not a valid resource. The message has a line per field: the field, its value and the expected value."""

    def __init__(self, message: str, paths: Sequence[tuple[str | int, ...]] = ()) -> None:
        super().__init__(message)
        self.paths = paths
        """Paths of all fields that cannot be read, where that is the problem."""


@dataclass(frozen=True)
class ValidationRule:
    """One CEL rule that the API server checks at apply (https://kubernetes.io/docs/reference/using-api/cel/).

    `self` in the rule is the value to which the rule is attached.
    """

    rule: str
    message: str
    """The problem and what to write instead."""
    message_expression: str = ""
    """CEL expression of a message that contains the values found; `message` replaces it when it fails."""
    field_path: str = ""
    """Field to name in the error, as a path below the value to which the rule is attached, such as ".maxSpeculativeTokens"."""
    is_missing_field: bool = False
    """Whether the field is missing rather than wrong: the error then says "Required value"."""

    def to_json(self) -> JsonObject:
        """Return the rule as an entry of x-kubernetes-validations."""
        document: JsonObject = {"rule": self.rule, "message": self.message, "messageExpression": self.message_expression}
        document |= {"fieldPath": self.field_path, "reason": "FieldValueRequired" if self.is_missing_field else ""}
        return {key: value for key, value in document.items() if value}


def schema_extra(*rules: ValidationRule, **keywords: Any) -> Any:
    """Return a value for `json_schema_extra`: the rules, and further keywords of the schema.

    Typed Any because pydantic's own types of that argument differ from place to place.
    """
    return {"x-kubernetes-validations": [check.to_json() for check in rules], **keywords}


@dataclass(frozen=True)
class ExactlyOneRule:
    """Rule that exactly one of the fields with these names, in camelCase, is given."""

    fields: tuple[str, ...]

    def to_validation_rule(self) -> ValidationRule:
        """Return the rule for the schema."""
        count = f"[{', '.join(f'has(self.{field})' for field in self.fields)}].filter(given, given).size()"
        return ValidationRule(f"{count} == 1", self._message, f"'{self._message}, not %d of them'.format([{count}])")

    def check(self, model: BaseModel) -> None:
        """Raise ValueError unless the model has exactly one, for code that relies on it."""
        count = sum(getattr(model, to_snake(field)) is not None for field in self.fields)
        if count != 1:
            raise ValueError(f"{self._message}, not {count} of them")

    @property
    def _message(self) -> str:
        return f"write exactly one of {', '.join(self.fields[:-1])} and {self.fields[-1]}"


class ResourceModel(BaseModel):
    """Base of all models: immutable, names in camelCase, descriptions from the fields' docstrings."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], *, unknown_fields: Literal["ignore", "forbid"] = "ignore") -> Self:
        """Read what the API server returned, or with unknown_fields="forbid" what a user wrote. Raises ResourceError."""
        try:
            return cls.model_validate(document, extra=unknown_fields, by_alias=True, by_name=False)
        except ValidationError as error:
            details = error.errors()
            messages = [_format_error(detail) for detail in details[:_MAX_REPORTED_ERRORS]]
            if len(details) > len(messages):
                messages.append(f"There are {len(details) - len(messages)} more.")
            raise ResourceError("\n".join(messages), [detail["loc"] for detail in details]) from None

    def to_dict(self) -> JsonObject:
        """Return the document for the API server: camelCase, without the fields that are None."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")


_MAX_REPORTED_ERRORS = 20
_VALUE_REPR = reprlib.Repr()
_VALUE_REPR.maxstring = _VALUE_REPR.maxother = _VALUE_REPR.maxlong = 80
"""Formats a value of any size, also one that YAML aliases have expanded many times."""


def _format_error(detail: ErrorDetails) -> str:
    path = ""
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    field = path.removeprefix(".") or "the object"
    if detail["type"] == "missing":
        return f"{field} is missing."
    if detail["type"] == "extra_forbidden":
        return f"{field} is not a field of the resource: correct its name, or remove it."
    reason = detail["msg"].removeprefix("Value error, ")
    reason = reason if len(reason) <= 500 else reason[:499] + "…"
    if detail["type"] == "value_error":
        return f"{field}: {reason}."
    return f"{field} is {_VALUE_REPR.repr(detail['input'])}: {reason[:1].lower()}{reason[1:]}."


# -- Types of single values ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DurationRange:
    """Bounds of a duration: `Annotated[timedelta, DurationRange("10s", "1h")]` is a duration of the resource from 10s to 1h,
    both allowed."""

    minimum: str
    maximum: str

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._validate, serialization=core_schema.plain_serializer_function_ser_schema(duration.format_duration)
        )

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        well_formed = ValidationRule(
            f"self.matches('{duration.DURATION_PATTERN}')",
            "not a duration: write whole numbers with h, m, s or ms, such as 30s, 5m or 1h30m",
        )
        within_range = ValidationRule(
            f"{cel_any_malformed_duration('self')} || (duration(self) >= duration('{self.minimum}') "
            f"&& duration(self) <= duration('{self.maximum}'))",
            f"write a duration from {self.minimum} to {self.maximum}",
        )
        return {
            "type": "string",
            "maxLength": duration.MAX_DURATION_CHARACTERS,
            **schema_extra(well_formed, within_range),
            "x-bounds": f"{self.minimum} to {self.maximum}",
            "x-type": "duration",
        }

    def _validate(self, value: object) -> timedelta:
        parsed = duration.parse_duration(value) if isinstance(value, str) else value
        if not isinstance(parsed, timedelta):
            raise ValueError(f"{_VALUE_REPR.repr(value)} is not a duration: write it as a string, such as 30s, 5m or 1h30m")
        if not duration.parse_duration(self.minimum) <= parsed <= duration.parse_duration(self.maximum):
            raise ValueError(f"{value} is out of range: write a duration from {self.minimum} to {self.maximum}")
        return parsed


def cel_any_malformed_duration(*durations: str) -> str:
    """Return CEL that is true when one of the durations is malformed; another rule reports that with a message of its own.

    It has to be followed by `||`: CEL takes the true side even when the other side fails.
    """
    return " || ".join(f"!{name}.matches('{duration.DURATION_PATTERN}')" for name in durations)


def int_to_text(value: object) -> object:
    """Return an integer as its text, and any other value as it is, for fields that take either."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_QUANTITY_PATTERN = r"[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$"

Quantity = Annotated[
    str,
    BeforeValidator(int_to_text),
    Field(pattern=f"^-?{_QUANTITY_PATTERN}", max_length=32),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": f"^{_QUANTITY_PATTERN}",
            "maxLength": 32,
            # A pattern applies to strings alone.
            **schema_extra(ValidationRule("type(self) != int || self >= 0", "write an amount of 0 or more")),
            "x-type": "Quantity",
        }
    ),
]
"""An amount as Kubernetes writes it: "1", "500m", "16Gi"; an integer is read as its text. A negative amount, which definitions
of earlier releases accepted, is read too: the rest of its resource is still reconciled, and Kubernetes reports what it rejects.
"""


def _parse_timestamp(value: object) -> object:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def format_timestamp(value: datetime) -> str:
    """Return the time in RFC 3339, in UTC to the millisecond."""
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Timestamp = Annotated[
    AwareDatetime,
    BeforeValidator(_parse_timestamp),
    PlainSerializer(format_timestamp, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""A time in RFC 3339 with a time zone; written in UTC to the millisecond."""

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN_PATTERN)]
"""Name of a Kubernetes object."""
