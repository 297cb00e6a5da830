"""Greedy answers during a rollout: when they are requested, that they count once, and their verdict."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aerie.api.status import Status
from aerie.rollout.canary.analysis_run import AnalysisRun
from aerie.rollout.canary.equivalence_probe import find_probe_skip_reason
from tests.golden import Messages
from tests.unit.rollout.world import World, equivalence_result, serving_world, world_in_phase


def skip_reason(world: World) -> str:
    status = Status.model_validate(world.status)
    assert status.stable is not None
    assert status.canary is not None
    return find_probe_skip_reason(world.observed(), status.stable, status.canary)


def equivalence_comparison(world: World) -> dict[str, Any] | None:
    comparisons = world.status["analysis"].get("comparisons") or []
    return next((comparison for comparison in comparisons if comparison["metric"] == "OutputEquivalence"), None)


def promotion_reason(world: World) -> str:
    """Close blocks until the canary passes; return the verdict's message."""
    for _ in range(40):
        world.measure(1, +0.2)
        if world.status["phase"] != "Analyzing":
            break
    assert world.status["phase"] == "Ramping"
    return str(world.status["analysis"]["message"])


# ---------------------------------------------------------------------------------------------------------------------- probes
def test_probe_for_another_drafter() -> None:
    world, _ = world_in_phase("WarmingUp")
    assert skip_reason(world) == ""


def warming_up(**change: Any) -> World:
    """Return a canary with this change, whose pods serve."""
    world = serving_world(speculation={"numSpeculativeTokens": 2})
    world.edit(**change)
    for _ in range(6):
        world.step()
        world.check()
        world.schedule()
        world.ready()
    assert world.status["phase"] == "WarmingUp"
    return world


def test_probe_for_another_token_count() -> None:
    assert skip_reason(warming_up(speculation={"numSpeculativeTokens": 5})) == ""


def test_probe_without_drafter() -> None:
    assert skip_reason(warming_up(speculation={"numSpeculativeTokens": 0})) == ""


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (
            {"model": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "another"}}}},
            "other target",
        ),
        ({"engine": {"image": "vllm/vllm-openai:v0.33.1"}}, "other engine"),
        ({"engine": {"image": "vllm/vllm-openai:v0.33.0", "args": ["--dtype=float16"]}}, "other engine"),
        (
            {"engine": {"image": "vllm/vllm-openai:v0.33.0", "env": [{"name": "VLLM_ATTENTION_BACKEND", "value": "X"}]}},
            "other engine",
        ),
        (
            {"speculation": {"numSpeculativeTokens": 5}, "rollout": {"analysis": {"outputEquivalence": "Disabled"}}},
            "disabled",
        ),
        (
            {
                "speculation": {"numSpeculativeTokens": 5},
                "metrics": {"source": {"prometheus": {"address": "http://prometheus:9090"}}},
            },
            "metrics source",
        ),
    ],
)
def test_no_probe_for_engine_that_may_answer_differently(change: dict[str, Any], name: str, messages: Messages) -> None:
    messages.check(f"not probed: {name}", skip_reason(warming_up(**change)))


# -------------------------------------------------------------------------------------------------------------------- verdicts
def test_changed_answers_roll_back_before_first_block(messages: Messages) -> None:
    world, old = world_in_phase("WarmingUp")
    world.equivalence_result = equivalence_result(24)
    world.step()
    assert world.status["phase"] == "WarmingUp"
    world.now += timedelta(minutes=5)
    for _ in range(2):
        world.step()
    assert world.status["phase"] == "RollingBack"
    world.settle()
    outcome = world.status["rolloutHistory"][0]
    assert (outcome["result"], world.status["stable"]["revision"]) == ("RolledBack", old)
    messages.check("outputs differ", outcome["message"])
    assert [comparison["metric"] for comparison in outcome["comparisons"]] == ["OutputEquivalence"]


def test_answers_count_once_and_are_shown(messages: Messages) -> None:
    world, _ = world_in_phase("Analyzing")
    world.equivalence_result = equivalence_result(1, 1)
    world.step()
    first = world.status["analysis"]
    assert first["verdict"] == "Continue"
    assert (equivalence_comparison(world) or {})["sampleCount"] == 24
    assert world.plan().status.to_dict() == world.status, "nothing is written again"
    world.equivalence_result = equivalence_result(24)  # another operator has requested them again
    world.step()
    assert world.status["analysis"] == first
    run = AnalysisRun.unpack(first["state"])
    assert run is not None
    assert run.state.equivalence == equivalence_result(1, 1)
    messages.check("outputs differ by chance", (equivalence_comparison(world) or {})["message"])


def test_canary_without_answers_is_accepted_after_soak(messages: Messages) -> None:
    world, _ = world_in_phase("Analyzing")
    messages.check("passed without the probe's result", promotion_reason(world))
    assert equivalence_comparison(world) is None


def test_unrequested_answers_are_ignored(messages: Messages) -> None:
    world, _ = world_in_phase("Analyzing", rollout={"analysis": {"outputEquivalence": "Disabled"}})
    world.equivalence_result = equivalence_result(24)
    messages.check("passed without the probe", promotion_reason(world))


def test_answers_after_the_verdict_are_ignored() -> None:
    world, _ = world_in_phase("Ramping")
    world.equivalence_result = equivalence_result(24)
    world.step()
    assert world.status["phase"] == "Ramping"
