"""Statuses and definitions that other releases wrote.

A newer release may have written fields that this one does not know. They stay as they are in whatever this release writes
(`preserve_unknown_fields`). The definition in the cluster may be older than this release. The API server then drops fields that
this release writes (`find_missing_crd_fields`, `find_dropped_fields`).

Guarantees: functions of their arguments. An unknown field stays as long as its parent is the same: an arm of the same revision,
an analysis with the same start, the same entry of a list.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from aerie.api.crd import build_annotated_schema
from aerie.api.resource import VERSION
from aerie.api.status import Status
from aerie.api.types.base import JsonObject

_IDENTITY_FIELDS = ("revision", "startTime")
"""Fields that distinguish an object from its replacement."""


@functools.cache
def _status_schema() -> JsonObject:
    return build_annotated_schema(Status)


def preserve_unknown_fields(new_status: JsonObject, previous_status: JsonObject) -> JsonObject:
    """Return the new status with those fields of the previous one that this release does not know."""
    merged: JsonObject = _preserve_unknown(new_status, previous_status, _status_schema())
    return merged


def _preserve_unknown(new: Any, previous: Any, schema: JsonObject) -> Any:
    if isinstance(new, dict) and isinstance(previous, dict) and "properties" in schema:
        if any(key in new and key in previous and new[key] != previous[key] for key in _IDENTITY_FIELDS):
            return new
        known_fields = schema["properties"]
        merged = {key: _preserve_unknown(value, previous.get(key), known_fields[key]) for key, value in new.items()}
        return {**merged, **{key: value for key, value in previous.items() if key not in known_fields}}
    if isinstance(new, list) and isinstance(previous, list) and "properties" in schema.get("items", {}):
        return [_preserve_unknown(item, _find_previous_item(item, previous, schema), schema["items"]) for item in new]
    return new


def _find_previous_item(item: JsonObject, previous_items: list[Any], schema: JsonObject) -> Any:
    """Return the entry of the previous list that corresponds to this one, or None."""
    keys = schema.get("x-kubernetes-list-map-keys")
    if keys is None:
        return next(
            (previous_item for previous_item in previous_items if _drop_unknown_fields(previous_item, schema["items"]) == item),
            None,
        )
    return next(
        (previous_item for previous_item in previous_items if all(previous_item.get(key) == item.get(key) for key in keys)), None
    )


def _drop_unknown_fields(value: Any, schema: JsonObject) -> Any:
    if isinstance(value, dict) and "properties" in schema:
        known_fields = schema["properties"]
        return {key: _drop_unknown_fields(item, known_fields[key]) for key, item in value.items() if key in known_fields}
    if isinstance(value, list) and "items" in schema:
        return [_drop_unknown_fields(item, schema["items"]) for item in value]
    return value


def find_missing_crd_fields(crd: Mapping[str, Any]) -> list[str]:
    """Return the fields, and values of fields, of this release's status that the CustomResourceDefinition lacks."""
    versions = (crd.get("spec") or {}).get("versions") or []
    installed: JsonObject = next((version for version in versions if version.get("name") == VERSION), {})
    root: JsonObject = (installed.get("schema") or {}).get("openAPIV3Schema") or {}
    status: JsonObject | None = (root.get("properties") or {}).get("status")
    return list(_find_missing_fields(_status_schema(), status, "status"))


def _find_missing_fields(expected: JsonObject, installed: JsonObject | None, path: str) -> Iterator[str]:
    if installed is None:
        yield path
        return
    if installed.get("x-kubernetes-preserve-unknown-fields"):
        return
    values: list[str] = installed.get("enum") or expected.get("enum") or []
    yield from (f"{path}: {value}" for value in expected.get("enum") or [] if value not in values)
    for name, schema in (expected.get("properties") or {}).items():
        yield from _find_missing_fields(schema, (installed.get("properties") or {}).get(name), f"{path}.{name}")
    if "items" in expected:
        yield from _find_missing_fields(expected["items"], installed.get("items"), f"{path}[]")


def find_dropped_fields(written: Any, stored: Any, path: str = "status") -> Iterator[str]:
    """Yield the fields that were written and are not in the object that the API server has stored."""
    if isinstance(written, dict) and isinstance(stored, dict):
        for name, value in written.items():
            if name in stored:
                yield from find_dropped_fields(value, stored[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}"
    elif isinstance(written, list) and isinstance(stored, list):
        for item, stored_item in zip(written, stored, strict=False):
            yield from find_dropped_fields(item, stored_item, f"{path}[]")
