"""What a release is made of: versions and notes, the chart's image, schemas of manifests, and the workflows' permissions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.release.chart import CHART
from scripts.release.chart import main as release_chart
from scripts.release.notes import find_errors, find_notes, read_versions
from scripts.release.schemas import forbid_unknown_fields, iter_builtin_schemas, iter_custom_schemas

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2027-01-01\n\n- More.\n\n## [0.1.0]\n\n- A.\n"


def test_everything_has_the_version_that_the_changelog_describes() -> None:
    versions = read_versions(ROOT)
    assert len(versions) == 6
    (version,) = set(versions.values())
    assert find_errors(version, versions) == []
    assert "### Added" in find_notes((ROOT / "CHANGELOG.md").read_text(), version)


def test_another_version_is_an_error() -> None:
    assert find_errors("0.2.0", {"lab/pyproject.toml": "0.1.0", "pyproject.toml": "0.2.0"}) == [
        "lab/pyproject.toml has version 0.1.0, and the tag 0.2.0."
    ]


@pytest.mark.parametrize(("version", "notes"), [("0.2.0", "- More."), ("0.1.0", "- A."), ("0.1", ""), ("0.3.0", "")])
def test_notes_are_the_section_of_the_version(version: str, notes: str) -> None:
    assert find_notes(CHANGELOG, version) == notes


def test_released_chart_has_the_released_image(tmp_path: Path) -> None:
    digest = f"sha256:{'0' * 64}"
    assert release_chart(["ghcr.io/owner/aerie", digest, str(tmp_path / "aerie")]) == 0
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values["image"] |= {"repository": "ghcr.io/owner/aerie", "digest": digest}
    assert yaml.safe_load((tmp_path / "aerie/values.yaml").read_text()) == values


def test_a_chart_without_a_digest_is_rejected(tmp_path: Path) -> None:
    assert release_chart(["ghcr.io/owner/aerie", "0.1.0", str(tmp_path / "aerie")]) == 2
    assert not (tmp_path / "aerie").exists()


def test_schemas_of_definitions_have_no_unknown_fields() -> None:
    spec = {"type": "object", "properties": {"port": {"x-kubernetes-int-or-string": True}}}
    free = {"type": "object", "properties": {}, "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "free": free}}}}
    document = {"spec": {"group": "a.example", "names": {"kind": "Some"}, "versions": [version]}}
    ((path, schema),) = iter_custom_schemas([document])
    assert path == "a.example/some_v1.json"
    assert schema["additionalProperties"] is False
    assert schema["properties"].keys() == {"apiVersion", "kind", "metadata", "spec", "free"}
    assert schema["properties"]["spec"]["additionalProperties"] is False
    assert "additionalProperties" not in schema["properties"]["free"]
    assert schema["properties"]["spec"]["properties"]["port"]["anyOf"] == [{"type": "string"}, {"type": "number"}]


def test_a_field_called_properties_is_a_field() -> None:
    schema = {"type": "object", "properties": {"properties": {"type": "object", "additionalProperties": {"type": "string"}}}}
    assert forbid_unknown_fields(schema)["properties"]["properties"] == schema["properties"]["properties"]  # type: ignore[index]


def test_schemas_of_kubernetes_contain_what_they_refer_to() -> None:
    definitions: dict[str, Any] = {
        "Pod": {
            "type": "object",
            "properties": {"spec": {"$ref": "#/definitions/Spec"}},
            "x-kubernetes-group-version-kind": [{"group": "", "version": "v1", "kind": "Pod"}],
        },
        "Spec": {"type": "object", "properties": {"next": {"$ref": "#/definitions/Spec"}}},
        "Other": {"type": "string"},
    }
    ((path, schema),) = iter_builtin_schemas({"definitions": definitions})
    assert path == "v1/pod_v1.json"
    assert schema["definitions"].keys() == {"Spec"}
    assert schema["definitions"]["Spec"]["additionalProperties"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_no_permission_by_default_and_end(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    assert "concurrency" in workflow
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 300
        assert job["permissions"]
        for step in job["steps"]:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{'0' * 40}"))
            # An expression in a script is replaced before the shell reads it, so that its value may be code.
            assert "${{" not in step.get("run", "")
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_workflows_are_three() -> None:
    assert [path.stem for path in WORKFLOWS] == ["checks", "lab", "release"]
