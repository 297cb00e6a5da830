"""Validation of manifests without an API server. tests/lab/api tries the same cases against a real server."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.api.validation.admission import find_manifest_errors, prune_manifest
from aerie.cli.app import run_command_line
from tests.golden import Messages
from tests.lab.api.conftest import MINIMAL_RESOURCE, Changes, build_manifest
from tests.lab.api.test_rules import CASES, NAME_MESSAGE, Case

Capture = pytest.CaptureFixture[str]
Preflight = Callable[..., int]
BUNDLE = Path(__file__).resolve().parents[3] / "drafter/bundle"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rule_rejects_and_accepts(case: Case, messages: Messages) -> None:
    messages.check(case.name, f"{case.field}: {case.message}")
    assert find_manifest_errors(build_manifest(case.accepted)) == []


@pytest.fixture
def preflight(tmp_path: Path) -> Preflight:
    """Runs the command on the minimal manifest with changes and the bundle's models."""

    def preflight(changes: Changes, *options: str, **metadata: Any) -> int:
        document = build_manifest({"speculation.numSpeculativeTokens": 3, **changes})
        document["metadata"] |= metadata
        (tmp_path / "chat.yaml").write_text(yaml.safe_dump(document))
        folders = ["--target", f"{BUNDLE}/target", "--drafter", f"{BUNDLE}/eagle3"]
        return run_command_line(["preflight", "-f", str(tmp_path / "chat.yaml"), *folders, *options])

    return preflight


@pytest.mark.parametrize("case", [case for case in CASES if not case.name.startswith("flag ")], ids=lambda case: case.name)
def test_preflight_rejects_what_a_rule_rejects(preflight: Preflight, case: Case, capsys: Capture) -> None:
    assert preflight(case.rejected) == 2
    assert f"{case.field}: {case.message}." in capsys.readouterr().err


LOG_CONTAINER = "spec.engine.podTemplate.spec.containers[0]"


@pytest.mark.parametrize(
    ("name", "field", "changes", "metadata"),
    [
        ("long name", "metadata.name", {}, {"name": "a" * 60}),
        ("name that begins with a digit", "", {}, {"name": "1chat"}),
        (
            "two variables of one name",
            "spec.engine.env[2]",
            {"engine.env": [{"name": "A", "value": "1"}, {"name": "B"}, {"name": "A", "value": "2"}]},
            {},
        ),
        ("too many tokens", "spec.speculation.numSpeculativeTokens", {"speculation.numSpeculativeTokens": 16}, {}),
        ("no image", "spec.engine.image", {"engine.image": None}, {}),
        ("misspelt field", "spec.rolout", {"rolout": {}}, {}),
        ("long step", "spec.rollout.canary.stepDuration", {"rollout.canary.stepDuration": "25h"}, {}),
        (
            "args of another type",
            f"{LOG_CONTAINER}.args",
            {"engine.podTemplate": {"spec": {"containers": [{"name": "log", "args": "-v"}]}}},
            {},
        ),
        (
            "port 0",
            f"{LOG_CONTAINER}.ports[0].containerPort",
            {"engine.podTemplate": {"spec": {"containers": [{"name": "log", "ports": [{"containerPort": 0}]}]}}},
            {},
        ),
    ],
)
def test_preflight_rejects_what_the_schema_rejects(
    preflight: Preflight, name: str, field: str, changes: Changes, metadata: dict[str, Any], capsys: Capture, messages: Messages
) -> None:
    assert preflight(changes, **metadata) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if field in line)
    messages.check(name, line)


def test_invalid_name_gets_the_message_of_its_rule() -> None:
    document = build_manifest({})
    document["metadata"]["name"] = "1chat"
    assert find_manifest_errors(document) == [f"{NAME_MESSAGE}."]


def test_preflight_as_json_lists_rejections(preflight: Preflight, capsys: Capture) -> None:
    assert preflight({"metrics.scrapeInterval": "61s"}, "-o", "json") == 2
    report = json.loads(capsys.readouterr().out)
    assert report["allowed"] is report["passed"] is False
    assert [sentence.partition(":")[0] for sentence in report["errors"]] == ["spec.metrics.scrapeInterval"]


@pytest.mark.parametrize(
    ("changes", "metadata"),
    [
        ({"replicas": 2.0}, {}),
        ({"speculation": {"tuning": None}, "rollout": {"traffic": None}}, {}),
        ({}, {"labels": None, "annotations": None}),
    ],
)
def test_manifest_for_kubernetes_passes(
    preflight: Preflight, changes: Changes, metadata: dict[str, Any], capsys: Capture
) -> None:
    preflight(changes, **metadata)
    assert "error" not in capsys.readouterr().err


def test_null_equals_an_absent_field_except_in_a_list() -> None:
    document = copy.deepcopy(MINIMAL_RESOURCE)
    document["spec"] |= {"rollout": {"analysis": {"minDuration": None}, "canary": None}, "drafter": None, "unknown": None}
    assert find_manifest_errors(document) == []
    assert prune_manifest(document)["spec"].keys() == {"model", "engine", "rollout", "unknown"}
    document["spec"]["engine"]["image"] = None
    document["spec"]["engine"]["args"] = [None]
    assert find_manifest_errors(document) == [
        "spec.engine.image is missing.",
        "spec.engine.args[0] is of type null: write string.",
    ]


def test_message_does_not_repeat_a_secret() -> None:
    errors = find_manifest_errors(build_manifest({"engine.args": ["--hf-token=hf_secret"]}))
    assert errors
    assert "hf_secret" not in str(errors)
