"""Reads YAML files of untrusted origin in bounded time and memory, with the values that Kubernetes reads.

PyYAML alone guarantees neither. Aliases of aliases expand without bound. A scalar that looks like a date, or has thousands of
digits, raises an error that is no YAMLError. A duplicate key is accepted. `2024-01-01` becomes a date where `kubectl` reads a
string.

Guarantees: every failure is a YamlDocumentError. A document that is returned is plain JSON: objects with string keys, arrays,
strings, integers of 64 bits, finite floats, true, false, null. All documents of a file have at most MAX_DOCUMENT_VALUES values;
aliases count as often as they occur. Not guaranteed: the types of YAML 1.2; `yes` is true, as for `kubectl`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

MAX_FILE_BYTES = 4 * 2**20
MAX_DOCUMENT_VALUES = 100_000
"""Values of all documents of a file; each object and array counts too."""
_INTEGER_BITS = 63


class YamlDocumentError(Exception):
    """The file cannot be read, or is not YAML; `str(error)` is a message that begins with the file's name."""


def read_yaml_documents(file: str) -> list[Any]:
    """Return the documents of a file; `-` is standard input. Raises YamlDocumentError."""
    display_name = "standard input" if file == "-" else file
    try:
        data = _read_bytes(file)
        text = data.decode("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name with a null byte
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise YamlDocumentError(f"{display_name} cannot be read ({reason}): give a YAML file.") from None
    if len(data) > MAX_FILE_BYTES:
        raise YamlDocumentError(f"{display_name} has more than {MAX_FILE_BYTES >> 20} MiB: give a file with only the manifest.")
    try:
        return _load_documents(text)
    except (yaml.YAMLError, ValueError) as error:
        raise YamlDocumentError(f"{display_name} is not YAML: {_format_yaml_error(error)}.") from None
    except RecursionError:
        raise YamlDocumentError(f"{display_name} is not YAML: it is nested too deeply.") from None


def _read_bytes(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    with Path(file).open("rb") as stream:
        return stream.read(MAX_FILE_BYTES + 1)


def _format_yaml_error(error: Exception) -> str:
    text = str(error)
    if isinstance(error, yaml.MarkedYAMLError):
        text = ", ".join(part for part in (error.context, error.problem) if part)
        if mark := error.problem_mark:
            text += f", in line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(text.split())[:300].rstrip(".")


def _load_documents(text: str) -> list[Any]:
    loader, documents = _JsonLoader(text), []
    remaining = MAX_DOCUMENT_VALUES
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None
            remaining -= _count_expanded_values(node, remaining)
            documents.append(loader.construct_document(node))
    finally:
        loader.dispose()
    return documents


class _JsonLoader(yaml.SafeLoader):
    """YAML loader with JSON's types only, without duplicate keys, and with a limit on nodes while they are read."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
        character: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    node_count = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.node_count += 1
        if self.node_count > MAX_DOCUMENT_VALUES:
            raise _too_many_values_error()
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        mapping: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is a list or an object", key.start_mark)
            if key.value in keys:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key.value[:80]}' occurs twice", key.start_mark)
            if key.tag != "tag:yaml.org,2002:merge":
                key.tag = "tag:yaml.org,2002:str"  # as in JSON
            keys.add(key.value)
        return mapping


def _construct_int(loader: _JsonLoader, node: yaml.ScalarNode) -> int:
    if (
        len(node.value) > 4 * _INTEGER_BITS
        or not -(2**_INTEGER_BITS) <= (number := loader.construct_yaml_int(node)) < 2**_INTEGER_BITS
    ):
        raise yaml.constructor.ConstructorError(None, None, "an integer has more than 64 bits", node.start_mark)
    return int(number)


def _construct_float(loader: _JsonLoader, node: yaml.ScalarNode) -> int | float:
    if not math.isfinite(number := loader.construct_yaml_float(node)):
        raise yaml.constructor.ConstructorError(None, None, f"{node.value[:80]} is not a finite number", node.start_mark)
    return (
        int(number) if number.is_integer() and abs(number) < 2**_INTEGER_BITS else float(number)
    )  # 2.0 is 2, as in Kubernetes' JSON


_JsonLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_JsonLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)
for _tag in ("binary", "timestamp", "omap", "pairs", "set"):  # no types of JSON
    del _JsonLoader.yaml_constructors[f"tag:yaml.org,2002:{_tag}"]


def _count_expanded_values(root: yaml.Node, limit: int) -> int:
    """Return the number of values of a document after its aliases are expanded. Raises YAMLError: more than `limit`, or a value
    that contains itself."""
    sizes: dict[Hashable, int] = {}

    def size(node: yaml.Node) -> int:
        key = id(node)
        if key in sizes:
            if sizes[key] == 0:
                raise yaml.constructor.ConstructorError(None, None, "a value contains itself", node.start_mark)
            return sizes[key]
        sizes[key] = 0
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        total = 1
        for child in children:
            total += sum(map(size, child)) if isinstance(child, tuple) else size(child)
            if total > limit:
                raise _too_many_values_error()
        sizes[key] = total
        return total

    return size(root)


def _too_many_values_error() -> yaml.YAMLError:
    return yaml.YAMLError(f"it has more than {MAX_DOCUMENT_VALUES} values after its aliases are expanded")
