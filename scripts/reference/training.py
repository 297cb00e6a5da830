"""The page of a training's settings, generated from their models."""

from __future__ import annotations

import json
from typing import Any

from aerie_drafter.train.settings import TrainingSettings
from scripts.reference.markdown import GENERATED, join_parts, table

INTRODUCTION = """\
# Settings of a training

This page lists every field of the YAML file of `aerie-drafter train`. [Train a drafter](../how-to/train-a-drafter.md) explains
how to choose them. `aerie-drafter train --init` prints a file with all of them, and `--schema` a JSON Schema."""


def page() -> str:
    """Return the page as Markdown."""
    schema = TrainingSettings.model_json_schema()
    parts = []
    for name, group in schema["properties"].items():
        definition = schema["$defs"][group["$ref"].rpartition("/")[2]]
        required = definition.get("required", [])
        rows = (
            (f"`{name}.{field}`", _type(each, schema), _default(field, each, required), each["description"])
            for field, each in definition["properties"].items()
        )
        parts += [f"## {name}", definition["description"], table(["field", "type", "default", "meaning"], rows)]
    return join_parts(GENERATED.format(source="drafter/aerie_drafter/train/settings.py"), INTRODUCTION, *parts)


def _type(field: dict[str, Any], schema: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(each, schema) for each in field["anyOf"] if each.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "$ref" in field:
        properties = schema["$defs"][field["$ref"].rpartition("/")[2]]["properties"]
        return f"mapping of {', '.join(properties)}"
    if field.get("type") == "array":
        return f"list of {_type(field['items'], schema)}" if "items" in field else f"list of {len(field['prefixItems'])} numbers"
    name: str = field.get("type", "")
    return {"string": "text", "object": "mapping", "boolean": "boolean"}.get(name, name)


def _default(name: str, field: dict[str, Any], required: list[str]) -> str:
    if name in required:
        return "required"
    value = field.get("default")
    return "" if value is None else f"`{json.dumps(value)}`"
