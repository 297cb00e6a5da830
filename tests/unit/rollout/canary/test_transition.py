"""Canaries, from the change of a drafter to promotion or rollback, in the simulated cluster."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from tests.golden import Messages
from tests.unit.rollout.world import World, masked, serving_world, world_in_phase

MINUTE = timedelta(minutes=1)
GATEWAY = {"traffic": {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}}


def weights(world: World) -> dict[str, int]:
    (rule,) = world.objects["HTTPRoute", "chat"]["spec"]["rules"]
    return {backend["name"].removeprefix("chat-"): backend["weight"] for backend in rule["backendRefs"]}


def run_until(world: World, phase: str, times: int = 30, minutes: float = 1.0, allowed_phases: tuple[str, ...] = ()) -> None:
    """Reconcile until the phase; `allowed_phases`: no other phase may precede it."""
    for _ in range(times):
        world.step()
        assert not allowed_phases or world.status["phase"] in allowed_phases
        if world.status["phase"] == phase:
            return
        world.check()
        world.schedule()
        world.ready()
        world.now += timedelta(minutes=minutes)
    raise AssertionError(f"{world.status['phase']} instead of {phase}: {world.message('Progressing')}")


def last_outcome(world: World) -> dict[str, Any]:
    outcome: dict[str, Any] = world.status["rolloutHistory"][0]
    return outcome


# ------------------------------------------------------------------------------------------------------------------ promotion
def test_canary_and_control_start_together_beside_the_stable_pods(messages: Messages) -> None:
    world, old = world_in_phase("Starting")
    new = world.desired_revision
    assert world.replicas() == {f"chat-{old}": 2, f"chat-{new}": 1, f"chat-{old}-control": 1}
    stable, control = world.deployments()[old], world.deployments(control=True)[old]
    template = copy.deepcopy(control["spec"]["template"]["spec"])
    assert template.pop("affinity")
    assert template == stable["spec"]["template"]["spec"], "control is the stable revision"
    assert world.status["canary"]["change"] == "drafter models/eagle31"
    messages.check("starting", masked(world.message("Progressing"), NEW=new))
    assert world.condition("Ready") == ("True", "AllPodsReady")


def test_pods_of_replaced_spec_are_restored_unchanged() -> None:
    world, old = world_in_phase("WarmingUp")
    before = world.objects.pop(("Deployment", f"chat-{old}"))
    world.step()
    after = world.objects["Deployment", f"chat-{old}"]
    assert after["spec"] == before["spec"]


def test_better_canary_is_promoted_through_all_phases(messages: Messages) -> None:
    world, old = world_in_phase("WarmingUp", rollout={**GATEWAY, "analysis": {"minDuration": "1h"}}, replicas=4)
    new = world.desired_revision
    assert weights(world) == {"stable": 66_666, "canary": 16_667, "control": 16_667}
    world.now += 4 * MINUTE
    assert world.step().requeue_after == MINUTE
    world.now += MINUTE
    world.step()
    assert world.status["phase"] == "Analyzing"
    world.measure(29, +0.2)
    assert world.status["phase"] == "Analyzing"
    messages.check("before minDuration", world.status["analysis"]["message"])
    (length, *_) = world.status["analysis"]["comparisons"]
    assert length["metric"] == "TokensPerStep"
    assert 0.1 < length["lower"] < length["estimate"] < length["upper"] < 0.3
    world.now += 2 * MINUTE
    world.step()
    assert world.status["phase"] == "Ramping", "the soak is over"
    world.step()
    assert f"chat-{old}-control" not in world.replicas()
    names: set[str] = set()
    for _ in range(40):
        world.schedule()
        world.ready()
        world.step()
        current = {pod["metadata"]["name"] for pod in world.pods if f"chat-{new}" in pod["metadata"]["name"]}
        assert names <= current, "a pod of the canary was deleted"
        names = current
        assert world.serving() >= 4
        world.now += MINUTE
        if world.status["phase"] == "Ready":
            break
    assert last_outcome(world)["result"] == "Promoted"
    messages.check("promoted", last_outcome(world)["message"])
    assert last_outcome(world)["comparisons"][0]["estimate"] > 0.15
    assert (last_outcome(world)["drafter"], last_outcome(world)["replacedDrafter"]) == ("models/eagle31", "models/eagle3")
    assert world.status["stable"]["revision"] == new
    world.settle()
    assert world.replicas() == {f"chat-{new}": 4}
    assert weights(world) == {"stable": TOTAL_WEIGHT}
    assert not [key for key in world.objects if key[0] == "Service" and key[1] in ("chat-canary", "chat-control")]
    assert world.objects["Service", "chat-stable"]["spec"]["selector"]["aerie.dev/revision"] == new


def test_worse_canary_loses_traffic_then_pods_and_is_rejected(messages: Messages) -> None:
    world, old = world_in_phase("Analyzing", rollout=GATEWAY)
    new = world.desired_revision
    for _ in range(30):
        world.measure(1, -0.2)
        if world.status["phase"] != "Analyzing":
            break
    assert world.status["phase"] == "RollingBack"
    assert weights(world) == {"stable": TOTAL_WEIGHT, "canary": 0}
    assert f"chat-{new}" in world.replicas(), "its pods go after its traffic"
    run_until(world, "RolledBack", allowed_phases=("RollingBack", "RolledBack"))
    world.settle()
    assert world.replicas() == {f"chat-{old}": 2}
    assert world.status["phase"] == "RolledBack"
    assert last_outcome(world)["result"] == "RolledBack"
    messages.check("rolled back", masked(world.message("Progressing"), NEW=new))
    before = world.status["analysis"]
    assert world.condition("Ready") == ("True", "AllPodsReady")
    world.annotate(retry="now")
    world.settle_until("Starting")
    assert f"chat-{new}" in world.replicas()
    run_until(world, "Analyzing")
    assert world.status["analysis"]["startTime"] != before["startTime"]


def test_missing_data_ends_inconclusive(messages: Messages) -> None:
    world, _ = world_in_phase("Analyzing")
    world.now += timedelta(hours=3)
    world.step()
    assert world.status["phase"] == "Analyzing"
    world.now += timedelta(hours=1)
    world.step()
    assert world.status["phase"] == "Held"
    assert world.condition("Progressing") == ("False", "InconclusiveAnalysis")
    assert f"aerie.dev/promote={world.desired_revision}" in world.message("Progressing")
    messages.check("inconclusive", masked(world.message("Progressing"), NEW=world.desired_revision))
    assert world.plan().objects_to_apply == ()
    world.annotate(promote=world.desired_revision)
    run_until(world, "Ready")
    messages.check("promoted manually", last_outcome(world)["message"])


def test_inconclusive_canary_is_rolled_back_if_configured(messages: Messages) -> None:
    world, old = world_in_phase("Analyzing", rollout={"analysis": {"onInconclusive": "Rollback"}})
    world.now += timedelta(hours=4)
    world.settle()
    assert last_outcome(world)["result"] == "RolledBack"
    messages.check("rolled back as inconclusive", last_outcome(world)["message"])
    assert world.replicas() == {f"chat-{old}": 2}


def test_manual_approval_waits_for_user(messages: Messages) -> None:
    world, _ = world_in_phase("Analyzing", rollout={"canary": {"approval": "Manual"}})
    world.measure(20, +0.2)
    assert world.status["phase"] == "AwaitingApproval"
    messages.check("awaiting approval", masked(world.message("Progressing"), NEW=world.desired_revision))
    world.annotate(promote="another")
    world.step()
    assert world.status["phase"] == "AwaitingApproval", "an action on another revision"
    world.annotate(promote=world.desired_revision)
    run_until(world, "Ready")


def test_manual_promotion_in_warm_up_is_compared_during_ramp(messages: Messages) -> None:
    world, _ = world_in_phase("WarmingUp")
    world.annotate(promote=world.desired_revision)
    run_until(world, "Ramping")
    for _ in range(3):  # it grows for its share
        world.schedule()
        world.ready()
        world.step()
    world.measure(30, -0.2, seconds=10)
    assert last_outcome(world)["result"] == "RolledBack"
    messages.check("rolled back in the ramp after a manual promotion", last_outcome(world)["message"])


def test_manual_rollback_works_in_every_phase(messages: Messages) -> None:
    world, old = world_in_phase("Promoting", replicas=4)
    world.annotate(rollback=world.desired_revision)
    while world.status["phase"] != "RolledBack":
        world.step()
        assert world.serving() >= 4, "stable pods come before the canary's go"
        world.schedule()
        world.ready()
    messages.check("rolled back manually", last_outcome(world)["message"])
    world.settle()
    assert world.replicas() == {f"chat-{old}": 4}


# ------------------------------------------------------------------------------------------------------------------- failures
def test_crash_loop_of_canary_rolls_back_immediately(messages: Messages) -> None:
    world, old = world_in_phase("Analyzing")
    world.crash(world.desired_revision, 2)
    world.step()
    assert world.status["phase"] == "Analyzing"
    world.crash(world.desired_revision, 3)
    world.settle()
    messages.check("crash loop", masked(last_outcome(world)["message"], NEW=world.desired_revision))
    assert world.replicas() == {f"chat-{old}": 2}


def test_canary_that_regresses_in_ramp_is_rolled_back(messages: Messages) -> None:
    world, _ = world_in_phase("Ramping", replicas=4, rollout={"canary": {"stepDuration": "1h"}})
    for _ in range(25):
        world.schedule()
        world.ready()
        world.measure(1, -0.2)
        if world.status["phase"] == "RollingBack":
            break
    assert world.status["phase"] == "RollingBack"
    messages.check("rolled back in the ramp", last_outcome(world)["message"])


def test_pods_that_do_not_start_fail_the_rollout() -> None:
    world, old = world_in_phase("Starting")
    world.schedule()
    world.now += timedelta(minutes=31)
    world.settle_until("Failed")
    assert last_outcome(world)["result"] == "Failed"
    assert "spec.rollout.progressDeadline" in last_outcome(world)["message"]
    world.settle()
    assert world.replicas() == {f"chat-{old}": 2}


# ----------------------------------------------------------------------------------------------------- changes during a rollout
@pytest.mark.parametrize("phase", ["Starting", "WarmingUp", "Analyzing", "Ramping", "Promoting"])
def test_reverted_spec_ends_canary_immediately(phase: str, messages: Messages) -> None:
    world, old = world_in_phase(phase, replicas=4)
    world.drafter("eagle3")
    for _ in range(20):
        world.step()
        assert phase not in ("Ramping", "Promoting") or world.serving() >= 4
        world.schedule()
        world.ready()
    assert last_outcome(world)["result"] == "Superseded"
    messages.check("superseded by the stable revision", last_outcome(world)["message"])
    assert world.status["phase"] == "Ready"
    assert world.replicas() == {f"chat-{old}": 4}


def test_another_spec_restarts_with_same_stable_pods() -> None:
    world, old = world_in_phase("Analyzing")
    first = world.desired_revision
    world.edit(speculation={"numSpeculativeTokens": 4})
    world.settle_until("Starting")
    assert last_outcome(world)["revision"] == first
    assert world.status["canary"]["revision"] == world.desired_revision != first
    assert world.status["stable"]["revision"] == old
    world.step()
    assert set(world.replicas()) == {f"chat-{old}", f"chat-{old}-control", f"chat-{world.desired_revision}"}


def test_orphans_of_killed_canary_are_deleted_before_the_next(messages: Messages) -> None:
    world = serving_world()
    old = world.desired_revision
    world.drafter("eagle31")
    world.step()
    world.check()
    orphan = world.desired_revision
    world.step(len(world.plan().objects_to_apply))  # killed before the status names it
    world.drafter("another")
    world.step(len(world.plan().objects_to_apply))  # and again, before anything is deleted
    world.check()
    assert set(world.deployments()) == {old, orphan}
    world.step()
    assert world.condition("Progressing") == ("True", "Preflight")
    messages.check("unexpected revision", masked(world.message("Progressing"), LEFT=orphan))
    assert set(world.deployments()) == {old}
    world.step()
    assert set(world.deployments()) == {old, world.desired_revision}
    assert world.status["phase"] == "Starting"


def test_replicas_may_change_during_rollout() -> None:
    world, old = world_in_phase("Analyzing")
    world.edit(replicas=5)
    world.step()
    assert world.replicas() == {f"chat-{old}": 5, f"chat-{world.desired_revision}": 1, f"chat-{old}-control": 1}
    assert world.status["phase"] == "Analyzing"


def test_pause_stops_rollout_and_keeps_comparison() -> None:
    world, _ = world_in_phase("Analyzing")
    world.step()
    before = world.status["canary"]
    assert before["control"]["replicas"] == 1
    world.edit(rollout={"paused": True})
    world.now += timedelta(hours=9)
    plan = world.step()
    assert (plan.objects_to_apply, plan.objects_to_delete) == ((), ())
    assert world.status["phase"] == "Paused"
    assert world.status["canary"] == before


def test_unready_stable_revision_is_replaced_without_canary() -> None:
    world = serving_world()
    old = world.desired_revision
    world.crash(old, 5)
    world.drafter("eagle31")
    world.settle_until("Promoting")
    for _ in range(10):
        world.step()
        world.schedule()
        world.ready(world.desired_revision)
    assert world.status["phase"] == "Ready"
    assert world.status["stable"]["revision"] == world.desired_revision != old


def test_briefly_unready_stable_revision_gets_a_canary() -> None:
    world = serving_world()
    world.ready(value="False")
    world.drafter("eagle31")
    world.settle_until("Starting")


def test_scaling_to_zero_does_not_promote_canary() -> None:
    world, old = world_in_phase("Analyzing")
    world.edit(replicas=0)
    for _ in range(3):
        world.step()
        world.schedule()
        world.ready()
    assert world.status["stable"]["revision"] == old
    assert world.condition("Progressing") == ("False", "ScaledToZero")
    assert not any(world.replicas().values()), "no pod of any arm is requested"
    world.edit(replicas=2)
    world.step()
    assert world.status["phase"] == "Starting", "an analysis starts with pods of one age"
    assert world.replicas() == {f"chat-{old}": 2, f"chat-{old}-control": 1, f"chat-{world.desired_revision}": 1}


@pytest.mark.parametrize(("action", "result"), [("promote", "Promoted"), ("rollback", "RolledBack")])
def test_manual_actions_apply_to_canary_without_pods(action: str, result: str) -> None:
    world, _ = world_in_phase("Analyzing")
    world.edit(replicas=0)
    world.step()
    world.annotate(**{action: world.desired_revision})
    world.step()
    assert world.status["rolloutHistory"][0]["result"] == result


def test_reuse_needs_no_extra_places() -> None:
    world = serving_world(replicas=4, rollout={"canary": {"capacity": "Reuse"}})
    old = world.desired_revision
    world.drafter("eagle31")
    for _ in range(60):
        world.step()
        world.check()
        world.schedule(places=4)
        assert world.serving() >= 2
        world.ready()
        if world.status["phase"] == "Analyzing":
            world.measure(1, +0.2)
        world.now += MINUTE
    assert world.status["phase"] == "Ready"
    assert world.replicas() == {f"chat-{world.desired_revision}": 4}
    assert old != world.desired_revision


def test_idle_reconciles_write_nothing() -> None:
    for phase in ("Starting", "WarmingUp", "Analyzing", "Ramping"):
        world, _ = world_in_phase(phase, replicas=4)
        if phase != "Starting":
            world.schedule()
            world.ready()
            world.step()
            world.step()
        world.now += timedelta(seconds=7)
        plan = world.plan()
        assert (plan.objects_to_apply, plan.objects_to_delete, plan.events) == ((), (), ()), phase
        assert plan.status.to_dict() == world.status, phase
