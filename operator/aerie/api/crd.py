"""The CustomResourceDefinition of the models: a structural OpenAPI v3 schema, as the API server requires it.

https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema

Pydantic's JSON Schema is converted to that form. References are replaced by their targets. An optional field is one that is not
required, never a nullable one. A keyword that the API server does not know stops the generation instead of being dropped. The
default of a nested object is written in full, because the API server runs the rules on it before it fills in the inner
defaults.

`build_annotated_schema` keeps two keywords of Aerie's own for the docs: x-bounds and x-type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from aerie.api.resource import GROUP, KIND, MAX_NAME_CHARACTERS, PLURAL, VERSION, SpeculativeDeployment
from aerie.api.types import duration
from aerie.api.types.base import JsonObject, ResourceModel

SINGULAR = KIND.lower()
SHORT_NAME = "specdep"

_DOC_KEYWORDS = {"x-bounds", "x-type"}
_ALLOWED_KEYWORDS = _DOC_KEYWORDS | {
    "type",
    "format",
    "description",
    "default",
    "enum",
    "properties",
    "required",
    "items",
    "additionalProperties",
    "pattern",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "minimum",
    "maximum",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",
}


class SchemaError(Exception):
    """A model declares something that the API server's schema cannot express."""


class _StructuralSchemaGenerator(GenerateJsonSchema):
    """Pydantic's generator, changed where its output would not be a structural schema."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        return {"type": "string", "enum": list(schema["expected"])}

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, ResourceModel):
            return dft.to_dict()
        if isinstance(dft, timedelta):
            return duration.format_duration(dft)
        return super().encode_default(dft)


def build_annotated_schema(model: type[ResourceModel]) -> JsonObject:
    """Return the structural schema of a model, with Aerie's own keywords. Raises SchemaError."""
    document = model.model_json_schema(by_alias=True, schema_generator=_StructuralSchemaGenerator)
    return _to_structural_schema(document, document.get("$defs", {}), model.__name__)


def _to_structural_schema(node: JsonObject, definitions: JsonObject, path: str) -> JsonObject:
    """Return a schema node without references and titles. Raises SchemaError: an unknown keyword."""
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    node = {key: value for key, value in node.items() if key not in ("$defs", "title") and (key, value) != ("default", None)}
    if node.get("additionalProperties") in (True, False):
        del node["additionalProperties"]
    if unknown := node.keys() - _ALLOWED_KEYWORDS:
        raise SchemaError(f"{path}: the API server knows no {', '.join(sorted(unknown))}: write the field in another way.")
    if "description" in node:
        node["description"] = re.sub(r"\s*\n\s*", " ", node["description"].strip())
    if "properties" in node:
        node["properties"] = {
            name: _to_structural_schema(child, definitions, f"{path}.{name}") for name, child in node["properties"].items()
        }
    for key, path_suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if key in node:
            node[key] = _to_structural_schema(node[key], definitions, path + path_suffix)
    return node


def _to_published_schema(node: JsonObject) -> JsonObject:
    """Return the schema without Aerie's own keywords. Descriptions state default and bounds, because `kubectl explain` prints
    no others."""
    published = {key: value for key, value in node.items() if key not in _DOC_KEYWORDS}
    if "description" in node:
        published["description"] = " ".join([node["description"], *_describe_bounds(node)])
    if "properties" in node:
        published["properties"] = {name: _to_published_schema(child) for name, child in node["properties"].items()}
    for key in ("items", "additionalProperties"):
        if key in node:
            published[key] = _to_published_schema(node[key])
    return published


def _describe_bounds(node: JsonObject) -> Iterator[str]:
    default, low, high = node.get("default"), node.get("minimum"), node.get("maximum")
    if default not in (None, "") and not isinstance(default, dict):
        yield f"Default: {default if isinstance(default, str) else json.dumps(default)}."
    if "x-bounds" in node:
        yield f"From {node['x-bounds']}."
    elif low is not None and high is not None:
        yield f"From {low} to {high}."


def _build_printer_column(name: str, column_type: str, path: str, description: str, **extra: Any) -> JsonObject:
    return {"name": name, "type": column_type, "jsonPath": path, "description": description, **extra}


PRINTER_COLUMNS = [
    _build_printer_column("Phase", "string", ".status.phase", "Current phase; the conditions have the details."),
    _build_printer_column("Drafter", "string", ".status.stable.drafter", "Drafter that the stable pods serve with."),
    _build_printer_column("K", "integer", ".status.stable.setting.numSpeculativeTokens", "Draft tokens per step."),
    _build_printer_column(
        "AL",
        "number",
        ".status.stable.acceptanceLength",
        "Acceptance length: mean tokens per verification step (bonus token included).",
    ),
    _build_printer_column("Canary", "string", ".status.canary.change", "Change that the canary tests."),
    _build_printer_column("Canary-AL", "number", ".status.canary.acceptanceLength", "Acceptance length of the canary."),
    _build_printer_column(
        "In-Place",
        "string",
        ".status.inPlaceRollout.drafter",
        "Drafter that is rolled out in running pods (-o wide).",
        priority=1,
    ),
    _build_printer_column("Ready", "integer", ".status.readyReplicas", "Ready pods of all arms."),
    _build_printer_column("Age", "date", ".metadata.creationTimestamp", "Time since the resource was created."),
]


def build_root_schema() -> JsonObject:
    """Return the schema of the whole object, with Aerie's own keywords."""
    root = build_annotated_schema(SpeculativeDeployment)
    type_fields = {
        "apiVersion": f"{GROUP}/{VERSION}.",
        "kind": f"{KIND}.",
    }
    root["properties"] |= {name: {"type": "string", "description": text} for name, text in type_fields.items()}
    root["properties"]["metadata"] = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": MAX_NAME_CHARACTERS}},
    }
    root["required"] = ["spec"]
    return root


def build_custom_resource_definition() -> JsonObject:
    """Return the CustomResourceDefinition as a plain object."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": PRINTER_COLUMNS,
        "schema": {"openAPIV3Schema": _to_published_schema(build_root_schema())},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": ["aerie", "all"],
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }
