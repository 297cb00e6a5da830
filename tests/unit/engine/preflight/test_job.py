"""Preflight as a Job: its result is in the termination message, and within its limit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.checkpoints.directory import read_checkpoint_directory
from aerie.cli.app import run_command_line
from aerie.cli.commands.preflight_job import encode_termination_message
from aerie.engine.models.checkpoint import Checkpoint
from aerie_drafter.bundle import find_bundle_path

DIGEST = "sha256:" + "0" * 64


def write_resource(folder: Path) -> Path:
    def image(name: str) -> dict[str, object]:
        return {"source": {"image": {"reference": f"models.example/{name}@{DIGEST}"}}}

    spec = {"model": image("target"), "drafter": image("drafter"), "engine": {"image": "vllm/vllm-openai:v0.33.0"}}
    document = {"apiVersion": "aerie.dev/v1alpha1", "kind": "SpeculativeDeployment", "metadata": {"name": "chat"}, "spec": spec}
    path = folder / "resource.json"
    path.write_text(json.dumps(document))
    return path


def test_files_that_are_no_checkpoint_fail_preflight(tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{")
    report = tmp_path / "report"
    arguments = ["preflight-job", f"--file={write_resource(tmp_path)}", f"--report={report}"]
    assert run_command_line([*arguments, f"--target={tmp_path / 'target'}", f"--drafter={tmp_path / 'drafter'}"]) == 1
    result = json.loads(report.read_bytes())
    assert result["passed"] is False
    assert "config.json" in result["errors"][0]


def test_an_unreachable_hub_gives_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "nonsense://")
    path = write_resource(tmp_path)
    document = json.loads(path.read_text())
    source = {"huggingFace": {"repo": "a/b", "revision": "0" * 40}}
    document["spec"] |= {"model": {"source": source}, "drafter": {"source": source}}
    path.write_text(json.dumps(document))
    report = tmp_path / "report"
    assert run_command_line(["preflight-job", f"--file={path}", f"--report={report}"]) == 2
    assert json.loads(report.read_bytes())["passed"] is None


def test_an_empty_offline_cache_gives_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    path = write_resource(tmp_path)
    document = json.loads(path.read_text())
    source = {"huggingFace": {"repo": "a/b", "revision": "0" * 40}}
    document["spec"] |= {"model": {"source": source}, "drafter": {"source": source}}
    path.write_text(json.dumps(document))
    report = tmp_path / "report"
    assert run_command_line(["preflight-job", f"--file={path}", f"--report={report}"]) == 3
    result = json.loads(report.read_bytes())
    assert (result["passed"], result["hubRejected"]) == (None, True)


def compare(
    tmp_path: Path, running: Path | None, candidate: Path, running_file: Path | None = None
) -> tuple[int, dict[str, Any]]:
    """Run the Job's command for a change in place; return exit status and result."""
    path, report = write_resource(tmp_path), tmp_path / "report"
    target = find_bundle_path("target")
    arguments = [f"--file={path}", f"--report={report}", f"--target={target}", f"--drafter={candidate}"]
    arguments += [f"--running-file={running_file or path}", "--running-revision=r0"]
    arguments += [f"--running-drafter={running}"] if running is not None else []
    exit_status = run_command_line(["preflight-job", *arguments])
    return exit_status, json.loads(report.read_bytes())


def change_config(tmp_path: Path, **keys: Any) -> Path:
    """Return a copy of a bundled drafter with other keys in its config."""
    folder = tmp_path / "changed"
    shutil.copytree(find_bundle_path("eagle3"), folder)
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_result_says_that_drafters_fit_the_same_engine(tmp_path: Path) -> None:
    _, result = compare(tmp_path, find_bundle_path("eagle3"), find_bundle_path("eagle31"))
    assert (result["inPlaceRunning"], result["inPlaceProblems"]) == ("r0", [])


def test_a_drafter_that_fits_no_running_engine_fails_nothing(tmp_path: Path) -> None:
    exit_status, result = compare(tmp_path, find_bundle_path("eagle31"), change_config(tmp_path, rms_norm_eps=0.1))
    assert (exit_status, result["passed"], result["errors"]) == (0, True, [])
    assert "rms_norm_eps" in result["inPlaceProblems"][0]


@pytest.mark.parametrize(
    ("engine", "kind", "fits"),
    [
        ({"cache": {"sizeLimit": "1Mi"}}, "huggingFace", False),
        ({"cache": {"sizeLimit": "1Mi"}}, "persistentVolumeClaim", True),
        ({"cache": {"sizeLimit": "1Gi"}}, "huggingFace", True),
        ({"cache": {"claimName": "cache"}}, "huggingFace", True),
        ({"cache": {"sizeLimit": "1Mi"}, "env": [{"name": "HF_HOME", "value": "/elsewhere"}]}, "huggingFace", True),
        ({}, "huggingFace", True),
    ],
)
def test_a_drafter_of_the_hub_has_to_fit_into_the_pods_own_cache(
    tmp_path: Path, engine: dict[str, Any], kind: str, fits: bool
) -> None:
    sources = {
        "huggingFace": {"repo": "me/eagle31", "revision": "0" * 40},
        "persistentVolumeClaim": {"claimName": "models", "path": "eagle31"},
    }
    path = write_resource(tmp_path)
    running_file = tmp_path / "running.yaml"
    shutil.copy(path, running_file)
    document = json.loads(path.read_text())
    document["spec"]["engine"] |= engine
    document["spec"]["drafter"] = {"source": {kind: sources[kind]}}
    report = tmp_path / "report"
    path.write_text(json.dumps(document))
    arguments = [f"--file={path}", f"--report={report}", f"--target={find_bundle_path('target')}"]
    arguments += [f"--drafter={find_bundle_path('eagle31')}", f"--running-file={running_file}", "--running-revision=r0"]
    run_command_line(["preflight-job", *arguments, f"--running-drafter={find_bundle_path('eagle3')}"])
    problems = json.loads(report.read_bytes())["inPlaceProblems"]
    assert ["sizeLimit" in problem for problem in problems] == ([] if fits else [True])


def test_a_drafter_that_was_promoted_in_place_is_in_the_cache_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = read_checkpoint_directory(find_bundle_path("eagle31"), "me/eagle31")
    assert candidate.weight_bytes is not None
    path = write_resource(tmp_path)
    shutil.copy(path, tmp_path / "running.yaml")
    document = json.loads(path.read_text())
    document["spec"]["engine"]["cache"] = {"sizeLimit": str(2 * candidate.weight_bytes - 1)}
    document["spec"]["drafter"] = {"source": {"huggingFace": {"repo": "me/eagle31", "revision": "0" * 40}}}
    path.write_text(json.dumps(document))
    reads = []

    def read_repository(repository: str, revision: str) -> Checkpoint:
        reads.append((repository, revision))
        return replace(candidate, name=f"{repository}@{revision}")

    monkeypatch.setattr("aerie.cli.commands.preflight_job.read_repository", read_repository)
    report = tmp_path / "report"
    arguments = [f"--file={path}", f"--report={report}", f"--target={find_bundle_path('target')}"]
    arguments += [f"--drafter={find_bundle_path('eagle31')}", f"--running-file={tmp_path / 'running.yaml'}"]
    arguments += [f"--running-drafter={find_bundle_path('eagle3')}", "--running-revision=r0"]
    for promoted, problems in (([], 0), (["--promoted-drafter=me/better@" + "1" * 40], 1)):
        run_command_line(["preflight-job", *arguments, *promoted])
        assert len(json.loads(report.read_bytes())["inPlaceProblems"]) == problems
    assert reads == [("me/better", "1" * 40)]


@pytest.mark.parametrize("content", ["{", "null", '{"architectures": 1}'])
def test_an_unreadable_running_drafter_gives_no_comparison(tmp_path: Path, content: str) -> None:
    running = tmp_path / "running"
    running.mkdir()
    (running / "config.json").write_text(content)
    _, result = compare(tmp_path, running, find_bundle_path("eagle3"))
    assert result.get("inPlaceProblems", ["unreadable"]), "never found to fit"


def test_a_deleted_record_gives_no_comparison(tmp_path: Path) -> None:
    _, result = compare(tmp_path, find_bundle_path("eagle3"), find_bundle_path("eagle3"), tmp_path / "missing.json")
    assert "inPlaceRunning" not in result


MESSAGES = st.lists(st.text(max_size=3000), max_size=6)


@given(MESSAGES, MESSAGES, MESSAGES)
def test_the_termination_message_fits_and_has_the_first_error(
    errors: list[str], warnings: list[str], problems: list[str]
) -> None:
    document = {"passed": False, "summary": "refused.", "errors": errors, "warnings": warnings, "inPlaceProblems": problems}
    text = encode_termination_message(document)
    assert len(text) <= 4096
    result = json.loads(text)
    assert result["passed"] is False
    if errors:
        assert result["errors"]
        assert result["errors"][0][:50] == errors[0][:50]


def test_the_termination_message_may_quote_any_text() -> None:
    text = encode_termination_message({"passed": True, "inPlaceProblems": ["the checkpoint has \ud800."]})
    assert json.loads(text)["inPlaceProblems"] == ["the checkpoint has ?."]
