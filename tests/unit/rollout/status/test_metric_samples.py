"""Samples of a status: one per series, only of what the status has, and each reason for a user to act."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, get_args

import pytest

from aerie.api.status import InPlacePhase, Phase, Status
from aerie.rollout.status.metric_samples import (
    ATTENTION_REASONS,
    STATUS_FAMILIES,
    build_samples,
    find_attention_reasons,
    parse_degraded_reason,
)
from tests.unit.rollout import tuned_world
from tests.unit.rollout.in_place_world import build_in_place_rollout
from tests.unit.rollout.world import START, World, monitored_world, serving_world, world_in_phase

MAX_SAMPLES = 25 + 4 * 9 + 16 * 4
"""Samples of a status with all arms and the greatest number of criteria."""


def samples(world: World) -> dict[tuple[str, ...], float]:
    """Return the value by name and labels. Fails on duplicates."""
    built = list(build_samples(Status.from_dict(world.status)))
    counts = Counter((sample.family.name, *sample.label_values) for sample in built)
    assert set(counts.values()) <= {1}
    assert len(built) <= MAX_SAMPLES
    for sample in built:
        assert sample.family in STATUS_FAMILIES
        assert len(sample.label_values) == len(sample.family.labels) - 2
    return {(sample.family.name.removeprefix("aerie_"), *sample.label_values): sample.value for sample in built}


def reasons(world: World) -> list[str]:
    return list(find_attention_reasons(Status.from_dict(world.status)))


def test_empty_status_has_no_samples() -> None:
    assert list(build_samples(Status())) == []


def test_serving_resource() -> None:
    world = serving_world()
    values = samples(world)
    assert values["resource_phase", "Ready"] == 1
    assert (values["replicas", "stable", "desired"], values["replicas", "stable", "ready"]) == (2, 2)
    assert values["speculative_tokens", "stable"] == 3
    assert values["arm_info", "stable", world.desired_revision, "Static"] == 1
    assert values["rollout_last_completion_time_seconds", "Promoted"] >= START.timestamp()
    assert not [name for name, *_ in values if name in ("attention", "rollout_info", "verdict", "comparison_change_ratio")]


def test_analysis_has_its_bounds_and_verdict() -> None:
    world, old = world_in_phase("Analyzing")
    world.measure(30, +0.005)
    values = samples(world)
    assert values["rollout_info", world.desired_revision, "Canary", "Rollout"] == 1
    assert values["verdict", "Continue"] == 1
    comparison = world.status["analysis"]["comparisons"][0]
    for bound in ("lower", "estimate", "upper"):
        assert values["comparison_change_ratio", comparison["metric"], bound] == comparison[bound]
    assert values["comparison_samples", comparison["metric"]] == comparison["sampleCount"]
    requirements = {item["metric"]: item["met"] for item in world.status["analysis"]["comparisons"] if "requirement" in item}
    assert requirements
    assert {key[1]: value for key, value in values.items() if key[0] == "comparison_met"} == requirements
    assert {key[1] for key in values if key[0] == "replicas"} == {"stable", "canary", "control"}
    assert values["arm_info", "control", old, "Unknown"] == 1
    assert sum(value for key, value in values.items() if key[0] == "traffic_weight_ratio") == pytest.approx(1)


def test_comparisons_end_with_the_rollout() -> None:
    world, _ = monitored_world()
    assert samples(world)["rollout_info", world.desired_revision, "PostPromotion", "Rollout"] == 1
    assert any(key[0] == "comparison_change_ratio" for key in samples(world))
    for _ in range(10):
        world.now += timedelta(minutes=10)
        world.step()
    assert world.status["phase"] == "Ready"
    assert world.status["analysis"]["comparisons"], "the status has them until the next rollout"
    assert not [key for key in samples(world) if key[0] in ("comparison_change_ratio", "verdict", "rollout_info")]


@pytest.mark.parametrize("phase", ["Starting", "WarmingUp", "Analyzing", "Ramping", "Promoting"])
def test_phase_of_a_canary_has_its_start_time(phase: str) -> None:
    world, _ = world_in_phase(phase)
    values = samples(world)
    assert START.timestamp() <= values["rollout_start_time_seconds",] <= values["rollout_phase_start_time_seconds",]
    assert values["rollout_phase_start_time_seconds",] <= world.now.timestamp()


@pytest.mark.parametrize("phase", get_args(InPlacePhase))
def test_rollout_in_place(phase: InPlacePhase) -> None:
    world = serving_world()
    world.document["status"] |= {"phase": phase, "inPlaceRollout": build_in_place_rollout(phase).to_dict()}
    values = samples(world)
    assert values["rollout_info", "0123456789", "InPlace", "Rollout"] == 1
    assert values["rollout_phase_start_time_seconds",] == START.timestamp()
    assert reasons(world) == [phase] * (phase in ("Held", "AwaitingApproval"))


def test_first_revision() -> None:
    world = World()
    for _ in range(3):
        world.step()
        world.check()
    assert samples(world)["rollout_info", world.desired_revision, "FirstRevision", "Rollout"] == 1
    assert reasons(world) == [], "a first revision that starts needs nobody"
    world.now += timedelta(hours=1)
    world.step()
    assert world.status["phase"] == "Failed"
    assert reasons(world) == ["Failed"]


def test_held_canary_waits_for_a_user_since_its_deadline() -> None:
    world, _ = world_in_phase("Analyzing")
    world.now += timedelta(hours=4)
    world.step()
    held_at = world.now
    world.now += timedelta(hours=2)
    world.step()
    assert reasons(world) == ["Held"]
    assert samples(world)["rollout_phase_start_time_seconds",] == held_at.timestamp()
    assert samples(world)["verdict", "Inconclusive"] == 1


def test_rejected_drafter_and_rollback_need_a_user() -> None:
    world = serving_world()
    world.drafter("refused")
    world.settle()
    assert reasons(world) == ["PreflightFailed"]
    world, _ = world_in_phase("Analyzing")
    world.annotate(rollback=world.desired_revision)
    world.settle()
    assert reasons(world) == ["RolledBack"]


def test_outage_and_degraded_pods() -> None:
    world = serving_world()
    world.document["status"]["readyReplicas"] = 0
    assert reasons(world) == ["NotServing"]
    world.document["status"]["replicas"] = 0
    assert reasons(world) == [], "scaled to zero"


def degraded(world: World, reason: str) -> list[str]:
    for condition in world.status["conditions"]:
        if condition["type"] == "Degraded":
            condition |= {"status": "True", "reason": reason}
    return reasons(world)


def test_reasons_of_degraded_are_bounded() -> None:
    world = serving_world()
    assert degraded(world, "AcceptanceRegression") == ["AcceptanceRegression"]
    for reason in ("CrashLoopBackOff", "AnythingThatACloudInvents", "Failed", "NotServing"):
        assert degraded(world, reason) == ["PodFailure"]
        assert parse_degraded_reason(reason) in ATTENTION_REASONS


def test_trial_and_its_gains() -> None:
    world = tuned_world.tuned_world()
    tuned_world.recommend(world)
    world.step()
    tuned_world.run_until(world, "Analyzing")
    values = samples(world)
    assert next(key for key in values if key[0] == "rollout_info")[2:] == ("Canary", "Trial")
    assert values["tuning_recommended_gain_ratio",] == world.status["speculation"]["trial"]["predicted"]["estimate"]
    tuned_world.run_trial(world, -0.1)
    values, record = samples(world), world.status["speculation"]["trials"][0]
    assert values["tuning_trial_gain_ratio", "predicted"] == record["predicted"]["estimate"]
    assert values["tuning_trial_gain_ratio", "measured"] == record["measured"]["estimate"]
    savings: dict[str, Any] = world.status["speculation"]["savings"]
    assert values["tuning_replica_seconds", "spent"] == pytest.approx(savings["spent"] * 3600)
    assert values["tuning_savings_ratio",] == savings["currentRate"]


def test_each_phase_is_a_label() -> None:
    for phase in get_args(Phase):
        (sample, *_) = build_samples(Status(phase=phase))
        assert (sample.family.name, sample.label_values, sample.value) == ("aerie_resource_phase", (phase,), 1.0)
