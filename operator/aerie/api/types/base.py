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

Json = dict[str, Any]

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


class ResourceError(ValueError):
    """A document is no valid resource: one sentence per field, each with the field, what was found and what is expected."""

    def __init__(self, message: str, places: Sequence[tuple[str | int, ...]] = ()) -> None:
        super().__init__(message)
        self.places = places
        """Paths of all fields that cannot be read, where that is what is wrong."""


@dataclass(frozen=True)
class Rule:
    """One CEL rule that the API server checks at apply (https://kubernetes.io/docs/reference/using-api/cel/).

    `self` in the rule is the value that the rule stands at.
    """

    rule: str
    message: str
    """What is wrong and what to write instead."""
    found: str = ""
    """CEL expression of a message that names the values found; `message` stands in for it when it fails."""
    field: str = ""
    """The field to name in the error, as a path below the value that the rule stands at, such as ".maxTokens"."""
    lacks: bool = False
    """Whether the field is missing, rather than wrong: the error then says "Required value"."""

    def to_json(self) -> Json:
        """As an entry of x-kubernetes-validations."""
        document: Json = {"rule": self.rule, "message": self.message, "messageExpression": self.found}
        document |= {"fieldPath": self.field, "reason": "FieldValueRequired" if self.lacks else ""}
        return {key: value for key, value in document.items() if value}


def rules(*checks: Rule, **more: Any) -> Any:
    """What `json_schema_extra` takes: the rules, and further keywords of the schema.

    Typed Any because pydantic's own types of that argument differ from place to place.
    """
    return {"x-kubernetes-validations": [check.to_json() for check in checks], **more}


class Model(BaseModel):
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
    def from_dict(cls, document: Mapping[str, Any], *, unknown: Literal["ignore", "refuse"] = "ignore") -> Self:
        """Read what the API server returned, or with unknown="refuse" what a person wrote. Raises ResourceError."""
        try:
            return cls.model_validate(document, extra="ignore" if unknown == "ignore" else "forbid", by_alias=True, by_name=False)
        except ValidationError as error:
            details = error.errors()
            said = [_sentence(detail) for detail in details[:_MOST_SENTENCES]]
            if len(details) > len(said):
                said.append(f"There are {len(details) - len(said)} more.")
            raise ResourceError("\n".join(said), [detail["loc"] for detail in details]) from None

    def to_dict(self) -> Json:
        """As the API server takes it: camelCase, without the fields that are None."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")


_MOST_SENTENCES = 20
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 80
"""Shows a value whatever its size; also of what an alias of YAML has put in many times."""


def _sentence(detail: ErrorDetails) -> str:
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
    return f"{field} is {_BRIEF.repr(detail['input'])}: {reason[:1].lower()}{reason[1:]}."


# -- Types of single values ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Between:
    """Makes an `Annotated[timedelta, Between("10s", "1h")]` a duration of the resource with these bounds, both allowed."""

    shortest: str
    longest: str

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._read, serialization=core_schema.plain_serializer_function_ser_schema(duration.format)
        )

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        well_formed = Rule(
            f"self.matches('{duration.PATTERN}')",
            "no duration: write whole numbers with h, m, s or ms, such as 30s, 5m or 1h30m",
        )
        inside = Rule(
            f"{unless_malformed('self')} || (duration(self) >= duration('{self.shortest}') "
            f"&& duration(self) <= duration('{self.longest}'))",
            f"write a duration from {self.shortest} to {self.longest}",
        )
        return {
            "type": "string",
            "maxLength": duration.MAX_LENGTH,
            **rules(well_formed, inside),
            "x-bounds": f"{self.shortest} to {self.longest}",
            "x-type": "duration",
        }

    def _read(self, value: object) -> timedelta:
        length = duration.parse(value) if isinstance(value, str) else value
        if not isinstance(length, timedelta):
            raise ValueError(f"{_BRIEF.repr(value)} is no duration: write it as a string, such as 30s, 5m or 1h30m")
        if not duration.parse(self.shortest) <= length <= duration.parse(self.longest):
            raise ValueError(f"{value} is out of range: write a duration from {self.shortest} to {self.longest}")
        return length


def unless_malformed(*durations: str) -> str:
    """CEL that is true when one of the durations is none; that has a rule and a message of its own already.

    To be followed by `||`: CEL takes the true side of it even when the other one fails.
    """
    return " || ".join(f"!{name}.matches('{duration.PATTERN}')" for name in durations)


def number_as_text(value: object) -> object:
    """A whole number as its text, for fields that take either."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_QUANTITY = r"[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$"

Quantity = Annotated[
    str,
    BeforeValidator(number_as_text),
    Field(pattern=f"^-?{_QUANTITY}", max_length=32),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": f"^{_QUANTITY}",
            "maxLength": 32,
            # A pattern is about strings alone.
            **rules(Rule("type(self) != int || self >= 0", "write an amount of 0 or more")),
            "x-type": "Quantity",
        }
    ),
]
"""An amount as Kubernetes writes it: "1", "500m", "16Gi"; a whole number is read as its text. One below 0, which definitions of
earlier releases took as a number, is read too: the rest of its fleet is cared for, and Kubernetes says what it refuses of it."""


def _read_time(value: object) -> object:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def write_time(value: datetime) -> str:
    """RFC 3339, in UTC to the millisecond."""
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Time = Annotated[
    AwareDatetime,
    BeforeValidator(_read_time),
    PlainSerializer(write_time, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""A moment, RFC 3339 with a time zone; written in UTC to the millisecond."""

Name = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
"""The name of a Kubernetes object."""
