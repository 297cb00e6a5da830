"""Preflight as a Job: the verdict is where Kubernetes reads it, and fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.cli.app import run_command_line
from aerie.cli.commands.preflight_job import encode_termination_message

DIGEST = "sha256:" + "0" * 64


def resource(folder: Path) -> Path:
    def image(name: str) -> dict[str, object]:
        return {"source": {"image": {"reference": f"models.example/{name}@{DIGEST}"}}}

    spec = {"model": image("target"), "drafter": image("drafter"), "engine": {"image": "vllm/vllm-openai:v0.33.0"}}
    document = {"apiVersion": "aerie.dev/v1alpha1", "kind": "SpeculativeDeployment", "metadata": {"name": "chat"}, "spec": spec}
    path = folder / "resource.json"
    path.write_text(json.dumps(document))
    return path


def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{")
    report = tmp_path / "report"
    arguments = ["preflight-job", f"--file={resource(tmp_path)}", f"--report={report}"]
    assert run_command_line([*arguments, f"--target={tmp_path / 'target'}", f"--drafter={tmp_path / 'drafter'}"]) == 1
    told = json.loads(report.read_bytes())
    assert told["passed"] is False
    assert "config.json" in told["errors"][0]


def test_a_hub_that_does_not_answer_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "nonsense://")
    path = resource(tmp_path)
    document = json.loads(path.read_text())
    source = {"huggingFace": {"repo": "a/b", "revision": "0" * 40}}
    document["spec"] |= {"model": {"source": source}, "drafter": {"source": source}}
    path.write_text(json.dumps(document))
    report = tmp_path / "report"
    assert run_command_line(["preflight-job", f"--file={path}", f"--report={report}"]) == 2
    assert json.loads(report.read_bytes())["passed"] is None


def test_an_empty_offline_cache_is_no_verdict_that_is_tried_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    path = resource(tmp_path)
    document = json.loads(path.read_text())
    source = {"huggingFace": {"repo": "a/b", "revision": "0" * 40}}
    document["spec"] |= {"model": {"source": source}, "drafter": {"source": source}}
    path.write_text(json.dumps(document))
    report = tmp_path / "report"
    assert run_command_line(["preflight-job", f"--file={path}", f"--report={report}"]) == 3
    told = json.loads(report.read_bytes())
    assert (told["passed"], told["hubRejected"]) == (None, True)


sentences = st.lists(st.text(max_size=3000), max_size=6)


@given(sentences, sentences)
def test_the_verdict_fits_and_the_first_refusal_is_in_it(refused: list[str], warned: list[str]) -> None:
    text = encode_termination_message({"passed": False, "summary": "refused.", "errors": refused, "warnings": warned})
    assert len(text) <= 4096
    told = json.loads(text)
    assert told["passed"] is False
    if refused:
        assert told["errors"]
        assert told["errors"][0][:50] == refused[0][:50]
