"""JSON schemas of manifests, from what the lab's pinned modules and this repository contain.

    k8s.io/kubernetes, api/openapi-spec/swagger.json ──► kinds of Kubernetes, in the release that the lab runs
    the lab's definitions of the Gateway API         ┐
    crds/                                            ┴─► kinds of definitions

Each schema is a file GROUP/KIND_VERSION.json without references to other files. An object has no fields but those of its schema.
Not guaranteed: formats and the rules of definitions (`x-kubernetes-validations`), which JSON schema cannot express.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from aerie_lab.binaries import toolchain
from aerie_lab.binaries.families import FAMILIES, BinaryFamily
from aerie_lab.binaries.lookup import ignore_progress
from aerie_lab.errors import BuildError

Schema = dict[str, Any]
_REFERENCE = "#/definitions/"
_STRING_OR_NUMBER: Schema = {"anyOf": [{"type": "string"}, {"type": "number"}]}
_LOOSE_DEFINITIONS = {
    "io.k8s.apimachinery.pkg.api.resource.Quantity": _STRING_OR_NUMBER,
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": _STRING_OR_NUMBER,
}
"""Definitions that the OpenAPI document calls strings, although the API server accepts numbers too."""


def write_schemas(folder: Path, definitions: Path) -> None:
    """Write the schemas below `folder`. `definitions`: a folder with CustomResourceDefinitions. Raises BuildError."""
    gateway = find_module_source(FAMILIES["contour"]) / "examples" / "gateway"
    documents = [
        document
        for source in (definitions, gateway)
        for file in sorted(source.glob("*.yaml"))
        for document in yaml.safe_load_all(file.read_text())
        if document and document["kind"] == "CustomResourceDefinition"
    ]
    swagger = json.loads((find_module_source(FAMILIES["kubernetes"]) / "api/openapi-spec/swagger.json").read_text())
    for path, schema in (*iter_builtin_schemas(swagger), *iter_custom_schemas(documents)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(schema))


def iter_builtin_schemas(swagger: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Yield (path, schema) of each kind of an OpenAPI document of Kubernetes."""
    definitions: dict[str, Schema] = {
        name: _LOOSE_DEFINITIONS.get(name) or forbid_unknown_fields(schema) for name, schema in swagger["definitions"].items()
    }
    for name, schema in definitions.items():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            used = _find_references(name, definitions)
            yield (
                _schema_path(kind["group"], kind["version"], kind["kind"]),
                {**schema, "definitions": {reference: definitions[reference] for reference in sorted(used)}},
            )


def iter_custom_schemas(documents: list[Mapping[str, Any]]) -> Iterator[tuple[str, Schema]]:
    """Yield (path, schema) of each version of each CustomResourceDefinition."""
    for document in documents:
        spec = document["spec"]
        for version in spec["versions"]:
            schema = forbid_unknown_fields(version["schema"]["openAPIV3Schema"])
            for field in ("apiVersion", "kind", "metadata"):
                schema["properties"].setdefault(field, {})
            yield _schema_path(spec["group"], version["name"], spec["names"]["kind"]), schema


def forbid_unknown_fields(schema: Schema) -> Schema:
    """Return the schema as JSON schema: objects with fields have no others, and Kubernetes' own keywords are translated."""
    result = {key: _convert(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        result["properties"] = {name: forbid_unknown_fields(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        result |= _STRING_OR_NUMBER
        result.pop("type", None)
    if schema.get("nullable") and "type" in schema:
        result["type"] = [schema["type"], "null"]
    return result


def _convert(value: Any) -> Any:
    if isinstance(value, dict):
        return forbid_unknown_fields(value)
    return [_convert(item) for item in value] if isinstance(value, list) else value


def _find_references(name: str, definitions: Mapping[str, Schema]) -> set[str]:
    """Return the definitions that a definition needs, in any depth."""
    references: set[str] = set()
    remaining = [name]
    while remaining:
        direct = set(_iter_references(definitions[remaining.pop()])) - references
        references |= direct
        remaining += direct
    return references


def _iter_references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference.removeprefix(_REFERENCE)
        for item in value.values():
            yield from _iter_references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iter_references(item)


def _schema_path(group: str, version: str, kind: str) -> str:
    """Return the path by kubeconform's rule: the group of the core's kinds is their version."""
    return f"{group or version}/{kind.lower()}_{version}.json"


def find_module_source(family: BinaryFamily) -> Path:
    """Return the folder with the source of a family's pinned module, which is fetched if necessary. Raises BuildError."""
    go = toolchain.find_go(family.min_go_version, ignore_progress)
    with tempfile.TemporaryDirectory() as folder:  # a copy, because Go locks a file beside go.mod
        module = Path(folder) / "module"
        shutil.copytree(family.sources, module)
        command = [str(go.path), "mod", "download", "-json", family.module]
        done = subprocess.run(command, cwd=module, env=dict(go.environment), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{family.module} cannot be fetched: {done.stderr.strip() or done.stdout.strip()}")
    return Path(json.loads(done.stdout)["Dir"])
