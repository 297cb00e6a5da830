"""What all models of the resource have in common: their configuration, schema rules, and the types of single values.

A model says everything about its fields once: type, bounds, default, and in the docstring below the field what it is for.
crd.py makes the CustomResourceDefinition of it, and docs/reference.md is made of that.

Reading is lenient about what is there besides (an object that a newer Aerie wrote), and exact about what is known. The
schema's CEL rules (`Rule`) are run by the API server, and by admission.py before anything is applied: a model does not repeat
them, apart from the few that later code leans on.
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
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails, core_schema

from aerie.api.types import duration

JsonObject = dict[str, Any]

DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


class ResourceError(ValueError):
    """A document is no valid resource: one sentence per field, each with the field, what was found and what is expected."""

    def __init__(self, message: str, paths: Sequence[tuple[str | int, ...]] = ()) -> None:
        super().__init__(message)
        self.paths = paths
        """Paths of all fields that cannot be read, where that is what is wrong."""


@dataclass(frozen=True)
class ValidationRule:
    """One CEL rule that the API server checks at apply (https://kubernetes.io/docs/reference/using-api/cel/).

    `self` in the rule is the value that the rule stands at.
    """

    rule: str
    message: str
    """What is wrong and what to write instead."""
    message_expression: str = ""
    """CEL expression of a message that names the values found; `message` stands in for it when it fails."""
    field_path: str = ""
    """The field to name in the error, as a path below the value that the rule stands at, such as ".maxTokens"."""
    is_missing_field: bool = False
    """Whether the field is missing, rather than wrong: the error then says "Required value"."""

    def to_json(self) -> JsonObject:
        """As an entry of x-kubernetes-validations."""
        document: JsonObject = {"rule": self.rule, "message": self.message, "messageExpression": self.message_expression}
        document |= {"fieldPath": self.field_path, "reason": "FieldValueRequired" if self.is_missing_field else ""}
        return {key: value for key, value in document.items() if value}


def schema_extra(*rules: ValidationRule, **keywords: Any) -> Any:
    """What `json_schema_extra` takes: the rules, and further keywords of the schema.

    Typed Any because pydantic's own types of that argument differ from place to place.
    """
    return {"x-kubernetes-validations": [check.to_json() for check in rules], **keywords}


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
    def from_dict(cls, document: Mapping[str, Any], *, unknown_fields: Literal["ignore", "refuse"] = "ignore") -> Self:
        """Read what the API server returned, or with unknown="refuse" what a person wrote. Raises ResourceError."""
        try:
            return cls.model_validate(
                document, extra="ignore" if unknown_fields == "ignore" else "forbid", by_alias=True, by_name=False
            )
        except ValidationError as error:
            details = error.errors()
            said = [_format_error(detail) for detail in details[:_MAX_REPORTED_ERRORS]]
            if len(details) > len(said):
                said.append(f"There are {len(details) - len(said)} more.")
            raise ResourceError("\n".join(said), [detail["loc"] for detail in details]) from None

    def to_dict(self) -> JsonObject:
        """As the API server takes it: camelCase, without the fields that are None."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")


_MAX_REPORTED_ERRORS = 20
_VALUE_REPR = reprlib.Repr()
_VALUE_REPR.maxstring = _VALUE_REPR.maxother = _VALUE_REPR.maxlong = 80
"""Shows a value whatever its size; also of what an alias of YAML has put in many times."""


def _format_error(detail: ErrorDetails) -> str:
    path = ""
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    field = path.removeprefix(".") or "the object"
    if detail["type"] == "missing":
        return f"{field} is missing."
    if detail["type"] == "extra_forbidden":
        return f"{field} is no field of the resource: correct its name, or remove it."
    reason = detail["msg"].removeprefix("Value error, ")
    reason = reason if len(reason) <= 500 else reason[:499] + "…"
    if detail["type"] == "value_error":
        return f"{field}: {reason}."
    return f"{field} is {_VALUE_REPR.repr(detail['input'])}: {reason[:1].lower()}{reason[1:]}."


# -- Types of single values ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DurationRange:
    """Makes an `Annotated[timedelta, Between("10s", "1h")]` a duration of the resource with these bounds, both allowed."""

    minimum: str
    maximum: str

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._validate, serialization=core_schema.plain_serializer_function_ser_schema(duration.format_duration)
        )

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        well_formed = ValidationRule(
            f"self.matches('{duration.DURATION_PATTERN}')",
            "no duration: write whole numbers with h, m, s or ms, such as 30s, 5m or 1h30m",
        )
        inside = ValidationRule(
            f"{cel_any_malformed_duration('self')} || (duration(self) >= duration('{self.minimum}') "
            f"&& duration(self) <= duration('{self.maximum}'))",
            f"write a duration from {self.minimum} to {self.maximum}",
        )
        return {
            "type": "string",
            "maxLength": duration.MAX_DURATION_CHARACTERS,
            **schema_extra(well_formed, inside),
            "x-bounds": f"{self.minimum} to {self.maximum}",
            "x-type": "duration",
        }

    def _validate(self, value: object) -> timedelta:
        length = duration.parse_duration(value) if isinstance(value, str) else value
        if not isinstance(length, timedelta):
            raise ValueError(f"{_VALUE_REPR.repr(value)} is no duration: write it as a string, such as 30s, 5m or 1h30m")
        if not duration.parse_duration(self.minimum) <= length <= duration.parse_duration(self.maximum):
            raise ValueError(f"{value} is out of range: write a duration from {self.minimum} to {self.maximum}")
        return length


def cel_any_malformed_duration(*durations: str) -> str:
    """CEL that is true when one of the durations is none; that has a rule and a message of its own already.

    To be followed by `||`: CEL takes the true side of it even when the other one fails.
    """
    return " || ".join(f"!{name}.matches('{duration.DURATION_PATTERN}')" for name in durations)


def int_to_text(value: object) -> object:
    """A whole number as its text, for fields that take either."""
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
            # A pattern is about strings alone.
            **schema_extra(ValidationRule("type(self) != int || self >= 0", "write an amount of 0 or more")),
            "x-type": "Quantity",
        }
    ),
]
"""An amount as Kubernetes writes it: "1", "500m", "16Gi"; a whole number is read as its text. One below 0, which definitions of
earlier releases took as a number, is read too: the rest of its fleet is cared for, and Kubernetes says what it refuses of it."""


def _parse_timestamp(value: object) -> object:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def format_timestamp(value: datetime) -> str:
    """RFC 3339, in UTC to the millisecond."""
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Timestamp = Annotated[
    AwareDatetime,
    BeforeValidator(_parse_timestamp),
    PlainSerializer(format_timestamp, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""A moment, RFC 3339 with a time zone; written in UTC to the millisecond."""

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN_PATTERN)]
"""The name of a Kubernetes object."""
