"""Post-promotion monitoring: retained pods, fast rollback, and comparison with retained pods after an acceptance drop."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aerie.api.status import Arm
from aerie.manifests import naming
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from aerie.rollout.facts.arm_metrics import ArmMetrics
from aerie.rollout.reconcile import build_reconcile_plan
from aerie.rollout.status import build
from tests.golden import Messages
from tests.snapshots import replace_facts
from tests.unit.rollout.world import IMAGE, World, masked, monitored_world

GATEWAY = {"traffic": {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}}
MINUTE = timedelta(minutes=1)


def weights(world: World) -> dict[str, int]:
    (rule,) = world.objects["HTTPRoute", "chat"]["spec"]["rules"]
    return {backend["name"].removeprefix("chat-"): backend["weight"] for backend in rule["backendRefs"]}


def selector(world: World) -> dict[str, str]:
    selector: dict[str, str] = world.objects["Service", "chat"]["spec"]["selector"]
    return selector


def last_outcome(world: World) -> dict[str, Any]:
    outcome: dict[str, Any] = world.status["rolloutHistory"][0]
    return outcome


def roll_back_until(world: World, phase: str) -> None:
    """Reconcile until the phase; never fewer serving pods than the spec's replicas, never more pods than before."""
    for _ in range(20):
        assert world.serving() >= 4
        assert len(world.pods) <= 6
        world.step()
        if world.status["phase"] == phase:
            return
        world.schedule()
        world.ready()
    raise AssertionError(f"{world.status['phase']} instead of {phase}")


# ------------------------------------------------------------------------------------------------------------------ retention
def test_retained_pods_match_canary_and_control_and_expire() -> None:
    world, old = monitored_world(rollout=GATEWAY)
    new = world.desired_revision
    assert world.status["phase"] == "Monitoring"
    assert world.replicas() == {f"chat-{new}": 4, f"chat-{old}": 2}
    assert selector(world) == {naming.NAME_LABEL: "chat", naming.REVISION_LABEL: new}
    world.step()  # the stable Service first, then the route
    assert weights(world) == {"stable": TOTAL_WEIGHT}
    assert (last_outcome(world)["result"], last_outcome(world)["revision"]) == ("Promoted", new)
    assert world.status["stable"]["revision"] == new
    assert 2.9 < world.status["stable"]["referenceAcceptanceLength"] < 3.1
    world.schedule()
    world.step()
    previous = world.status["previous"]
    assert (previous["revision"], previous["replicas"], previous["readyReplicas"], previous["weight"]) == (old, 2, 2, 0)
    assert (world.status["replicas"], world.status["readyReplicas"]) == (4, 4)
    assert world.status["selector"] == f"{naming.NAME_LABEL}=chat,{naming.REVISION_LABEL}={new}", (
        "an autoscaler must not count idle pods"
    )
    assert world.condition("Ready") == ("True", "AllPodsReady")
    assert world.condition("Progressing") == ("True", "Monitoring")
    assert f"aerie.dev/rollback={new}" in world.message("Progressing")
    world.now += 9 * MINUTE
    plan = world.plan()
    assert (plan.objects_to_apply, plan.objects_to_delete, plan.events, plan.requeue_after) == ((), (), (), MINUTE)
    assert plan.status.to_dict() == world.status
    world.now += MINUTE
    world.settle()
    assert world.status["phase"] == "Ready"
    assert world.replicas() == {f"chat-{new}": 4}
    assert selector(world) == {naming.NAME_LABEL: "chat"}
    assert "previous" not in world.status
    assert world.status["analysis"].get("state", "") == ""


@pytest.mark.parametrize("canary", [{"scaleDownDelay": "0s"}, {"capacity": "Reuse"}])
def test_no_pods_are_retained_without_delay_or_room(canary: dict[str, Any]) -> None:
    world, _ = monitored_world(rollout={"canary": canary})
    assert world.status["phase"] == "Ready"
    world.settle()
    assert world.replicas() == {f"chat-{world.desired_revision}": 4}


def test_retained_pods_are_bounded_by_room_and_replicas() -> None:
    world, old = monitored_world(rollout={"canary": {"control": "Stable"}})
    assert world.replicas() == {f"chat-{world.desired_revision}": 4, f"chat-{old}": 1}
    world, old = monitored_world()
    world.edit(replicas=1)
    world.step()
    assert world.replicas() == {f"chat-{world.desired_revision}": 1, f"chat-{old}": 1}
    world.edit(replicas=6)
    world.step()
    assert world.replicas() == {f"chat-{world.desired_revision}": 6, f"chat-{old}": 1}, "no model is loaded for retention"
    world.edit(replicas=0)
    world.settle()
    assert world.replicas() == {f"chat-{world.desired_revision}": 0}


def test_pause_keeps_retained_pods() -> None:
    world, old = monitored_world()
    world.step()
    before = world.status["previous"]
    world.edit(rollout={"paused": True, "canary": {"scaleDownDelay": "10m"}})
    world.now += timedelta(hours=3)
    world.step()
    assert world.status["phase"] == "Paused"
    assert world.status["previous"] == before
    assert f"chat-{old}" in world.replicas()
    world.edit(rollout={"canary": {"scaleDownDelay": "10m"}})
    world.settle()
    assert world.replicas() == {f"chat-{world.desired_revision}": 4}


# ------------------------------------------------------------------------------------------------------------------- rollback
@pytest.mark.parametrize("rollout", [{}, GATEWAY])
def test_manual_rollback_serves_from_retained_pods_immediately(rollout: dict[str, Any], messages: Messages) -> None:
    world, old = monitored_world(rollout=rollout)
    new = world.desired_revision
    world.step()
    world.annotate(rollback=new)
    world.step()
    assert (world.status["phase"], world.status["stable"]["revision"]) == ("RollingBack", old)
    assert selector(world) == {naming.NAME_LABEL: "chat"}
    assert world.replicas() == {f"chat-{new}": 4, f"chat-{old}": 2}, "traffic goes before pods"
    messages.check("rolled back manually", last_outcome(world)["message"])
    assert (last_outcome(world)["result"], last_outcome(world)["drafter"], last_outcome(world)["replacedDrafter"]) == (
        "RolledBack",
        "models/eagle31",
        "models/eagle3",
    )
    shares = []
    for _ in range(4 if rollout else 0):
        shares.append(weights(world))
        world.step()
    if rollout:
        assert shares[0] == {"stable": 0, "canary": TOTAL_WEIGHT}, (
            "the promoted pods, until the stable Service leads to the others"
        )
        assert shares[-1] == {"stable": TOTAL_WEIGHT // 2, "canary": TOTAL_WEIGHT // 2}, "two of four"
    roll_back_until(world, "RolledBack")
    world.settle()
    assert world.replicas() == {f"chat-{old}": 4}
    assert world.status["rejectedRevision"] == new
    assert [record["result"] for record in world.status["rolloutHistory"]] == ["RolledBack", "Promoted", "Promoted"]


def test_old_spec_rolls_back_like_a_manual_action() -> None:
    world, old = monitored_world()
    world.drafter("eagle3")
    world.step()
    assert (world.status["phase"], world.status["stable"]["revision"]) == ("RollingBack", old)
    roll_back_until(world, "Ready")
    world.settle()
    assert world.replicas() == {f"chat-{old}": 4}
    assert last_outcome(world)["result"] == "Superseded"
    assert "rejectedRevision" not in world.status


def test_new_spec_deletes_retained_pods_before_its_canary() -> None:
    world, old = monitored_world()
    new = world.desired_revision
    world.edit(speculation={"numSpeculativeTokens": 4})
    for _ in range(8):
        world.step()
        assert not (f"chat-{old}" in world.replicas() and f"chat-{world.desired_revision}" in world.replicas())
        world.check()
    assert world.status["phase"] == "Starting"
    assert world.status["stable"]["revision"] == new
    assert set(world.replicas()) == {f"chat-{new}", f"chat-{new}-control", f"chat-{world.desired_revision}"}


def test_crash_loop_rolls_back_promotion(messages: Messages) -> None:
    world, old = monitored_world()
    new = world.desired_revision
    world.step()
    world.crash(new, 3)
    world.step()
    assert world.status["stable"]["revision"] == old
    messages.check("crash loop", masked(last_outcome(world)["message"], NEW=new))


def test_zero_acceptance_rolls_back_promotion(messages: Messages) -> None:
    world, old = monitored_world()
    world.measure_alone(2, 1.0, dispersion=0.0)
    assert world.status["stable"]["revision"] == old
    messages.check("no accepted token", last_outcome(world)["message"])


# -------------------------------------------------------------------------------------------------------------------------- drift
def test_steady_acceptance_changes_nothing() -> None:
    world, _ = monitored_world()
    world.measure_alone(4, 2.97)
    assert world.status["phase"] == "Monitoring"


def verifying() -> tuple[World, str]:
    world, old = monitored_world(rollout=GATEWAY)
    world.measure_alone(4, 2.4)
    assert world.status["phase"] == "Verifying"
    return world, old


def test_acceptance_drop_starts_verifying_with_retained_pods(messages: Messages) -> None:
    world, old = verifying()
    world.step()  # their Service first, then the route
    assert weights(world) == {"stable": 66_667, "previous": 33_333}
    assert selector(world) == {naming.NAME_LABEL: "chat"}
    messages.check("regression", world.status["analysis"]["message"])
    messages.check("verification", masked(world.message("Progressing"), NEW=world.desired_revision, OLD=old))
    assert world.status["analysis"]["message"] in world.message("Progressing")
    assert (world.status["replicas"], world.status["previous"]["weight"]) == (6, 33)


def test_drop_of_both_revisions_does_not_roll_back(messages: Messages) -> None:
    world, old = verifying()
    new = world.desired_revision
    world.measure(31, 0.0)
    assert world.status["phase"] == "Ready"
    assert world.status["stable"]["revision"] == new
    messages.check("regression of both", masked(world.status["analysis"]["message"], OLD=old))
    world.settle()
    assert world.replicas() == {f"chat-{new}": 4}


def test_drop_of_promoted_pods_alone_rolls_back(messages: Messages) -> None:
    world, old = verifying()
    for _ in range(30):
        world.measure(1, -0.2)
        if world.status["phase"] != "Verifying":
            break
    assert world.status["stable"]["revision"] == old
    messages.check("regression of the promoted pods", last_outcome(world)["message"])
    assert last_outcome(world)["comparisons"][0]["upper"] < 0
    roll_back_until(world, "RolledBack")


def test_monitoring_continues_after_a_lost_write() -> None:
    world, _ = monitored_world()
    for _ in range(4):
        before = world.status
        world.measure_alone(1, 2.4)
        world.document["status"] = before  # the write was lost, so the reconcile is repeated
        world.step()
    assert world.status["phase"] == "Verifying"


@pytest.mark.parametrize(
    ("arm", "reason"),
    [
        ({"acceptanceLength": 1.0}, "DraftsRejected"),
        ({"acceptanceLength": 1.0, "referenceAcceptanceLength": 2.5}, "DraftsRejected"),
        ({"acceptanceLength": 1.0, "referenceAcceptanceLength": 1.0}, None),
        ({"acceptanceLength": 1.01}, None),
        ({"acceptanceLength": 1.0, "setting": {"mode": "Adaptive", "numSpeculativeTokens": 5}}, None),
        ({}, None),
    ],
)
def test_zero_acceptance_warns_with_and_without_comparison(arm: dict[str, Any], reason: str | None) -> None:
    condition = build._build_regression_condition(Arm.model_validate({"revision": "r1", **arm}))
    assert (condition and condition.reason) == reason
    assert condition is None or "level 2" in condition.message


def test_late_acceptance_drop_only_warns(messages: Messages) -> None:
    world, _ = monitored_world()
    world.now += 10 * MINUTE
    world.settle()
    assert world.status["phase"] == "Ready"
    assert world.condition("Degraded")[0] == "False"
    deployment = naming.deployment_name("chat", world.desired_revision, control=False)

    def reconcile_with_length(length: float) -> None:
        metrics_by_deployment = {deployment: ArmMetrics(acceptance_length=length)}
        plan = build_reconcile_plan(
            replace_facts(world.observed(), metrics_by_deployment=metrics_by_deployment), IMAGE, world.now
        )
        assert (plan.objects_to_apply, plan.objects_to_delete) == ((), ())
        world.document["status"] = plan.status.to_dict()

    reconcile_with_length(2.7)
    assert world.condition("Degraded")[0] == "False"
    reconcile_with_length(2.4)
    assert world.condition("Degraded") == ("True", "AcceptanceRegression")
    messages.check("acceptance regression", masked(world.message("Degraded"), NEW=world.desired_revision))
    reconcile_with_length(2.9)
    assert world.condition("Degraded")[0] == "False"
    reconcile_with_length(1.02)
    assert world.condition("Degraded") == ("True", "AcceptanceRegression")
    reconcile_with_length(1.0)
    assert world.condition("Degraded") == ("True", "DraftsRejected"), "lost weights are no drift, however little is left to fall"
    messages.check("drafts rejected", masked(world.message("Degraded"), NEW=world.desired_revision))
    reconcile_with_length(2.9)
    assert world.condition("Degraded")[0] == "False"
