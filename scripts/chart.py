"""Generated parts of charts/aerie: the copy of the resource's definition, and the descriptions of its values.

A chart cannot read outside of its own folder, so it contains a copy of the definition. Its values are described once, by the
comment right above each key of values.yaml: README.md gets a table of them, values.schema.json the descriptions. The rest of
both files is written by hand. A key without a comment, or a key that the schema lacks, is a ChartError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

BEGIN = "<!-- values: begin; written by `make crds` from the comments of values.yaml -->"
END = "<!-- values: end -->"
GLOBAL = "global"
"""Key that Helm adds to the values of a chart that another chart depends on."""

Json = dict[str, Any]


class ChartError(Exception):
    """Error: the chart's files contradict each other."""


@dataclass(frozen=True)
class Value:
    """One key of values.yaml."""

    path: tuple[str, ...]
    description: str
    default: Any
    inner: bool
    """Whether the keys below it are described instead of its default."""

    @property
    def name(self) -> str:
        """Path as `helm --set` takes it."""
        return ".".join(self.path)


def files(chart: Path, definition: str) -> Iterator[tuple[str, str]]:
    """Yield (path in the chart, content) of each generated file; `definition` is the resource's definition as YAML."""
    values = list(described(chart / "values.yaml"))
    yield "files/aerie.dev_speculativedeployments.yaml", definition
    schema = json.loads((chart / "values.schema.json").read_text())
    yield "values.schema.json", json.dumps(with_descriptions(schema, values), indent=2) + "\n"
    yield "README.md", with_table((chart / "README.md").read_text(), values)


def described(path: Path) -> Iterator[Value]:
    """Yield the described keys of a values file, from top to bottom. Raises ChartError."""
    text = path.read_text()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ChartError(f"{path.name} has no keys: write one YAML mapping.")
    yield from _keys(root, yaml.safe_load(text), (), text.splitlines(), path.name)


def _keys(node: yaml.MappingNode, defaults: Json, above: tuple[str, ...], lines: list[str], file: str) -> Iterator[Value]:
    for key, child in node.value:
        path = (*above, key.value)
        description = _comment(lines, key.start_mark.line)
        if not description:
            raise ChartError(f"{file}: {'.'.join(path)} has no comment right above it: describe it there.")
        default = defaults[key.value]
        inner = isinstance(child, yaml.MappingNode) and any(_comment(lines, k.start_mark.line) for k, _ in child.value)
        yield Value(path, description, default, inner)
        if inner:
            yield from _keys(child, default, path, lines, file)


def _comment(lines: list[str], key: int) -> str:
    """Return the comment that ends right above line `key`, as one paragraph."""
    first = key
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(line.strip().lstrip("#").strip() for line in lines[first:key])


def with_descriptions(schema: Json, values: list[Value]) -> Json:
    """Return the schema with the description of each value. Raises ChartError if schema and values have different keys."""
    document: Json = json.loads(json.dumps(schema))
    value_paths = {value.path for value in values}
    inner_paths = {value.path for value in values if value.inner}
    for path in _properties(document, (), inner_paths):
        if path not in value_paths and path != (GLOBAL,):
            raise ChartError(f"values.schema.json has {'.'.join(path)}, which values.yaml lacks: add it there with a comment.")
    for value in values:
        node = document
        for key in value.path:
            child = node.get("properties", {}).get(key)
            if child is None:
                raise ChartError(f"values.yaml has {value.name}, which values.schema.json lacks: add its type there.")
            node = child
        described = {"description": value.description} | {key: item for key, item in node.items() if key != "description"}
        node.clear()
        node.update(described)
    return document


def _properties(node: Json, above: tuple[str, ...], inner: set[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for key, child in node.get("properties", {}).items():
        path = (*above, key)
        yield path
        if path in inner:
            yield from _properties(child, path, inner)


def with_table(readme: str, values: list[Value]) -> str:
    """Return the README with the table between its two marks. Raises ChartError if they are missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ChartError(f"charts/aerie/README.md lacks the lines that enclose the table: {BEGIN} and {END}.")
    described_values = [value for value in values if not value.inner]
    rows = [f"| `{value.name}` | `{_format_default(value.default)}` | {value.description} |" for value in described_values]
    table = "\n".join(["| Value | Default | Description |", "|---|---|---|", *rows])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def _format_default(default: Any) -> str:
    return json.dumps(default).replace("|", "\\|")
