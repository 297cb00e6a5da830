"""The setting that pods run with: when it is the applied setting of a trial, and when that of the spec."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aerie.engine.speculation import Off, Schedule, ScheduleTier, Static
from aerie.rollout.revision.desired import resolve_desired_revision
from tests.golden import Messages
from tests.unit.rollout.tuned_world import K3, K5, edit_speculation, recommend, run_trial, run_until, speculation, tuned_world


def test_mode_off_restores_spec_setting_by_canary() -> None:
    world = tuned_world()
    run_trial(world, -0.1)
    world.edit(speculation={"tuning": {"mode": "Recommend"}})
    world.settle()
    assert speculation(world)["current"] == K5, "the applied setting stays"
    world.edit(speculation={"tuning": {"mode": "Off"}})
    world.step()
    assert world.status["phase"] == "Preflight"
    run_until(world, "Analyzing")
    assert world.status["canary"]["revision"] == world.desired_revision
    assert speculation(world)["applied"]["setting"] == K5
    world.annotate(promote=world.desired_revision)
    run_until(world, "Ready")
    world.settle()
    assert speculation(world)["current"] == K3
    assert "applied" not in speculation(world)
    assert speculation(world)["savings"]["currentRate"] == 0


@pytest.mark.parametrize("phase", ["Preflight", "Analyzing", "afterwards"])
def test_user_setting_overrides_tuned_setting(phase: str) -> None:
    world = tuned_world()
    recommend(world)
    world.step()
    if phase == "afterwards":
        run_trial(world, -0.1)
    elif phase == "Analyzing":
        run_until(world, "Analyzing")
    edit_speculation(world, numSpeculativeTokens=2)
    world.step()
    assert "trial" not in speculation(world)
    run_until(world, "Analyzing")
    assert world.status["canary"]["revision"] == world.desired_revision
    assert world.status["canary"]["change"] == "K=2"
    world.annotate(promote=world.desired_revision)
    run_until(world, "Ready")
    world.settle()
    assert speculation(world)["current"] == {"mode": "Static", "numSpeculativeTokens": 2}
    assert "applied" not in speculation(world)
    assert world.replicas() == {f"chat-{world.desired_revision}": 2}


def test_spec_with_setting_on_trial_adopts_its_canary() -> None:
    world = tuned_world()
    recommend(world)
    run_until(world, "Analyzing")
    edit_speculation(world, numSpeculativeTokens=5)
    world.step()
    assert "trial" not in speculation(world)
    assert world.status["phase"] == "Analyzing", "the same pods continue"
    run_until(world, "Ready", -0.1)
    world.settle()
    assert "applied" not in speculation(world)
    assert world.replicas() == {f"chat-{world.desired_revision}": 2}


def test_rollback_of_promotion_restores_previous_setting() -> None:
    world = tuned_world()
    old = world.desired_revision
    recommend(world)
    run_until(world, "Monitoring", -0.1)
    assert speculation(world)["applied"]["setting"] == K5
    world.annotate(rollback=world.status["stable"]["revision"])
    world.step()
    assert world.status["stable"]["revision"] == old
    assert "applied" not in speculation(world)
    assert speculation(world)["trials"][0]["result"] == "RolledBack"
    assert "lastRollbackTime" in speculation(world)
    run_until(world, "Ready")
    world.settle()
    assert world.replicas() == {f"chat-{old}": 2}
    world.now += timedelta(hours=30)
    recommend(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "SettingRejected"), "a user has rolled it back"


@pytest.mark.parametrize(
    ("bound", "name"),
    [({"maxSpeculativeTokens": 4}, "maxSpeculativeTokens"), ({"slo": {"timePerOutputToken": "20ms"}}, "slo")],
)
def test_setting_beyond_new_bound_is_dropped(bound: dict[str, Any], name: str, messages: Messages) -> None:
    world = tuned_world(rollout={"analysis": {"minDuration": "0s"}})
    run_trial(world, -0.1)
    world.settle()
    assert speculation(world)["current"] == K5
    edit_speculation(world, tuning=bound)
    world.step()
    assert world.status["phase"] == "Preflight"
    assert world.condition("SpeculationTuned") == ("False", "SettingVoid")
    messages.check(f"applied setting beyond {name}", world.message("SpeculationTuned"))
    run_until(world, "Analyzing")
    assert world.status["canary"]["revision"] == world.desired_revision
    world.annotate(promote=world.desired_revision)
    run_until(world, "Ready")
    assert speculation(world)["current"] == K3
    assert "applied" not in speculation(world)


def test_setting_changes_revision_and_pods() -> None:
    world = tuned_world()
    resource = world.observed().resource
    desired = [
        resolve_desired_revision(resource, setting=setting)
        for setting in (Static(3), Static(5), Off(), Schedule((ScheduleTier(1, 8, 3),), 3))
    ]
    assert desired[0].revision == world.desired_revision
    assert len({setting.revision for setting in desired}) == 4
    arguments = [setting.pod_template["spec"]["containers"][0]["args"] for setting in desired if setting.pod_template]
    assert ["--speculative-config" in each for each in arguments] == [True, True, False, True]
    assert desired[3].arm.setting is not None
    assert desired[3].arm.setting.to_dict()["schedule"] == [{"minBatchSize": 1, "maxBatchSize": 8, "numSpeculativeTokens": 3}]
