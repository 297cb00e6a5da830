"""The page of the docs that lists every field of the resource, made from the schema of its models.

One section for each object, its fields in a table, and below it what the API server refuses. An object that stands in
several places, such as a source, is described once.
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

`aerie.dev/v1alpha1`, short name `{short}`. What a user has to write is in [examples](../examples); this page has every field.
`kubectl explain {short}.spec.rollout.analysis` tells the same on the command line, a few seconds after the definition was made.

A default is written into the stored object, so `kubectl get {short} NAME -o yaml` shows what is in force. Durations are whole
numbers with `h`, `m`, `s` or `ms`, such as `1h30m`. A sentence under "Refused" begins with the field it is about.
`kubectl get {short}` shows {columns}.

Refused at apply, whatever the fields:

{refused}
"""


def page() -> str:
    """The page, as Markdown."""
    root = build_root_schema()
    columns = ", ".join(f"{column['name']} (`{column['jsonPath']}`)" for column in PRINTER_COLUMNS)
    seen: dict[str, str] = {}
    found = [part for name in ("spec", "status") for part in _objects(name, root["properties"][name], seen)]
    sections = (_section(path, node, seen) for path, node in found)
    longest = root["properties"]["metadata"]["properties"]["name"]["maxLength"]
    refused = [f"`.metadata.name`: at most {longest} characters", *_own_refusals(root)]
    text = INTRODUCTION.format(short=SHORT_NAME, columns=columns, refused="\n".join(f"* {sentence}" for sentence in refused))
    return "\n".join([text, *sections])


def _identity(node: Json) -> str:
    return json.dumps(node["properties"], sort_keys=True)


def _inner(node: Json) -> tuple[Json, str]:
    """The schema of one entry of a list, or the schema itself, with what to put behind its path."""
    return (node["items"], "[]") if node.get("type") == "array" else (node, "")


def _objects(path: str, node: Json, seen: dict[str, str]) -> Iterator[tuple[str, Json]]:
    """Every object with fields, from the outside in, each once; `seen` gets the path of each."""
    seen[_identity(node)] = path
    yield path, node
    for name, child in node["properties"].items():
        inner, suffix = _inner(child)
        if "properties" in inner and _identity(inner) not in seen:
            yield from _objects(f"{path}.{name}{suffix}", inner, seen)


def _section(path: str, node: Json, seen: dict[str, str]) -> str:
    required = node.get("required", [])
    rows = [_row(name, child, name in required, seen) for name, child in node["properties"].items()]
    table = ["| Field | Type | Default | Bounds | What it is for |", "|---|---|---|---|---|", *rows]
    refused = list(_refusals(node))
    text = [f"## {path}", "", node.get("description", ""), "", *table]
    if refused:
        text += ["", "Refused at apply, with the sentence:", "", *(f"* {sentence}" for sentence in refused)]
    return "\n".join(text) + "\n"


def _row(name: str, node: Json, required: bool, seen: dict[str, str]) -> str:
    default = "required" if required else ""
    if "default" in node and "properties" not in node:
        default = f"`{json.dumps(node['default'])}`".replace('""', " ") if node["default"] != "" else "empty"
        default = default.replace('"', "")
    cells = [f"`{name}`", _type(node, seen), default, _bounds(node), node.get("description", "")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(node: Json, seen: dict[str, str]) -> str:
    inner, _ = _inner(node)
    many = "list of " if inner is not node else ""
    if "properties" in inner:
        where = seen[_identity(inner)]
        return f"{many}[{where.rpartition('.')[2].removesuffix('[]')}](#{_anchor(where)})"
    if "enum" in inner:
        return many + ", ".join(f"`{word}`" for word in inner["enum"])
    if "additionalProperties" in inner:
        return f"{many}map of {_type(inner['additionalProperties'], seen)}"
    if inner.get("x-kubernetes-preserve-unknown-fields"):
        return f"{many}any"
    if inner.get("format") == "date-time":
        return f"{many}time"
    return many + (inner.get("x-type") or str(inner["type"]))


def _anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return "".join(character for character in heading.lower() if character.isalnum() or character in "-_")


def _bounds(node: Json) -> str:
    inner, _ = _inner(node)
    found = [inner["x-bounds"]] if "x-bounds" in inner else []
    low, high = inner.get("minimum"), inner.get("maximum")
    if low is not None and high is not None:
        found.append(f"{low} to {high}")
    elif low is not None:
        found.append(f"at least {low}")
    if "maxLength" in inner and "x-bounds" not in inner and "x-type" not in inner:
        found.append(f"{inner['maxLength']} characters")
    if "minItems" in node:
        found.append(f"at least {node['minItems']}")
    found += [f"{node[key]} entries" for key in ("maxItems", "maxProperties") if key in node]
    return ", ".join(found)


def _own_refusals(node: Json) -> Iterator[str]:
    for rule in node.get("x-kubernetes-validations", []):
        yield (f"`{rule['fieldPath']}`: " if "fieldPath" in rule else "") + rule["message"]


def _refusals(node: Json) -> Iterator[str]:
    """The sentences of an object's own rules and of those of its plain fields."""
    yield from _own_refusals(node)
    for name, child in node["properties"].items():
        parts = [child] if child is _inner(child)[0] else [child, child["items"]]
        for part in parts:
            # An object's rules stand in its own section, and what a duration is stands in the introduction.
            if "properties" not in part and part.get("x-type") != "duration":
                yield from (f"`.{name}`: {rule['message']}" for rule in part.get("x-kubernetes-validations", []))
