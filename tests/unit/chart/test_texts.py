"""Generated texts of the chart: values are described once, and contradicting files are rejected."""

from __future__ import annotations

import importlib
import json
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "aerie"
VALUES = """\
# How many.
replicas: 2

# Where it
# comes from.
image:
  # Its name.
  name: a/b
# Free.
labels:
  a: b | c
"""
SCHEMA: dict[str, Any] = {
    "properties": {
        "replicas": {"type": "integer", "description": "old"},
        "image": {"properties": {"name": {"type": "string"}}},
        "labels": {"properties": {"free": {"type": "string"}}},
        "global": {"type": "object", "description": "Helm's."},
    }
}


@pytest.fixture
def chart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("scripts.chart")


@pytest.fixture
def values(chart: ModuleType, tmp_path: Path) -> Any:
    (tmp_path / "values.yaml").write_text(VALUES)
    return list(chart.described(tmp_path / "values.yaml"))


def test_comment_above_a_key_is_its_description(values: Any) -> None:
    assert [(v.name, v.description, v.default, v.inner) for v in values] == [
        ("replicas", "How many.", 2, False),
        ("image", "Where it comes from.", {"name": "a/b"}, True),
        ("image.name", "Its name.", "a/b", False),
        ("labels", "Free.", {"a": "b | c"}, False),
    ]


@pytest.mark.parametrize(
    "text", ["replicas: 2\n", "# Text.\n\nreplicas: 2\n", "# Image.\nimage:\n  # Its name.\n  name: a\n  tag: b\n"]
)
def test_key_without_a_comment_is_rejected(chart: ModuleType, tmp_path: Path, text: str) -> None:
    (tmp_path / "values.yaml").write_text(text)
    with pytest.raises(chart.ChartError, match=r"(replicas|image\.tag) has no comment right above it"):
        list(chart.described(tmp_path / "values.yaml"))


def test_values_must_be_a_mapping(chart: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("- a\n")
    with pytest.raises(chart.ChartError, match="write one YAML mapping"):
        list(chart.described(tmp_path / "values.yaml"))


def test_schema_gets_descriptions_and_keeps_the_rest(chart: ModuleType, values: Any) -> None:
    properties = chart.with_descriptions(SCHEMA, values)["properties"]
    assert properties["replicas"] == {"description": "How many.", "type": "integer"}
    assert properties["image"]["properties"]["name"] == {"description": "Its name.", "type": "string"}
    assert properties["labels"]["properties"] == {"free": {"type": "string"}}
    assert properties["global"] == SCHEMA["properties"]["global"]


def test_keys_of_schema_and_values_must_match(chart: ModuleType, values: Any) -> None:
    schema = json.loads(json.dumps(SCHEMA))
    schema["properties"]["image"]["properties"]["tag"] = {"type": "string"}
    with pytest.raises(chart.ChartError, match=r"has image\.tag, which values\.yaml lacks"):
        chart.with_descriptions(schema, values)
    del schema["properties"]["image"]["properties"]
    with pytest.raises(chart.ChartError, match=r"has image\.name, which values\.schema\.json lacks"):
        chart.with_descriptions(schema, values)


def test_readme_keeps_the_text_around_the_table(chart: ModuleType, values: Any) -> None:
    readme = f"before\n{chart.BEGIN}\nold\n{chart.END}\nafter\n"
    text = chart.with_table(readme, values)
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert '| `image.name` | `"a/b"` | Its name. |' in text
    assert "`image`" not in text
    assert '`{"a": "b \\| c"}`' in text
    assert chart.with_table(text, values) == text


def test_readme_without_marks_is_rejected(chart: ModuleType, values: Any) -> None:
    with pytest.raises(chart.ChartError, match="lacks the lines that enclose the table"):
        chart.with_table(f"{chart.END}\n", values)


def find_object_schemas(schema: Any) -> list[dict[str, Any]]:
    """Return every part of a schema that has properties."""
    if isinstance(schema, list):
        return [object_schema for item in schema for object_schema in find_object_schemas(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if isinstance(schema.get("properties"), dict) else []
    return own + [object_schema for item in schema.values() for object_schema in find_object_schemas(item)]


def test_schema_allows_no_unknown_key() -> None:
    assert all(
        part.get("additionalProperties") is False
        for part in find_object_schemas(json.loads((CHART / "values.schema.json").read_text()))
    )


def test_chart_has_the_version_of_the_project() -> None:
    chart_metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart_metadata["appVersion"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (definition,) = yaml.safe_load(chart_metadata["annotations"]["artifacthub.io/crds"])
    crd = yaml.safe_load((CHART / "files" / "aerie.dev_speculativedeployments.yaml").read_text())
    names = (crd["metadata"]["name"], crd["spec"]["names"]["kind"], crd["spec"]["versions"][0]["name"])
    assert (definition["name"], definition["kind"], definition["version"]) == names
