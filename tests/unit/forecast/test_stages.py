"""The stages of a rollout by its spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.api import SpeculativeDeployment
from aerie.cli.inputs.files import parse_deployment
from aerie.forecast import stages
from aerie.forecast.assumptions import Requests
from aerie.forecast.stages import ForecastError, RolloutForecast, forecast_rollout

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/in-place.yaml"
PROMPTS: dict[str, Any] = {"shadow": {"source": "Prompts", "prompts": {"configMap": "prompts"}}}
FULL: dict[str, Any] = {"shadow": {**PROMPTS["shadow"], "only": False}}
"""A shadow evaluation and the analysis under the traffic of users."""
GATEWAY = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "RUNS", 20)
    monkeypatch.setattr(stages, "LIVE_RUNS", 2)


def resource(replicas: int = 4, *, engine: dict[str, Any] | None = None, **rollout: Any) -> SpeculativeDeployment:
    document = yaml.safe_load(EXAMPLE.read_text())
    document["spec"]["replicas"] = replicas
    document["spec"]["engine"] |= engine or {}
    document["spec"]["rollout"] |= rollout
    return parse_deployment(document)


def forecast(deployment: SpeculativeDeployment, rate: float = 1.0, effect: float = -0.1) -> RolloutForecast:
    return forecast_rollout(deployment, Requests(rate), [effect])


def titles(result: RolloutForecast) -> list[str]:
    return [stage.title.split(":")[0].split(" under")[0] for stage in result.stages]


@pytest.mark.parametrize(
    ("rollout", "method", "expected"),
    [
        ({}, "InPlace", ["By turns"]),
        ({"analysis": PROMPTS}, "InPlace", ["Shadow evaluation (Prompts)", "Accepted", "Not accepted"]),
        ({"analysis": FULL}, "InPlace", ["Shadow evaluation (Prompts)", "By turns"]),
        (
            {"analysis": {"shadow": {"source": "Mirror"}}, "traffic": GATEWAY},
            "InPlace",
            ["Shadow evaluation (Mirror)", "Accepted", "Not accepted"],
        ),
        ({"traffic": GATEWAY}, "InPlace", ["Shadow evaluation (Mirror)", "Accepted", "Not accepted"]),
        ({"inPlace": {"mode": "Off"}}, "ByPods", ["Warm-up and analysis"]),
        ({"inPlace": {"mode": "Off"}, "analysis": PROMPTS}, "ByPods", ["Shadow evaluation (Prompts)", "Not accepted"]),
        ({"inPlace": {"mode": "Off"}, "analysis": FULL}, "ByPods", ["Shadow evaluation (Prompts)", "Warm-up and analysis"]),
    ],
)
def test_stages_are_those_of_the_spec(rollout: dict[str, Any], method: str, expected: list[str]) -> None:
    result = forecast(resource(**rollout))
    assert (result.method, titles(result)) == (method, expected)
    assert result.stages[-1].serves_users
    assert all(stage.summaries[0].mean_user_requests == 0 for stage in result.stages if not stage.serves_users)


@pytest.mark.parametrize("mode", ["Auto", "Off"])
@pytest.mark.parametrize("replicas", [1, 40, 1000])
@pytest.mark.parametrize("rate", [0.0, 0.2, 20.0])
def test_fleets_of_any_size_have_a_forecast(replicas: int, rate: float, mode: str) -> None:
    deployment = resource(replicas, inPlace={"mode": mode}, analysis={"maxDuration": "1h"})
    # Without a history, pods may differ by a tenth for all that is known within an hour.
    (total,) = forecast(deployment, rate, effect=-0.1 if mode == "Auto" else -0.3).total
    assert total.rollback_chance + total.promotion_chance + total.inconclusive_chance == pytest.approx(1)
    if rate == 0:
        assert total.inconclusive_chance == 1
        assert total.median_seconds is None
    elif rate == 20:
        assert total.rollback_chance == 1


def test_what_the_shadow_evaluation_rolls_back_meets_no_user() -> None:
    result = forecast(resource(inPlace={"mode": "Off"}, analysis=PROMPTS), effect=-0.3)
    assert result.stages[0].summaries[0].rollback_chance == 1
    assert result.total[0].rollback_chance == 1
    assert result.total[0].mean_user_requests == 0
    assert result.total[0].median_seconds == result.stages[0].summaries[0].median_seconds


def test_the_times_of_stages_add_up() -> None:
    result = forecast(resource(analysis=FULL), effect=0.3)
    evaluation, users, total = (
        summary.median_seconds for summary in (*(stage.summaries[0] for stage in result.stages), result.total[0])
    )
    assert evaluation is not None
    assert users is not None
    assert total is not None
    assert max(evaluation, users) < total <= evaluation + users + 120


def test_an_accepted_drafter_has_the_time_of_the_ramp_in_place_and_none_by_pods() -> None:
    in_place = forecast(resource(analysis=PROMPTS), rate=20, effect=0.3)
    evaluation, ramp, _ = (stage.summaries[0] for stage in in_place.stages)
    assert evaluation.promotion_chance == ramp.promotion_chance == 1
    assert ramp.median_seconds == pytest.approx(600, abs=60)
    by_pods = forecast(resource(inPlace={"mode": "Off"}, analysis=PROMPTS), effect=0.3)
    assert by_pods.total[0].median_seconds == pytest.approx(by_pods.stages[0].summaries[0].median_seconds, abs=20)
    assert by_pods.total[0].mean_user_requests == 0


def test_the_default_takes_no_pod_of_a_small_fleet() -> None:
    assert titles(forecast(resource(3, traffic=GATEWAY))) == ["By turns"]


def test_the_trial_grows_as_the_spec_says() -> None:
    title = forecast(resource(100, inPlace={"mode": "Auto", "pods": 3})).stages[0].title
    assert title == "By turns under the traffic of users, in 3, later 40 of 100 pods"


def test_one_pod_has_no_shadow_evaluation_in_place() -> None:
    result = forecast(resource(1, analysis=PROMPTS))
    assert titles(result) == ["By turns"]
    assert any(note.startswith("Shadow evaluation is skipped: spec.replicas is 1") for note in result.notes)


def test_engines_that_cannot_change_their_drafter_are_replaced() -> None:
    result = forecast(resource(engine={"image": "vllm/vllm-openai:v0.25.0"}))
    assert result.method == "ByPods"
    assert any(note.startswith("By pods, because pods have no plugin") for note in result.notes)
    with pytest.raises(ForecastError, match=r"spec\.rollout\.inPlace\.mode is Required"):
        forecast(resource(engine={"image": "vllm/vllm-openai:v0.25.0"}, inPlace={"mode": "Required"}))


def test_engines_without_counts_in_answers_have_no_shadow_evaluation_by_pods() -> None:
    result = forecast(resource(engine={"image": "vllm/vllm-openai:v0.28.0"}, inPlace={"mode": "Off"}, analysis=PROMPTS))
    assert titles(result) == ["Warm-up and analysis"]
    assert any(note.startswith("Shadow evaluation is skipped:") for note in result.notes)


def test_a_resource_that_cannot_run_has_no_forecast() -> None:
    deployment = resource()
    without_drafter = deployment.model_copy(update={"spec": deployment.spec.model_copy(update={"drafter": None})})
    with pytest.raises(ForecastError, match=r"spec\.drafter is missing"):
        forecast(without_drafter)
    off = deployment.spec.speculation.model_copy(update={"num_speculative_tokens": 0})
    with pytest.raises(ForecastError, match=r"numSpeculativeTokens is 0"):
        forecast(deployment.model_copy(update={"spec": deployment.spec.model_copy(update={"speculation": off})}))
    with pytest.raises(ForecastError, match=r"spec\.replicas is 0"):
        forecast(resource(0))


def test_stable_pods_as_control_are_not_compared_by_time() -> None:
    deployment = resource(8, inPlace={"mode": "Off"}, analysis=PROMPTS, canary={"control": "Stable", "replicas": 2})
    result = forecast(deployment)
    assert "against stable (pods: 8)" in result.stages[-1].title
    assert "canary (pods: 2)" in result.stages[-1].title
    assert titles(result) == ["Shadow evaluation (Prompts)", "Warm-up and analysis"], "tokens alone accept no canary"


def test_the_minimum_duration_is_kept() -> None:
    (total,) = forecast(resource(inPlace={"mode": "Auto", "minDuration": "30m"}), 20.0, effect=0.1).total
    assert total.median_seconds is not None
    assert total.median_seconds >= 1800
