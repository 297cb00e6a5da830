"""What the API server would refuse, known without one. tests/lab/api holds the same cases against a real server."""

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
from tests.lab.api.conftest import LEAST, Changes, changed
from tests.lab.api.test_rules import CASES, NAME, Case

Capture = pytest.CaptureFixture[str]
Preflight = Callable[..., int]
BUNDLE = Path(__file__).resolve().parents[3] / "drafter/bundle"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_rule(case: Case) -> None:
    assert find_manifest_errors(changed(case.refused)) == [f"{case.field}: {case.says}."]
    assert find_manifest_errors(changed(case.taken)) == []


@pytest.fixture
def preflight(tmp_path: Path) -> Preflight:
    """Runs the command on the least manifest with changes, whose models are the bundle's."""

    def preflight(changes: Changes, *options: str, **metadata: Any) -> int:
        document = changed({"speculation.numSpeculativeTokens": 3, **changes})
        document["metadata"] |= metadata
        (tmp_path / "chat.yaml").write_text(yaml.safe_dump(document))
        folders = ["--target", f"{BUNDLE}/target", "--drafter", f"{BUNDLE}/eagle3"]
        return run_command_line(["preflight", "-f", str(tmp_path / "chat.yaml"), *folders, *options])

    return preflight


@pytest.mark.parametrize(
    ("changes", "metadata", "says"),
    [
        *((case.refused, {}, f"{case.field}: {case.says}.") for case in CASES if not case.name.startswith("flag ")),
        ({}, {"name": "a" * 60}, "metadata.name has 60 characters: write 40 at most."),
        ({}, {"name": "1chat"}, f"{NAME}."),
        (
            {"engine.env": [{"name": "A", "value": "1"}, {"name": "B"}, {"name": "A", "value": "2"}]},
            {},
            "spec.engine.env[2] has the same name as an entry before it: leave one of them out.",
        ),
        ({"speculation.numSpeculativeTokens": 16}, {}, "spec.speculation.numSpeculativeTokens is 16: write 15 at most."),
        ({"engine.image": None}, {}, "spec.engine.image is missing."),
        ({"rolout": {}}, {}, "spec.rolout is no field of the resource: correct its name, or remove it."),
        ({"rollout.canary.stepDuration": "25h"}, {}, "spec.rollout.canary.stepDuration: write a duration from 0s to 24h."),
        (
            {"engine.podTemplate": {"spec": {"containers": [{"name": "log", "args": "-v"}]}}},
            {},
            "spec.engine.podTemplate.spec.containers[0].args is of type string: write array.",
        ),
        (
            {"engine.podTemplate": {"spec": {"containers": [{"name": "log", "ports": [{"containerPort": 0}]}]}}},
            {},
            "spec.engine.podTemplate.spec.containers[0].ports[0].containerPort is 0: write 1 or more.",
        ),
    ],
)
def test_preflight_refuses_what_the_api_server_refuses(
    preflight: Preflight, changes: Changes, metadata: dict[str, Any], says: str, capsys: Capture
) -> None:
    assert preflight(changes, **metadata) == 2
    assert says in capsys.readouterr().err


def test_as_json(preflight: Preflight, capsys: Capture) -> None:
    assert preflight({"metrics.scrapeInterval": "61s"}, "-o", "json") == 2
    said = json.loads(capsys.readouterr().out)
    assert said["allowed"] is said["ok"] is False
    assert [sentence.partition(":")[0] for sentence in said["refused"]] == ["spec.metrics.scrapeInterval"]


@pytest.mark.parametrize(
    ("changes", "metadata"),
    [
        ({"replicas": 2.0}, {}),
        ({"speculation": {"tuning": None}, "rollout": {"traffic": None}}, {}),
        ({}, {"labels": None, "annotations": None}),
    ],
)
def test_what_kubernetes_takes_passes(preflight: Preflight, changes: Changes, metadata: dict[str, Any], capsys: Capture) -> None:
    preflight(changes, **metadata)
    assert "error" not in capsys.readouterr().err


def test_null_is_as_good_as_nothing_but_in_a_list() -> None:
    document = copy.deepcopy(LEAST)
    document["spec"] |= {"rollout": {"analysis": {"minDuration": None}, "canary": None}, "drafter": None, "unknown": None}
    assert find_manifest_errors(document) == []
    assert prune_manifest(document)["spec"].keys() == {"model", "engine", "rollout", "unknown"}
    document["spec"]["engine"]["image"] = None
    document["spec"]["engine"]["args"] = [None]
    assert find_manifest_errors(document) == [
        "spec.engine.image is missing.",
        "spec.engine.args[0] is of type null: write string.",
    ]


def test_a_secret_in_a_value_is_not_repeated() -> None:
    said = find_manifest_errors(changed({"engine.args": ["--hf-token=hf_secret"]}))
    assert said
    assert "hf_secret" not in str(said)
