"""Trials that start, and recommendations that start none."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aerie.engine.speculation import Schedule, ScheduleTier, Static
from aerie.tuning.recommendation import Recommendation
from tests.golden import Messages
from tests.unit.rollout.tuned_world import K5, MINUTE, edit_speculation, recommend, reconcile, run_until, speculation, tuned_world
from tests.unit.rollout.world import serving_world


def test_trial_is_written_before_its_objects_are_created() -> None:
    world = tuned_world()
    recommend(world)
    plan = world.plan()
    assert (plan.objects_to_apply, plan.objects_to_delete, plan.requeue_after) == ((), (), timedelta(0))
    world.step()
    trial = speculation(world)["trial"]
    assert (trial["setting"], trial["purpose"], trial["predicted"]["estimate"]) == (K5, "Improve", 0.08)
    assert world.condition("SpeculationTuned") == ("False", "Trial")
    assert world.status["phase"] == "Ready"
    world.recommendation = None  # an operator that has just started
    world.step()
    assert world.status["phase"] == "Preflight"
    record = world.objects["ConfigMap", f"chat-{trial['revision']}-preflight"]["data"]["resource.json"]
    assert '"numSpeculativeTokens": 5' in record, "preflight checks the setting on trial"


@pytest.mark.parametrize("parts", range(12))
def test_crash_after_any_write_loses_no_trial(parts: int) -> None:
    world = tuned_world()
    recommend(world)
    world.step(parts)
    world.step()
    assert speculation(world)["trial"]["setting"] == K5
    for _ in range(40):
        world.step(parts % 5)
        reconcile(world)
        if world.status["phase"] == "Analyzing":
            break
        world.now += MINUTE
    run_until(world, "Monitoring", -0.1)
    assert speculation(world)["current"] == K5


# ---------------------------------------------------------------------------------------------------------------------- no trial
def test_tuning_is_off_by_default() -> None:
    world = serving_world()
    recommend(world)
    world.settle()
    assert "trial" not in speculation(world)
    assert speculation(world)["recommended"] == K5


@pytest.mark.parametrize("mode", ["Recommend", "Off"])
def test_no_trial_in_other_modes(mode: str, messages: Messages) -> None:
    world = tuned_world(speculation={"tuning": {"mode": mode}})
    recommend(world)
    world.settle()
    assert "trial" not in speculation(world)
    if mode == "Recommend":
        assert speculation(world)["recommended"] == K5
        messages.check("mode Recommend", world.message("SpeculationTuned"))
    else:
        assert world.condition("SpeculationTuned") == ("False", "Off")


def test_no_trial_without_pods() -> None:
    world = tuned_world()
    recommend(world)
    world.step()
    world.edit(replicas=0)
    world.settle()
    assert "trial" not in speculation(world)
    assert world.replicas() == {f"chat-{world.desired_revision}": 0}


def test_no_trial_on_stale_or_foreign_recommendation() -> None:
    world = tuned_world()
    recommend(world)
    assert world.recommendation is not None
    for other in (
        Recommendation("another", *_fields_after_revision(world.recommendation)),
        Recommendation(
            world.recommendation.revision,
            world.recommendation.decision_time - 3601,
            *_fields_after_revision(world.recommendation)[1:],
        ),
    ):
        world.recommendation = other
        world.settle()
        assert "trial" not in speculation(world)


def _fields_after_revision(recommendation: Recommendation) -> tuple[Any, ...]:
    return (
        recommendation.decision_time,
        recommendation.action,
        recommendation.setting,
        recommendation.predicted_gain,
        recommendation.reason,
    )


def test_unsupported_setting_is_not_tried_and_named(messages: Messages) -> None:
    world = tuned_world(engine={"image": "vllm/vllm-openai:v0.33.0", "args": ["--data-parallel-size=2"]})
    recommend(world, Schedule((ScheduleTier(1, 8, 5), ScheduleTier(9, 64, 3)), 5))
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "SettingRejected")
    assert "data parallel size 2" in world.message("SpeculationTuned")
    recommend(world, Static(9))
    world.step()
    messages.check("beyond maxSpeculativeTokens", world.message("SpeculationTuned"))


def test_a_trial_waits_for_rollouts_and_for_pods(messages: Messages) -> None:
    world = tuned_world()
    world.ready(value="False")
    recommend(world)
    world.step()
    messages.check("pods not ready", world.message("SpeculationTuned"))
    world.ready()
    world.drafter("eagle31")
    recommend(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "RolloutInProgress")
    assert "trial" not in speculation(world)


# ----------------------------------------------------------------------------------------------------------- spec without drafts
def test_zero_tokens_forbid_trials_unless_allowed() -> None:
    world = tuned_world(speculation={"numSpeculativeTokens": 0})
    recommend(world, Static(3), "Explore")
    world.settle()
    assert "trial" not in speculation(world)
    assert world.condition("SpeculationTuned") == ("False", "NoDrafts")
    assert "whenZero: Try" in world.message("SpeculationTuned")
    edit_speculation(world, numSpeculativeTokens=0, tuning={"whenZero": "Try"})
    recommend(world, Static(3), "Explore")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Trial")
    edit_speculation(world, numSpeculativeTokens=0)
    world.step()
    assert "trial" not in speculation(world), "and ended immediately"


def test_zero_tokens_without_drafter_message_names_drafter(messages: Messages) -> None:
    world = tuned_world(drafter=None, speculation={"numSpeculativeTokens": 0, "tuning": {"whenZero": "Try"}})
    recommend(world, Static(3), "Explore")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "NoDrafts")
    messages.check("no drafter", world.message("SpeculationTuned"))
