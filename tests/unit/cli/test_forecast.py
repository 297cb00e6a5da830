"""`aerie forecast`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.cli.app import run_command_line
from aerie.forecast import live, stages

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/in-place.yaml"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "RUNS", 20)
    monkeypatch.setattr(stages, "LIVE_RUNS", 2)
    monkeypatch.setattr(live, "CALIBRATIONS", 1)


def write_manifest(folder: Path, replicas: int = 4, **rollout: Any) -> str:
    document = yaml.safe_load(EXAMPLE.read_text())
    document["spec"]["replicas"] = replicas
    document["spec"]["rollout"] |= rollout
    file = folder / "chat.yaml"
    file.write_text(yaml.safe_dump(document))
    return str(file)


def run_json(capsys: Capture, file: str, rate: float, *options: str) -> dict[str, Any]:
    assert run_command_line(["forecast", "-f", file, "--requests-per-second", str(rate), "-o", "json", *options]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_json_has_the_stages_and_the_whole_rollout(tmp_path: Path, capsys: Capture) -> None:
    shadow = {"shadow": {"source": "Prompts", "prompts": {"configMap": "prompts"}}}
    document = run_json(capsys, write_manifest(tmp_path, analysis=shadow), 1.0, "--effect=-10", "--effect=8")
    assert document["method"] == "InPlace"
    assert document["assumptions"]["requestsPerSecond"] == 1.0
    assert [stage["servesUsers"] for stage in document["stages"]] == [False, True, True]
    for rows in (*(stage["forecasts"] for stage in document["stages"]), document["total"]):
        assert [row["effectPercent"] for row in rows] == [-10, 8]
        for row in rows:
            assert row["rollbackChance"] + row["promotionChance"] + row["inconclusiveChance"] == pytest.approx(1)
            assert (row["inconclusiveChance"] == 1) == (row["medianSeconds"] is None)
            assert row["simulatedRollouts"] == 20


def test_a_rollout_by_pods_has_a_forecast(tmp_path: Path, capsys: Capture) -> None:
    document = run_json(capsys, write_manifest(tmp_path, inPlace={"mode": "Off"}), 1.0, "--effect=-30", "--history")
    assert document["method"] == "ByPods"
    assert document["stages"][0]["samples"] == "blocks"
    assert "with a history" in document["stages"][0]["title"]
    assert document["total"][0]["rollbackChance"] == 1


def test_text_has_a_row_for_each_effect(tmp_path: Path, capsys: Capture) -> None:
    assert run_command_line(["forecast", "-f", write_manifest(tmp_path), "--requests-per-second=20", "--effect=-10"]) == 0
    text = capsys.readouterr()
    assert "-10 %" in text.out
    assert "PROMOTED" in text.out
    assert "Simulated rollouts of each effect" in text.err
    assert "All stages" not in text.out  # there is but the one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests-per-second=-1"], "--requests-per-second is -1"),
        (["--requests-per-second=nan"], "--requests-per-second is nan"),
        (["--requests-per-second=1", "--effect=-100"], "--effect is -100"),
        (["--requests-per-second=1", "--deviation=-1"], "--deviation is -1"),
        (["--requests-per-second=1", "--request-seconds=0"], "--request-seconds is 0"),
        (["--requests-per-second=1", "--output-tokens=1"], "--output-tokens is 1"),
        (["--requests-per-second=1", "--pair-deviation=-1"], "--pair-deviation is -1"),
        (["--requests-per-second=1", "--step-time-deviation=inf"], "--step-time-deviation is inf"),
        (["--requests-per-second=1", "--name=other"], "0 objects of kind SpeculativeDeployment named 'other'"),
        ([], "--requests-per-second"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, capsys: Capture, options: list[str], message: str) -> None:
    assert run_command_line(["forecast", "-f", write_manifest(tmp_path), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_resource_without_a_forecast_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    file = write_manifest(tmp_path, inPlace={"mode": "Required"})
    Path(file).write_text(Path(file).read_text().replace("v0.33.0", "v0.25.0"))
    assert run_command_line(["forecast", "-f", file, "--requests-per-second=1"]) == 2
    assert "spec.rollout.inPlace.mode is Required" in " ".join(capsys.readouterr().err.split())


def test_an_invalid_manifest_is_rejected(tmp_path: Path, capsys: Capture) -> None:
    assert run_command_line(["forecast", "-f", write_manifest(tmp_path, -1), "--requests-per-second=1"]) == 2
    assert "replicas" in capsys.readouterr().err
