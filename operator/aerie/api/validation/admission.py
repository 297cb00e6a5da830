"""Validation of a manifest by the definition of the resource alone, before anything is applied.

Guarantees: the published schema (crds/) decides, keyword by keyword and rule by rule, after its defaults are filled in. Each
message names the field. As on the server, rules run only where the schema itself is met. Values are not repeated: an argument
or an address may hold a secret, and the messages are printed in logs of CI.

Not guaranteed: what depends on the existing object (rules with oldSelf), on other objects (quotas, webhooks, names that are
taken), and the syntax of labels and annotations of the object itself.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aerie.api.crd import build_root_schema
from aerie.api.types.base import JsonObject
from aerie.api.validation.cel import CelError, compile_expression

_OLD_SELF = re.compile(r"\boldSelf\b")


def find_manifest_errors(document: Mapping[str, Any]) -> list[str]:
    """Return a message for each error of a manifest; none: the API server accepts it."""
    schema = _resource_schema()
    completed = _apply_defaults(prune_manifest(document), schema)
    return list(_find_schema_errors(completed, schema, "")) or list(_find_rule_violations(completed, schema, ""))


def prune_manifest(document: Mapping[str, Any]) -> JsonObject:
    """Return a manifest without the fields that the API server drops before validation: the status, and each null at a known
    field."""
    pruned: JsonObject = _drop_nulls({key: value for key, value in document.items() if key != "status"}, _resource_schema())
    return pruned


@functools.cache
def _resource_schema() -> JsonObject:
    return build_root_schema()


def _iter_children(value: Any, schema: JsonObject, path: str) -> Iterator[tuple[Any, JsonObject, str]]:
    """Yield (value, schema, path) for the children of a value that the schema knows."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name, child in value.items():
            if child_schema := properties.get(name) or schema.get("additionalProperties"):
                yield child, child_schema, f"{path}.{name}".removeprefix(".") if name in properties else f"{path}[{name}]"
    elif isinstance(value, list) and "items" in schema:
        for index, child in enumerate(value):
            yield child, schema["items"], f"{path}[{index}]"


def _map_children(change: Callable[[Any, JsonObject], Any], value: Any, schema: JsonObject) -> Any:
    """Return a value with `change` applied to its children, each with its own schema."""
    if isinstance(value, list):
        return [change(child, schema.get("items", {})) for child in value]
    if not isinstance(value, dict):
        return value
    properties, additional = schema.get("properties", {}), schema.get("additionalProperties", {})
    return {key: change(child, properties.get(key, additional)) for key, child in value.items()}


def _drop_nulls(value: Any, schema: JsonObject) -> Any:
    if isinstance(value, dict):
        properties, has_additional = schema.get("properties", {}), "additionalProperties" in schema
        value = {key: child for key, child in value.items() if child is not None or not (has_additional or key in properties)}
    return _map_children(_drop_nulls, value, schema)


def _apply_defaults(value: Any, schema: JsonObject) -> Any:
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        defaults = {
            key: child_schema["default"]
            for key, child_schema in properties.items()
            if "default" in child_schema and key not in value
        }
        value = value | copy.deepcopy(defaults)
    return _map_children(_apply_defaults, value, schema)


# -- Schema --------------------------------------------------------------------------------------------------------------


def _find_schema_errors(value: Any, schema: JsonObject, path: str) -> Iterator[str]:
    if problem := _type_error_message(value, schema):
        yield f"{path} is {problem}."
        return
    missing = [name for name in schema.get("required", []) if isinstance(value, dict) and name not in value]
    yield from (f"{path}.{name}".removeprefix(".") + " is missing." for name in missing)
    yield from (f"{path} {problem}." for problem in _find_bound_errors(value, schema))
    yield from _find_duplicate_entries(value, schema, path)
    for child, child_schema, child_path in _iter_children(value, schema, path):
        yield from _find_schema_errors(child, child_schema, child_path)


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def _type_error_message(value: Any, schema: JsonObject) -> str:
    expected = ("integer", "string") if schema.get("x-kubernetes-int-or-string") else (schema.get("type"),)
    if expected == (None,) or type(value) in [kind for name in expected for kind in _PYTHON_TYPES[name or ""]]:
        return ""
    actual = "null" if value is None else next((name for name, kinds in _PYTHON_TYPES.items() if type(value) in kinds), "unknown")
    return f"of type {actual}: write {' or '.join(filter(None, expected))}"


def _find_bound_errors(value: Any, schema: JsonObject) -> Iterator[str]:
    """Yield the errors of a value that has the right type."""
    if "enum" in schema and value not in schema["enum"]:
        yield f"has an unknown value: write one of {', '.join(map(str, schema['enum']))}"
    if (
        isinstance(value, str)
        and "pattern" in schema
        and not compile_expression("self.matches(pattern)")({"self": value, "pattern": schema["pattern"]})
    ):
        yield f"does not match {schema['pattern']}"
    for keyword, python_type, unit in (
        ("Length", str, "characters"),
        ("Items", list, "entries"),
        ("Properties", dict, "entries"),
    ):
        if isinstance(value, python_type):
            amount = len(value)
            if amount < (minimum := schema.get(f"min{keyword}", 0)):
                yield f"has {amount} {unit}: write {minimum} or more"
            if amount > (maximum := schema.get(f"max{keyword}", amount)):
                yield f"has {amount} {unit}: write {maximum} at most"
    if type(value) in (int, float):
        if value < (minimum := schema.get("minimum", value)):
            yield f"is {value}: write {minimum} or more"
        if value > (maximum := schema.get("maximum", value)):
            yield f"is {value}: write {maximum} at most"


def _find_duplicate_entries(value: Any, schema: JsonObject, path: str) -> Iterator[str]:
    list_type = schema.get("x-kubernetes-list-type")
    if not isinstance(value, list) or list_type not in ("map", "set"):
        return
    names = schema.get("x-kubernetes-list-map-keys", [])
    previous_keys: list[Any] = []
    for index, entry in enumerate(value):
        key = [entry.get(name) for name in names] if list_type == "map" and isinstance(entry, dict) else entry
        if key in previous_keys:
            conflict = f"has the same {' and '.join(names)} as" if names else "is the same as"
            yield f"{path}[{index}] {conflict} an entry before it: leave one of them out."
        previous_keys.append(key)


# -- Rules ---------------------------------------------------------------------------------------------------------------


def _find_rule_violations(value: Any, schema: JsonObject, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        if not _OLD_SELF.search(rule["rule"]) and (message := _rule_violation_message(rule, value)):
            child_path = f"{path}{rule.get('fieldPath', '')}".removeprefix(".")
            yield f"{child_path}: {message}." if child_path else f"{message}."
    for child, child_schema, child_path in _iter_children(value, schema, path):
        yield from _find_rule_violations(child, child_schema, child_path)


def _rule_violation_message(rule: JsonObject, value: Any) -> str:
    """Return the message of a rule that a value violates; an empty string where the rule holds."""
    scope = {"self": value}
    try:
        if compile_expression(rule["rule"])(scope) is True:
            return ""
        return str(compile_expression(rule["messageExpression"])(scope)) if "messageExpression" in rule else str(rule["message"])
    except CelError:
        return str(rule["message"])
