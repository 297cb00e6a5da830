"""How a trial ends: promoted with a significant gain, else rolled back, and superseded by the user; and what it has cost."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from tests.unit.rollout.tuned_world import (
    K3,
    K5,
    MINUTE,
    edit_speculation,
    recommend,
    reconcile,
    run_trial,
    run_until,
    speculation,
    tuned_world,
)


def test_faster_setting_is_applied_without_spec_change() -> None:
    world = tuned_world(rollout={"analysis": {"minDuration": "2h"}})
    old = world.desired_revision
    run_trial(world, -0.1)
    world.settle()
    status = speculation(world)
    new = world.status["stable"]["revision"]
    assert world.document["spec"]["speculation"] == {"tuning": {"mode": "Auto"}}
    assert status["current"] == status["applied"]["setting"] == world.status["stable"]["setting"] == K5
    assert (status["applied"]["specRevision"], status["applied"]["revision"]) == (old, new)
    (change,) = status["trials"]
    assert (change["fromSetting"], change["toSetting"], change["result"], change["purpose"]) == (K3, K5, "Promoted", "Improve")
    assert 0.08 < change["measured"]["lower"] < change["measured"]["estimate"] < change["measured"]["upper"] < 0.15
    assert world.replicas() == {f"chat-{new}": 2}
    assert world.status["rolloutHistory"][0]["change"] == "K=5"
    assert "time per output token" in world.status["rolloutHistory"][0]["message"].lower()
    assert status["savings"]["currentRate"] == change["measured"]["estimate"]
    assert status["savings"]["net"] <= 0, "so far it has only cost"
    world.now += timedelta(hours=100)
    plan = world.plan()
    assert (plan.objects_to_apply, plan.objects_to_delete, plan.events) == ((), (), ())
    assert plan.status.to_dict() == world.status, "nothing depends on the clock"


@pytest.mark.parametrize(("slower", "result", "cooldown_hours"), [(0.1, "RolledBack", 24), (0.0, "Inconclusive", 6)])
def test_setting_without_significant_gain_is_rolled_back(slower: float, result: str, cooldown_hours: int) -> None:
    world = tuned_world(rollout={"analysis": {"maxDuration": "1h"}})
    old = world.desired_revision
    recommend(world)
    phases = set()
    for _ in range(120):
        reconcile(world)
        phases.add(world.status["phase"])
        if speculation(world).get("trials") and world.status["phase"] == "Ready":
            break
        if world.status["phase"] == "Analyzing":
            world.measure_time(1, slower, dispersion=0.03, step=False)
        else:
            world.now += MINUTE
    assert not phases & {"Held", "RolledBack", "Ramping"}
    assert speculation(world)["trials"][0]["result"] == result
    assert ("lastRollbackTime" in speculation(world)) == (result == "RolledBack")
    trial = speculation(world)["trials"][0]
    hours = (datetime.fromisoformat(trial["completionTime"]) - datetime.fromisoformat(trial["startTime"])) / timedelta(hours=1)
    assert (2 <= hours < 2.2) if result == "Inconclusive" else hours < 1, "twice the deadline"
    assert (speculation(world)["current"], speculation(world).get("applied")) == (K3, None)
    assert "rejectedRevision" not in world.status
    world.settle()
    assert world.replicas() == {f"chat-{old}": 2}
    ended = world.now
    for hours, reason in ((1, "Cooldown"), (cooldown_hours - 1, "Cooldown"), (cooldown_hours + 1, "Trial")):
        world.now = ended + timedelta(hours=hours)
        recommend(world)
        world.step()
        assert world.condition("SpeculationTuned") == ("False", reason), "six hours, and four times that"
        if reason == "Cooldown":  # or the tuner, which knows of the cooldown, holds
            recommend(world, action="Hold", reason="K=5 is +8.0 % better. But a change was taken back 1.0 h ago.")
            world.step()
            assert world.condition("SpeculationTuned") == ("False", "Cooldown")


def test_preflight_may_reject_a_trial() -> None:
    world = tuned_world()
    recommend(world)
    world.step()
    world.step()
    revision = speculation(world)["trial"]["revision"]
    world.conclude(f"chat-{revision}-preflight", {"passed": False, "summary": "no.", "errors": ["✗ C9 memory: too little."]})
    plan = world.step()
    assert "C9 memory" in world.status["rolloutHistory"][0]["message"]
    assert speculation(world)["trials"][0]["result"] == "Failed"
    assert [event.reason for event in plan.events if event.type == "Warning"] == ["Failed"]
    world.settle()
    assert world.status["phase"] == "Ready"
    assert list(world.deployments()) == [world.desired_revision]


def test_trial_without_preflight_result_ends_at_deadline() -> None:
    world = tuned_world()
    recommend(world)
    world.step()
    plan = world.step()
    assert plan.requeue_after is not None
    assert plan.requeue_after <= timedelta(minutes=30)
    world.now += timedelta(minutes=31)
    world.step()
    assert "spec.rollout.progressDeadline (30m)" in world.status["rolloutHistory"][0]["message"]
    assert "trial" not in speculation(world)


# ------------------------------------------------------------------------------------------------------------- ended by the user
@pytest.mark.parametrize("mode", ["Recommend", "Off"])
@pytest.mark.parametrize("phase", ["Preflight", "Starting", "WarmingUp", "Analyzing"])
def test_a_trial_ends_with_the_mode(mode: str, phase: str) -> None:
    world = tuned_world()
    recommend(world)
    world.step()
    for _ in range(20):
        world.step()
        if world.status["phase"] == phase:
            break
        world.check()
        if world.status["phase"] != "Preflight":
            world.schedule()
            world.ready()
        world.now += 5 * MINUTE
    assert world.status["phase"] == phase
    world.edit(speculation={"tuning": {"mode": mode}})
    world.step()
    assert "trial" not in speculation(world)
    assert speculation(world)["trials"][0]["result"] == "Superseded"
    run_until(world, "Ready")
    world.settle()
    assert world.replicas() == {f"chat-{world.desired_revision}": 2}


def test_manual_actions_apply_to_trials() -> None:
    for action, result in (("rollback", "RolledBack"), ("promote", "Promoted")):
        world = tuned_world()
        recommend(world)
        run_until(world, "Analyzing")
        world.annotate(**{action: speculation(world)["trial"]["revision"]})
        run_until(world, "Ready", 0.0)
        assert speculation(world)["trials"][0]["result"] == result


def test_stricter_objective_ends_trial_and_looser_does_not() -> None:
    world = tuned_world(speculation={"tuning": {"slo": {"timePerOutputToken": "20ms"}}})
    recommend(world)
    world.step()
    edit_speculation(world, tuning={"slo": {"timePerOutputToken": "30ms"}})
    world.step()
    assert speculation(world)["trial"]["setting"] == K5
    edit_speculation(world, tuning={"slo": {"timePerOutputToken": "30ms", "timeToFirstToken": "1s"}})
    world.step()
    assert "trial" not in speculation(world)


# ----------------------------------------------------------------------------------------------------------------------- savings
@pytest.mark.parametrize(("capacity", "hours"), [("Surge", 4.0), ("Reuse", 0.0)])
def test_savings_count_each_surplus_pod_while_it_exists(capacity: str, hours: float) -> None:
    world = tuned_world(replicas=4, rollout={"analysis": {"maxDuration": "1h"}, "canary": {"capacity": capacity}})
    recommend(world)
    world.step()
    for _ in range(120):
        reconcile(world)
        if "trial" not in speculation(world):
            break
        if world.status["phase"] == "Analyzing":
            world.measure_time(1, 0.0, dispersion=0.03, step=False)
        else:
            world.now += MINUTE
    assert speculation(world)["trials"][0]["result"] == "Inconclusive"
    spent = speculation(world)["savings"]["spent"]
    assert hours <= spent < hours + 0.6, "two pods, for two hours and a warm-up"
    assert speculation(world)["savings"]["net"] == -spent


def test_retained_pods_are_counted_when_deleted() -> None:
    world = tuned_world(rollout={"canary": {"scaleDownDelay": "10h"}})
    recommend(world)
    run_until(world, "Monitoring", -0.1)
    before = speculation(world)["savings"]["spent"]
    world.now += timedelta(hours=10)
    world.settle()
    assert world.status["phase"] == "Ready"
    assert 19 < speculation(world)["savings"]["spent"] - before < 21
