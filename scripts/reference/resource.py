"""The reference page of the resource, generated from the schema of its models.

Each object has a section with a table of its fields, and with the rules by which the API server rejects it. An object that
occurs several times, such as a source, is described once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from aerie.api.crd import PRINTER_COLUMNS, SHORT_NAME, build_root_schema

Json = dict[str, Any]

INTRODUCTION = """\
<!-- Generated from operator/aerie/api by `make crds`. Change the models, not this file. -->

# SpeculativeDeployment

`aerie.dev/v1alpha1`, short name `{short}`. The [examples](../../examples) contain the required fields; this page has every field.
`kubectl explain {short}.spec.rollout.analysis` prints the same on the command line.

Defaults are written into the stored object, so `kubectl get {short} NAME -o yaml` shows the active values. Durations are whole
numbers with `h`, `m`, `s` or `ms`, such as `1h30m`. A message under "Rejected" begins with its field.

`kubectl get {short}` shows these columns:

{columns}

Rejected at apply, for the whole object:

{rejections}
"""
METRICS = """\
## Metrics

[metrics.md](metrics.md) lists the metrics of the operator.
"""


def page() -> str:
    """Return the page as Markdown."""
    root = build_root_schema()
    rows = [f"| {column['name']} | `{column['jsonPath']}` | {column['description']} |" for column in PRINTER_COLUMNS]
    columns = "\n".join(["| Column | Field | Description |", "|---|---|---|", *rows])
    paths_by_identity: dict[str, str] = {}
    objects = [entry for name in ("spec", "status") for entry in _objects(name, root["properties"][name], paths_by_identity)]
    sections = (_section(path, node, paths_by_identity) for path, node in objects)
    max_characters = root["properties"]["metadata"]["properties"]["name"]["maxLength"]
    messages = [f"`.metadata.name`: at most {max_characters} characters", *_own_rejections(root)]
    rejections = "\n".join(f"* {message}" for message in messages)
    text = INTRODUCTION.format(short=SHORT_NAME, columns=columns, rejections=rejections)
    return "\n".join([text, *sections, METRICS])


def _identity(node: Json) -> str:
    return json.dumps(node["properties"], sort_keys=True)


def _inner(node: Json) -> tuple[Json, str]:
    """Return the schema of one entry of a list, or the schema itself, with the suffix of its path."""
    return (node["items"], "[]") if node.get("type") == "array" else (node, "")


def _objects(path: str, node: Json, paths_by_identity: dict[str, str]) -> Iterator[tuple[str, Json]]:
    """Yield every object with fields once, outer ones first; the path of each is added to `paths_by_identity`."""
    paths_by_identity[_identity(node)] = path
    yield path, node
    for name, child in node["properties"].items():
        inner, suffix = _inner(child)
        if "properties" in inner and _identity(inner) not in paths_by_identity:
            yield from _objects(f"{path}.{name}{suffix}", inner, paths_by_identity)


def _section(path: str, node: Json, paths_by_identity: dict[str, str]) -> str:
    required = node.get("required", [])
    rows = [_row(name, child, name in required, paths_by_identity) for name, child in node["properties"].items()]
    table = ["| Field | Type | Default | Bounds | Description |", "|---|---|---|---|---|", *rows]
    rejections = list(_rejections(node))
    text = [f"## {path}", "", node.get("description", ""), "", *table]
    if rejections:
        text += ["", "Rejected at apply, with the message:", "", *(f"* {message}" for message in rejections)]
    return "\n".join(text) + "\n"


def _row(name: str, node: Json, required: bool, paths_by_identity: dict[str, str]) -> str:
    default = "required" if required else ""
    if "default" in node and "properties" not in node:
        default = f"`{json.dumps(node['default'])}`".replace('""', " ") if node["default"] != "" else "empty"
        default = default.replace('"', "")
    cells = [f"`{name}`", _type(node, paths_by_identity), default, _bounds(node), node.get("description", "")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(node: Json, paths_by_identity: dict[str, str]) -> str:
    inner, _ = _inner(node)
    many = "list of " if inner is not node else ""
    if "properties" in inner:
        path = paths_by_identity[_identity(inner)]
        return f"{many}[{path.rpartition('.')[2].removesuffix('[]')}](#{_anchor(path)})"
    if "enum" in inner:
        return many + ", ".join(f"`{value}`" for value in inner["enum"])
    if "additionalProperties" in inner:
        return f"{many}map of {_type(inner['additionalProperties'], paths_by_identity)}"
    if inner.get("x-kubernetes-preserve-unknown-fields"):
        return f"{many}any"
    if inner.get("format") == "date-time":
        return f"{many}time"
    return many + (inner.get("x-type") or str(inner["type"]))


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return "".join(character for character in heading.lower() if character.isalnum() or character in "-_")


def _bounds(node: Json) -> str:
    inner, _ = _inner(node)
    bounds = [inner["x-bounds"]] if "x-bounds" in inner else []
    low, high = inner.get("minimum"), inner.get("maximum")
    if low is not None and high is not None:
        bounds.append(f"{low} to {high}")
    elif low is not None:
        bounds.append(f"at least {low}")
    if "maxLength" in inner and "x-bounds" not in inner and "x-type" not in inner:
        bounds.append(f"{inner['maxLength']} characters")
    if "minItems" in node:
        bounds.append(f"at least {node['minItems']}")
    bounds += [f"{node[key]} entries" for key in ("maxItems", "maxProperties") if key in node]
    return ", ".join(bounds)


def _own_rejections(node: Json) -> Iterator[str]:
    for rule in node.get("x-kubernetes-validations", []):
        yield (f"`{rule['fieldPath']}`: " if "fieldPath" in rule else "") + rule["message"]


def _rejections(node: Json) -> Iterator[str]:
    """Yield the messages of an object's own rules and of the rules of its plain fields."""
    yield from _own_rejections(node)
    for name, child in node["properties"].items():
        parts = [child] if child is _inner(child)[0] else [child, child["items"]]
        for part in parts:
            # An object's rules are in its own section, and the introduction explains durations.
            if "properties" not in part and part.get("x-type") != "duration":
                yield from (f"`.{name}`: {rule['message']}" for rule in part.get("x-kubernetes-validations", []))
