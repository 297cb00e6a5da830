"""Preflight as a Job: its result is in the termination message, and within its limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.cli.app import run_command_line
from aerie.cli.commands.preflight_job import encode_termination_message

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


MESSAGES = st.lists(st.text(max_size=3000), max_size=6)


@given(MESSAGES, MESSAGES)
def test_the_termination_message_fits_and_has_the_first_error(errors: list[str], warnings: list[str]) -> None:
    text = encode_termination_message({"passed": False, "summary": "refused.", "errors": errors, "warnings": warnings})
    assert len(text) <= 4096
    result = json.loads(text)
    assert result["passed"] is False
    if errors:
        assert result["errors"]
        assert result["errors"][0][:50] == errors[0][:50]
