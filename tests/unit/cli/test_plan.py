"""`aerie plan`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.analysis.planning import forecast_turns
from aerie.api.rollout import RolloutSpec
from aerie.cli.app import run_command_line
from aerie.cli.commands import plan as command

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/in-place.yaml"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "forecast_turns", partial(forecast_turns, runs=5))


def write_manifest(folder: Path, replicas: int = 4, **rollout: Any) -> str:
    document = yaml.safe_load(EXAMPLE.read_text())
    document["spec"]["replicas"] = replicas
    document["spec"]["rollout"] |= rollout
    file = folder / "chat.yaml"
    file.write_text(yaml.safe_dump(document))
    return str(file)


def run_json(capsys: Capture, file: str, rate: float, *options: str) -> dict[str, Any]:
    assert run_command_line(["plan", "-f", file, "--requests-per-second", str(rate), "-o", "json", *options]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize("replicas", [1, 40, 1000])
@pytest.mark.parametrize("rate", [0.0, 0.2, 20.0])
def test_forecasts_fleets_of_any_size(tmp_path: Path, capsys: Capture, replicas: int, rate: float) -> None:
    document = run_json(capsys, write_manifest(tmp_path, replicas), rate, "--effect", "-10", "--effect", "8")
    (stage,) = document["stages"]
    assert [row["effectPercent"] for row in stage["forecasts"]] == [-10, 8]
    for row in stage["forecasts"]:
        assert row["rollbackChance"] + row["promotionChance"] + row["inconclusiveChance"] == pytest.approx(1)
        assert (row["inconclusiveChance"] == 1) == (row["medianSeconds"] is None)
        assert row["inconclusiveChance"] == 1 if rate == 0 else row["meanUserRequestsOnNewDrafter"] > 0


def test_shadow_evaluation_comes_first_and_serves_no_users(tmp_path: Path, capsys: Capture) -> None:
    shadow = {"shadow": {"source": "Prompts", "prompts": {"configMap": "prompts"}}}
    shadow_stage, users = run_json(capsys, write_manifest(tmp_path, analysis=shadow), 0.2, "--effect=-10")["stages"]
    assert (shadow_stage["servesUsers"], users["servesUsers"]) == (False, True)
    (row,), (later,) = shadow_stage["forecasts"], users["forecasts"]
    assert row["rollbackChance"] == 1
    assert row["meanUserRequestsOnNewDrafter"] == 0
    assert row["medianSeconds"] < later["medianSeconds"]


def test_shadow_evaluation_of_one_pod_is_skipped(tmp_path: Path, capsys: Capture) -> None:
    shadow = {"shadow": {"source": "Prompts", "prompts": {"configMap": "prompts"}}}
    (stage,) = run_json(capsys, write_manifest(tmp_path, 1, analysis=shadow), 1.0, "--effect=8")["stages"]
    assert stage["servesUsers"]


def test_text_has_a_row_for_each_effect(tmp_path: Path, capsys: Capture) -> None:
    assert run_command_line(["plan", "-f", write_manifest(tmp_path), "--requests-per-second=20", "--effect=-10"]) == 0
    text = capsys.readouterr()
    assert "-10 %" in text.out
    assert "PROMOTED" in text.out
    assert "simulated" in text.err


def test_the_minimum_duration_is_kept(tmp_path: Path, capsys: Capture) -> None:
    file = write_manifest(tmp_path, inPlace={"minDuration": "30m"})
    (row,) = run_json(capsys, file, 20.0, "--effect=8")["stages"][0]["forecasts"]
    assert row["medianSeconds"] >= 1800 > RolloutSpec().in_place.min_duration.total_seconds()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests-per-second=-1"], "--requests-per-second is -1"),
        (["--requests-per-second=nan"], "--requests-per-second is nan"),
        (["--requests-per-second=1", "--effect=-100"], "--effect is -100"),
        (["--requests-per-second=1", "--deviation=0"], "--deviation is 0"),
        (["--requests-per-second=1", "--request-seconds=0"], "--request-seconds is 0"),
        (["--requests-per-second=1", "--name=other"], "0 objects of kind SpeculativeDeployment named 'other'"),
        ([], "--requests-per-second"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, capsys: Capture, options: list[str], message: str) -> None:
    assert run_command_line(["plan", "-f", write_manifest(tmp_path), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_rollouts_by_pods_have_no_forecast(tmp_path: Path, capsys: Capture) -> None:
    file = write_manifest(tmp_path, inPlace={"mode": "Off"})
    assert run_command_line(["plan", "-f", file, "--requests-per-second=1"]) == 2
    assert "spec.rollout.inPlace.mode is Off" in " ".join(capsys.readouterr().err.split())


def test_an_invalid_manifest_is_rejected(tmp_path: Path, capsys: Capture) -> None:
    assert run_command_line(["plan", "-f", write_manifest(tmp_path, -1), "--requests-per-second=1"]) == 2
    assert "replicas" in capsys.readouterr().err
