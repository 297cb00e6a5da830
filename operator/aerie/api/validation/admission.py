"""What the API server would refuse of a manifest, by the definition of the resource alone: before anything is applied.

Guarantees: the schema that is published (crds/) decides, keyword by keyword and rule by rule, after its defaults are filled in;
each sentence names the field. As on the server, rules run only where the schema itself is met. Values are not repeated: an
argument or an address may hold a secret, and this is printed in logs of CI.

Not guaranteed: what depends on the object that is there already (rules with oldSelf), on other objects (quotas, webhooks, names
that are taken), and the syntax of labels and annotations of the object itself.
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
    """A sentence for each fault of a manifest; none: the API server takes it."""
    schema = _resource_schema()
    stored = _apply_defaults(prune_manifest(document), schema)
    return list(_find_schema_errors(stored, schema, "")) or list(_find_rule_violations(stored, schema, ""))


def prune_manifest(document: Mapping[str, Any]) -> JsonObject:
    """A manifest without what the API server drops before it looks: the status, and each null at a field that it knows."""
    found: JsonObject = _drop_nulls({key: value for key, value in document.items() if key != "status"}, _resource_schema())
    return found


@functools.cache
def _resource_schema() -> JsonObject:
    return build_root_schema()


def _iter_children(value: Any, schema: JsonObject, path: str) -> Iterator[tuple[Any, JsonObject, str]]:
    """The parts of a value that the schema knows."""
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name, part in value.items():
            if inner := known.get(name) or schema.get("additionalProperties"):
                yield part, inner, f"{path}.{name}".removeprefix(".") if name in known else f"{path}[{name}]"
    elif isinstance(value, list) and "items" in schema:
        for index, part in enumerate(value):
            yield part, schema["items"], f"{path}[{index}]"


def _map_children(change: Callable[[Any, JsonObject], Any], value: Any, schema: JsonObject) -> Any:
    """A value with its parts changed, each by its own schema."""
    if isinstance(value, list):
        return [change(part, schema.get("items", {})) for part in value]
    if not isinstance(value, dict):
        return value
    known, more = schema.get("properties", {}), schema.get("additionalProperties", {})
    return {key: change(part, known.get(key, more)) for key, part in value.items()}


def _drop_nulls(value: Any, schema: JsonObject) -> Any:
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), "additionalProperties" in schema
        value = {key: part for key, part in value.items() if part is not None or not (more or key in known)}
    return _map_children(_drop_nulls, value, schema)


def _apply_defaults(value: Any, schema: JsonObject) -> Any:
    if isinstance(value, dict):
        known = schema.get("properties", {})
        missing = {key: inner["default"] for key, inner in known.items() if "default" in inner and key not in value}
        value = value | copy.deepcopy(missing)
    return _map_children(_apply_defaults, value, schema)


# -- Schema --------------------------------------------------------------------------------------------------------------


def _find_schema_errors(value: Any, schema: JsonObject, path: str) -> Iterator[str]:
    if fault := _type_error_message(value, schema):
        yield f"{path} is {fault}."
        return
    missing = [name for name in schema.get("required", []) if isinstance(value, dict) and name not in value]
    yield from (f"{path}.{name}".removeprefix(".") + " is missing." for name in missing)
    yield from (f"{path} {fault}." for fault in _find_bound_errors(value, schema))
    yield from _find_duplicate_entries(value, schema, path)
    for part, inner, where in _iter_children(value, schema, path):
        yield from _find_schema_errors(part, inner, where)


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
    given = "null" if value is None else next((name for name, kinds in _PYTHON_TYPES.items() if type(value) in kinds), "unknown")
    return f"of type {given}: write {' or '.join(filter(None, expected))}"


def _find_bound_errors(value: Any, schema: JsonObject) -> Iterator[str]:
    """What is wrong with a value that has the right type."""
    if "enum" in schema and value not in schema["enum"]:
        yield f"has a value that is not known: write one of {', '.join(map(str, schema['enum']))}"
    if (
        isinstance(value, str)
        and "pattern" in schema
        and not compile_expression("self.matches(pattern)")({"self": value, "pattern": schema["pattern"]})
    ):
        yield f"does not match {schema['pattern']}"
    for keyword, kind, unit in (("Length", str, "characters"), ("Items", list, "entries"), ("Properties", dict, "entries")):
        if isinstance(value, kind):
            amount = len(value)
            if amount < (least := schema.get(f"min{keyword}", 0)):
                yield f"has {amount} {unit}: write {least} or more"
            if amount > (most := schema.get(f"max{keyword}", amount)):
                yield f"has {amount} {unit}: write {most} at most"
    if type(value) in (int, float):
        if value < (least := schema.get("minimum", value)):
            yield f"is {value}: write {least} or more"
        if value > (most := schema.get("maximum", value)):
            yield f"is {value}: write {most} at most"


def _find_duplicate_entries(value: Any, schema: JsonObject, path: str) -> Iterator[str]:
    kind = schema.get("x-kubernetes-list-type")
    if not isinstance(value, list) or kind not in ("map", "set"):
        return
    names = schema.get("x-kubernetes-list-map-keys", [])
    seen: list[Any] = []
    for index, entry in enumerate(value):
        key = [entry.get(name) for name in names] if kind == "map" and isinstance(entry, dict) else entry
        if key in seen:
            what = f"has the same {' and '.join(names)} as" if names else "is the same as"
            yield f"{path}[{index}] {what} an entry before it: leave one of them out."
        seen.append(key)


# -- Rules ---------------------------------------------------------------------------------------------------------------


def _find_rule_violations(value: Any, schema: JsonObject, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        if not _OLD_SELF.search(rule["rule"]) and (message := _rule_violation_message(rule, value)):
            where = f"{path}{rule.get('fieldPath', '')}".removeprefix(".")
            yield f"{where}: {message}." if where else f"{message}."
    for part, inner, where in _iter_children(value, schema, path):
        yield from _find_rule_violations(part, inner, where)


def _rule_violation_message(rule: JsonObject, value: Any) -> str:
    """What a rule says against a value; nothing where it holds."""
    scope = {"self": value}
    try:
        if compile_expression(rule["rule"])(scope) is True:
            return ""
        return str(compile_expression(rule["messageExpression"])(scope)) if "messageExpression" in rule else str(rule["message"])
    except CelError:
        return str(rule["message"])
