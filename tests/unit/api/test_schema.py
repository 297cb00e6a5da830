"""The generated definition: structural, bounded, described, and the same as the committed files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aerie.api.crd import SchemaError, build_annotated_schema, build_custom_resource_definition
from aerie.api.types.base import JsonObject, ResourceModel
from scripts import generate

ROOT = Path(__file__).resolve().parents[3]
PRESERVED = "x-kubernetes-preserve-unknown-fields"


def iter_nodes(schema: JsonObject, path: str = "") -> Iterator[tuple[str, JsonObject]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from iter_nodes(child, f"{path}.{name}")
    for key, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if key in schema:
            yield from iter_nodes(schema[key], path + suffix)


@pytest.fixture(scope="module")
def schema() -> JsonObject:
    """The schema of the whole object."""
    version = build_custom_resource_definition()["spec"]["versions"][0]
    root_schema: JsonObject = version["schema"]["openAPIV3Schema"]
    return root_schema


def test_schema_is_structural(schema: JsonObject) -> None:
    for path, node in iter_nodes(schema):
        assert ("type" in node) != ("x-kubernetes-int-or-string" in node), path
        assert not {"$ref", "anyOf", "oneOf", "allOf", "const", "title", "nullable"} & node.keys(), path
        assert not {"properties", "additionalProperties"} <= node.keys(), path
        assert all(key.startswith("x-kubernetes-") for key in node if key.startswith("x-")), path
        if node.get("type") == "array":
            assert "items" in node, path
        if node.get("type") == "object":
            assert {"properties", "additionalProperties", PRESERVED} & node.keys(), path


def test_every_value_is_bounded(schema: JsonObject) -> None:
    for path, node in iter_nodes(schema):
        if node.get("type") == "string":
            assert {"maxLength", "enum", "format"} & node.keys() or path in (".apiVersion", ".kind"), path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_every_field_is_described(schema: JsonObject) -> None:
    for path, node in iter_nodes(schema):
        for name, child in node.get("properties", {}).items():
            if not f"{path}.{name}".startswith(".metadata"):  # the API server describes it
                assert child.get("description", "").endswith("."), f"{path}.{name}"


def test_keys_of_a_list_are_required_fields_of_its_entries(schema: JsonObject) -> None:
    for path, node in iter_nodes(schema):
        if node.get("x-kubernetes-list-type") == "map":
            assert set(node["x-kubernetes-list-map-keys"]) <= set(node["items"]["required"]), path


def test_rule_messages_fit_the_server(schema: JsonObject) -> None:
    for path, node in iter_nodes(schema):
        for rule in node.get("x-kubernetes-validations", []):
            assert "\n" not in rule["message"], path
            assert len(rule["message"]) <= 2048, path


def test_unknown_keyword_stops_the_generation() -> None:
    class Bad(ResourceModel):
        either: int | str = 1

    with pytest.raises(SchemaError, match=r"Bad\.either: the API server knows no anyOf"):
        build_annotated_schema(Bad)


def test_generated_files_are_up_to_date() -> None:
    command = [sys.executable, "-m", "scripts.generate", "--check"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_outdated_file_is_named_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {tmp_path / "docs" / "reference" / "resource.md": "page", tmp_path / "crds" / "crd.yaml": "definition"}
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "files", lambda: iter(contents.items()))
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    (tmp_path / "docs" / "reference" / "resource.md").write_text("edited by hand")
    capsys.readouterr()
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().err == "docs/reference/resource.md does not match the code: run `make crds`.\n"
    assert generate.main([]) == 0
    assert capsys.readouterr().out == "wrote docs/reference/resource.md\n"
    assert generate.main(["--check"]) == 0
