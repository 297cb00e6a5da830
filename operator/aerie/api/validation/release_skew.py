"""Statuses and definitions of other releases.

A newer release may have written fields that this one does not know: they stay as they are, in whatever this one writes
(`carried`). A definition in the cluster may be older than this release: then the API server drops fields that it writes
(`lacking`, `dropped`).

Guarantees: functions of their arguments. A field that is not known stays for as long as what it is part of is the same: an arm of
the same revision, the analysis of the same beginning, the same entry of a list.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from aerie.api.crd import annotated_schema
from aerie.api.resource import VERSION
from aerie.api.status import Status
from aerie.api.types.base import Json

_IDENTITY = ("revision", "startedAt")
"""Fields that tell one thing from another which takes its place."""


@functools.cache
def _schema() -> Json:
    return annotated_schema(Status)


def carried(made: Json, before: Json) -> Json:
    """The status `made`, with what was in the one before it and is no field of this release."""
    found: Json = _carried(made, before, _schema())
    return found


def _carried(made: Any, before: Any, schema: Json) -> Any:
    if isinstance(made, dict) and isinstance(before, dict) and "properties" in schema:
        if any(key in made and key in before and made[key] != before[key] for key in _IDENTITY):
            return made
        known = schema["properties"]
        found = {key: _carried(value, before.get(key), known[key]) for key, value in made.items()}
        return {**found, **{key: value for key, value in before.items() if key not in known}}
    if isinstance(made, list) and isinstance(before, list) and "properties" in schema.get("items", {}):
        return [_carried(item, _same(item, before, schema), schema["items"]) for item in made]
    return made


def _same(item: Json, before: list[Any], schema: Json) -> Any:
    """The entry of the list before that this one was."""
    keys = schema.get("x-kubernetes-list-map-keys")
    if keys is None:
        return next((one for one in before if _known_part(one, schema["items"]) == item), None)
    return next((one for one in before if all(one.get(key) == item.get(key) for key in keys)), None)


def _known_part(value: Any, schema: Json) -> Any:
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        return {key: _known_part(item, known[key]) for key, item in value.items() if key in known}
    if isinstance(value, list) and "items" in schema:
        return [_known_part(item, schema["items"]) for item in value]
    return value


def lacking(definition: Mapping[str, Any]) -> list[str]:
    """What of this release's status the CustomResourceDefinition does not have: fields, and values of fields."""
    versions = (definition.get("spec") or {}).get("versions") or []
    installed: Json = next((one for one in versions if one.get("name") == VERSION), {})
    root: Json = (installed.get("schema") or {}).get("openAPIV3Schema") or {}
    status: Json | None = (root.get("properties") or {}).get("status")
    return list(_lacking(_schema(), status, "status"))


def _lacking(ours: Json, theirs: Json | None, path: str) -> Iterator[str]:
    if theirs is None:
        yield path
        return
    if theirs.get("x-kubernetes-preserve-unknown-fields"):
        return
    values: list[str] = theirs.get("enum") or ours.get("enum") or []
    yield from (f"{path}: {value}" for value in ours.get("enum") or [] if value not in values)
    for name, schema in (ours.get("properties") or {}).items():
        yield from _lacking(schema, (theirs.get("properties") or {}).get(name), f"{path}.{name}")
    if "items" in ours:
        yield from _lacking(ours["items"], theirs.get("items"), f"{path}[]")


def dropped(written: Any, stored: Any, path: str = "status") -> Iterator[str]:
    """Fields that were written and are not in what the API server has stored."""
    if isinstance(written, dict) and isinstance(stored, dict):
        for name, value in written.items():
            if name in stored:
                yield from dropped(value, stored[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}"
    elif isinstance(written, list) and isinstance(stored, list):
        for item, kept in zip(written, stored, strict=False):
            yield from dropped(item, kept, f"{path}[]")
