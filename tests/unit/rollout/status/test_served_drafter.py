"""Pods that serve with a drafter that was promoted in place: what status, objects, recovery and tuning make of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from aerie.api.status import InPlaceRollout
from aerie.controller.tuning.inputs import TuningInputs, build_tuning_inputs
from aerie.controller.tuning.revision_facts import RevisionFactsCache
from aerie.manifests import naming, preflight_job
from aerie.rollout import reconcile
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.conditions import ConditionUpdate
from aerie.rollout.facts.arm_metrics import ArmMetrics
from aerie.rollout.progression.policy_chain import next_progression
from aerie.rollout.progression.progression import Progression
from aerie.rollout.trials.effective_setting import find_current_recommendation
from aerie.tuning.recommendation import Recommendation
from tests.unit.rollout.in_place_world import (
    FILES,
    build_in_place_rollout,
    expected_drafters,
    promoted_world,
    served_drafter,
)

CHANGES: dict[str, Any] = {}
"""Fields of the progression that a test sets."""


@pytest.fixture(autouse=True)
def progression(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the fields of `CHANGES` in every progression, which a rollout would set in a real one."""

    def with_changes(*arguments: Any) -> Progression:
        return replace(next_progression(*arguments), **CHANGES)

    monkeypatch.setattr("aerie.rollout.reconcile.next_progression", with_changes)
    CHANGES.clear()
    yield
    CHANGES.clear()


def record_name(revision: str) -> tuple[str, str]:
    return "ConfigMap", preflight_job.preflight_job_name("chat", revision)


def test_status_shows_the_served_drafter_and_writes_nothing_at_rest() -> None:
    world, built = promoted_world()
    world.settle()
    stable = world.status["stable"]
    assert (stable["revision"], stable["drafter"]) == (built, "models/eagle31")
    assert stable["inPlace"]["revision"] == world.desired_revision
    plan = world.plan()
    assert (plan.objects_to_apply, plan.objects_to_delete, plan.events) == ((), (), ())
    assert plan.status.to_dict() == world.status


def test_pods_stay_and_the_records_of_both_revisions_too() -> None:
    world, built = promoted_world()
    pods, served = list(world.pods), world.desired_revision
    world.settle()
    assert world.pods == pods
    assert expected_drafters(world) == {built: {"folder": "/models/drafters/eagle31", "files": FILES}}
    assert record_name(built) in world.objects
    assert record_name(served) in world.objects
    world.edit(speculation={"numSpeculativeTokens": 5})
    world.step()
    assert record_name(served) in world.objects, "the spec has changed, and pods still serve it"


def test_config_map_is_repaired_and_deleted_before_the_status_changes() -> None:
    world, built = promoted_world()
    del world.objects["ConfigMap", naming.expected_drafter_config_map_name("chat", built)]
    world.settle()
    assert list(expected_drafters(world)) == [built]
    CHANGES["expected_drafter"] = None
    world.step()
    assert expected_drafters(world) == {}
    assert world.status["stable"]["inPlace"], "the promotion is not complete"


def test_return_to_the_revision_of_the_pods() -> None:
    world, built = promoted_world()
    world.drafter("eagle3")
    assert world.desired_revision == built
    world.step()
    assert world.status["stable"]["drafter"] == "models/eagle31", "pods serve with it until the promotion"
    CHANGES.update(stable_in_place=None, expected_drafter=None)
    world.step()
    assert "inPlace" not in world.status["stable"]
    assert world.status["stable"]["drafter"] == "models/eagle3"
    assert expected_drafters(world) == {}


def test_arm_without_the_drafter_has_that_of_its_record() -> None:
    world, built = promoted_world()
    world.edit(speculation={"numSpeculativeTokens": 5})
    CHANGES.update(stable_in_place=None, expected_drafter=None)
    world.step()
    assert "inPlace" not in world.status["stable"]
    assert (world.status["stable"]["revision"], world.status["stable"]["drafter"]) == (built, "models/eagle3")


def test_lost_status_is_recovered() -> None:
    world, built = promoted_world()
    world.settle()
    before = world.status["stable"]
    del world.document["status"]
    world.step()
    stable = world.status["stable"]
    assert {**before, "referenceAcceptanceLength": None} == {**stable, "referenceAcceptanceLength": None}
    assert list(expected_drafters(world)) == [built]


def test_edited_config_map_recovers_the_drafter_of_the_revision() -> None:
    world, built = promoted_world()
    del world.document["status"]
    config_map = world.objects["ConfigMap", naming.expected_drafter_config_map_name("chat", built)]
    config_map["data"] = {"inPlace.json": "{"}
    world.step()
    assert "inPlace" not in world.status["stable"]
    assert world.status["stable"]["drafter"] == "models/eagle3"


def test_metrics_belong_to_the_served_drafter() -> None:
    world, built = promoted_world()
    world.document["status"]["stable"] |= {"acceptanceLength": 2.9, "referenceAcceptanceLength": 2.8}
    CHANGES["in_place"] = build_in_place_rollout()
    observed = world.observed()
    metrics = {naming.deployment_name("chat", built, control=False): ArmMetrics(1.5, 0.1, 0.1)}
    observed = replace(observed, engines=replace(observed.engines, metrics_by_deployment=metrics))

    def stable_after_step() -> tuple[float | None, float | None]:
        stable = reconcile.build_reconcile_plan(observed, preflight_job.PreflightJobConfig("a"), world.now).status.stable
        assert stable is not None
        return stable.acceptance_length, stable.reference_acceptance_length

    assert stable_after_step() == (2.9, 2.8), "two drafters take turns"
    CHANGES["in_place"] = None
    assert stable_after_step() == (1.5, 2.8)
    CHANGES["stable_in_place"] = served_drafter("abcdefabcd")
    assert stable_after_step() == (None, None), "another drafter, of which nothing is counted yet"


def test_rollout_in_place_is_in_the_status_and_keeps_its_record() -> None:
    world, _ = promoted_world()
    rollout = build_in_place_rollout("Staging", world.now, "abcdefabcd")
    world.objects[record_name("abcdefabcd")] = {
        **world.objects[record_name(world.desired_revision)],
        "metadata": {
            **world.objects[record_name(world.desired_revision)]["metadata"],
            "name": record_name("abcdefabcd")[1],
            "labels": {naming.REVISION_LABEL: "abcdefabcd"},
        },
    }
    CHANGES["in_place"] = rollout
    world.step()
    assert InPlaceRollout.from_dict(world.status["inPlaceRollout"]) == rollout
    assert record_name("abcdefabcd") in world.objects
    CHANGES["in_place"] = None
    world.step()
    world.step()
    assert record_name("abcdefabcd") not in world.objects
    assert "inPlaceRollout" not in world.status


def test_unreadable_spec_keeps_the_served_drafter() -> None:
    world, _ = promoted_world()
    world.settle()
    served = world.desired_revision
    world.edit(drafter={"source": {"unknown": {}}})
    assert world.desired_revision == served
    world.step()
    assert world.status["stable"]["inPlace"]["revision"] == served
    assert f"spec.drafter is taken from the record of revision {served}" in world.message("Degraded")


def test_recommendation_is_for_the_served_revision() -> None:
    world, built = promoted_world()
    passed = ConditionUpdate("Progressing", "False", "Complete", "")
    drafter = served_drafter(world.desired_revision)
    serving = Progression(built, "Ready", passed, passed, ArmReplicas(2), stable_in_place=drafter)
    for revision, is_current in ((world.desired_revision, True), (built, False)):
        recommendation = Recommendation(revision, world.now.timestamp(), "Hold", None, None, "")
        observed = world.observed()
        observed = replace(observed, operator=replace(observed.operator, recommendation=recommendation))
        assert (find_current_recommendation(observed, serving) is recommendation) is is_current


def test_tuning_counts_windows_of_the_served_drafter() -> None:
    world, built = promoted_world(speculation={"tuning": {"mode": "Auto"}})
    name = naming.deployment_name("chat", built, control=False)

    def read_inputs() -> TuningInputs:
        observed = world.observed()
        status = observed.resource.status
        assert status is not None
        assert status.stable is not None
        return build_tuning_inputs(observed, status, status.stable, RevisionFactsCache())

    served = read_inputs()
    assert (served.revision, list(served.settings_by_deployment)) == (world.desired_revision, [name])
    world.document["status"]["inPlaceRollout"] = build_in_place_rollout().to_dict()
    assert read_inputs().settings_by_deployment == {}, "pods change their drafter"
    del world.document["status"]["inPlaceRollout"]
    del world.document["status"]["stable"]["inPlace"]
    assert read_inputs().engine_family != served.engine_family


def test_time_alone_changes_nothing() -> None:
    world, _ = promoted_world()
    world.settle()
    world.now += timedelta(hours=1)
    assert world.plan().status.to_dict() == world.status
