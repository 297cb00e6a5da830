"""Service handover: a Service gets requests only after the gateway had time to learn its endpoints, in every rollout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from aerie.manifests import naming
from aerie.rollout.capacity.service_handover import ENDPOINT_PROPAGATION_DELAY, MAX_SERVER_CLOCK_LEAD
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from aerie.rollout.reconcile import build_reconcile_plan
from tests.snapshots import replace_facts
from tests.unit.rollout.test_route_status import GATEWAY
from tests.unit.rollout.world import IMAGE, World, monitored_world, serving_world, world_in_phase

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
REUSE = {**GATEWAY, "canary": {"capacity": "Reuse", "stepWeights": []}}
SURGE = {**GATEWAY, "canary": {"stepWeights": [], "scaleDownDelay": "10m"}}


def shares(world: World) -> dict[str, int]:
    """Return the weights by arm, in percent."""
    return {name.removeprefix("chat-"): 100 * weight // TOTAL_WEIGHT for name, weight in world.route_weights().items()}


def service_revision(world: World, arm: str) -> str:
    """Return the revision that the arm's Service selects."""
    return str(world.objects["Service", f"chat-{arm}"]["spec"]["selector"][naming.REVISION_LABEL])


def run_until(world: World, until: Callable[[], bool], places: int = 1000, max_load: float = 100) -> list[dict[str, int]]:
    """Reconcile each second until the condition holds, check that no requests are lost, and return the weights' history."""
    history: list[dict[str, int]] = []
    for _ in range(200):
        world.step()
        assert not world.unserved_services(), (shares(world), world.now)
        assert world.max_pod_load() <= max_load, (shares(world), world.now)
        if not history or history[-1] != shares(world):
            history.append(shares(world))
        if until():
            return history
        world.schedule(places)
        world.ready()
        assert not world.unserved_services(), (shares(world), world.now)
        world.now += SECOND
    raise AssertionError(f"it never comes to that: {shares(world)}, {world.message('Progressing')}")


def manually_promoted(**rollout: Any) -> tuple[World, str, str]:
    """Return a manually promoted canary: its world, the stable revision and its own."""
    world, old = world_in_phase("Analyzing", replicas=4, rollout=rollout)
    world.has_change_times = True
    new = world.status["canary"]["revision"]
    world.annotate(promote=new)
    return world, old, new


def test_canary_service_serves_until_stable_service_is_ready() -> None:
    world, _, new = manually_promoted(**REUSE)
    run_until(world, lambda: world.status["stable"]["revision"] == new, places=4)
    promoted = world.now
    assert (service_revision(world, "stable"), service_revision(world, "canary"), shares(world)) == (
        new,
        new,
        {"stable": 0, "canary": 100},
    )
    assert world.plan().requeue_after == ENDPOINT_PROPAGATION_DELAY
    world.now += ENDPOINT_PROPAGATION_DELAY - SECOND
    assert world.step().requeue_after == SECOND
    assert shares(world) == {"stable": 0, "canary": 100}
    run_until(world, lambda: shares(world) == {"stable": 100})
    assert world.now == promoted + ENDPOINT_PROPAGATION_DELAY
    assert ("Service", "chat-canary") in world.objects, "proxies may still send to it"
    run_until(world, lambda: ("Service", "chat-canary") not in world.objects)


def test_few_remaining_pods_never_get_all_requests() -> None:
    world, old = world_in_phase("Analyzing", replicas=12, rollout=SURGE)
    world.has_change_times = True
    new = world.status["canary"]["revision"]
    world.annotate(promote=new)
    run_until(world, lambda: world.status["stable"]["revision"] == new, max_load=2)
    run_until(world, lambda: shares(world) == {"stable": 100}, max_load=2)
    assert world.replicas()[f"chat-{new}"] == 12
    run_until(world, lambda: world.replicas()[f"chat-{old}"] == 2, max_load=2)


def test_arm_services_exist_before_they_have_requests() -> None:
    world = serving_world(replicas=4, rollout=GATEWAY)
    world.has_change_times = True
    world.drafter("eagle31")
    for _ in range(3):
        world.step()
        world.check()
    assert shares(world) == {"stable": 100, "canary": 0, "control": 0}
    created_at = world.now
    history = run_until(world, lambda: shares(world)["canary"] > 0)
    assert (world.status["phase"], world.now - created_at) == ("WarmingUp", ENDPOINT_PROPAGATION_DELAY)
    assert [weights["stable"] for weights in history] == [100, 66]


def monitored(**spec: Any) -> tuple[World, str, str]:
    """Return a promotion of twelve pods with two retained pods, the previous revision and the promoted one."""
    world, old = monitored_world(replicas=12, rollout=GATEWAY, **spec)
    world.settle()
    world.now += MINUTE
    world.has_change_times = True
    return world, old, world.desired_revision


def test_rollback_of_promotion_shares_requests_among_old_pods() -> None:
    world, old, new = monitored()
    began = world.now
    world.annotate(rollback=new)
    world.step()
    assert world.status["stable"]["revision"] == old
    assert (service_revision(world, "stable"), service_revision(world, "canary"), shares(world)) == (new, new, {"stable": 100})
    history = run_until(world, lambda: service_revision(world, "stable") == old, max_load=1.2)
    assert history == [{"stable": 100}, {"stable": 0, "canary": 100}]
    assert began + ENDPOINT_PROPAGATION_DELAY < world.now < began + 2 * ENDPOINT_PROPAGATION_DELAY, (
        "and when the gateway has observed its zero weight"
    )
    run_until(world, lambda: world.route_weights()["chat-stable"] > 0, max_load=1.2)
    run_until(world, lambda: world.replicas() == {f"chat-{old}": 12}, max_load=2)
    assert (shares(world), world.status["phase"]) == ({"stable": 100}, "RolledBack")


def test_unready_promoted_pods_lose_requests_immediately() -> None:
    world, old, new = monitored()
    world.ready(new, "False")
    world.annotate(rollback=new)
    world.step()
    assert (service_revision(world, "stable"), shares(world)) == (old, {"stable": 100, "canary": 0})


def test_retained_pods_get_requests_through_established_service() -> None:
    world, _, _ = monitored()
    world.measure_alone(4, 2.4)
    assert world.status["phase"] == "Verifying"
    assert shares(world) == {"stable": 100}
    world.now += ENDPOINT_PROPAGATION_DELAY
    world.step()
    assert shares(world) == {"stable": 85, "previous": 14}
    world.annotate(rollback=world.desired_revision)
    history = run_until(world, lambda: world.status["phase"] == "RolledBack", max_load=2)
    assert history[1] == {"stable": 0, "canary": 100}, "not to two pods, although their Service is known"
    assert history[-1] == {"stable": 100}


def test_wrong_selector_is_repaired_while_others_serve() -> None:
    world, _ = world_in_phase("Analyzing", replicas=4, rollout=GATEWAY)
    world.has_change_times = True
    before = copy.deepcopy(world.objects["Service", "chat-stable"]["spec"])
    world.objects["Service", "chat-stable"]["spec"]["selector"] = {"app": "other"}
    world.selector_history.clear()
    world.step()
    assert world.objects["Service", "chat-stable"]["spec"] == before
    assert shares(world) == {"stable": 0, "canary": 16, "control": 16}
    world.now += ENDPOINT_PROPAGATION_DELAY
    world.step()
    assert shares(world) == {"stable": 66, "canary": 16, "control": 16}


def test_without_alternative_requests_go_to_desired_service() -> None:
    world = serving_world(rollout=GATEWAY)
    world.has_change_times = True
    del world.objects["Service", "chat-stable"]
    assert [item["kind"] for item in world.step().objects_to_apply] == ["Service"]
    del world.objects["HTTPRoute", "chat"]
    world.step()
    assert shares(world) == {"stable": 100}


def test_idle_arm_replaces_deleted_service() -> None:
    world, _ = world_in_phase("Starting", replicas=4, rollout=GATEWAY)
    world.now += MINUTE
    world.has_change_times = True
    world.schedule()
    for pod in world.pods:
        if pod["metadata"]["labels"][naming.CONTROL_LABEL] == "true":
            pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    del world.objects["Service", "chat-stable"]
    world.step()
    assert shares(world) == {"stable": 0, "canary": 0, "control": 100}
    world.now += ENDPOINT_PROPAGATION_DELAY
    world.step()
    assert shares(world) == {"stable": 100, "canary": 0, "control": 0}


def test_first_route_is_not_delayed() -> None:
    world = World(rollout=GATEWAY)
    world.has_change_times = True
    world.settle_until("Starting")
    assert shares(world) == {"stable": 100}
    assert ("Service", "chat-stable") in world.objects


@pytest.mark.parametrize(
    ("ahead", "waited"),
    [
        (4 * SECOND, ENDPOINT_PROPAGATION_DELAY + 4 * SECOND),
        (MAX_SERVER_CLOCK_LEAD, ENDPOINT_PROPAGATION_DELAY + MAX_SERVER_CLOCK_LEAD),
        (MAX_SERVER_CLOCK_LEAD + SECOND, timedelta(0)),  # such a time is ignored
        (-4 * SECOND, ENDPOINT_PROPAGATION_DELAY - 4 * SECOND),
        (-timedelta(hours=1), timedelta(0)),
    ],
)
def test_api_server_clock_may_differ(ahead: timedelta, waited: timedelta) -> None:
    world, _, new = manually_promoted(**REUSE)
    run_until(world, lambda: world.status["stable"]["revision"] == new, places=4)
    began = world.now
    service = world.objects["Service", "chat-stable"]["metadata"]
    service["managedFields"][0]["time"] = (began + ahead).isoformat()
    while True:
        plan = world.step()
        if shares(world) == {"stable": 100}:
            break
        assert plan.requeue_after is not None
        assert timedelta(0) < plan.requeue_after <= ENDPOINT_PROPAGATION_DELAY
        world.now += plan.requeue_after
    assert world.now - began == waited


def test_pause_changes_no_selector() -> None:
    world, _, new = manually_promoted(**REUSE)
    run_until(world, lambda: world.status["stable"]["revision"] == new, places=4)
    world.edit(rollout={**REUSE, "paused": True})
    world.now += ENDPOINT_PROPAGATION_DELAY
    plan = world.step()
    assert (plan.objects_to_apply, plan.objects_to_delete, plan.requeue_after) == ((), (), None)
    assert shares(world) == {"stable": 0, "canary": 100}
    world.edit(rollout=REUSE)
    run_until(world, lambda: shares(world) == {"stable": 100})


def test_foreign_arm_service_blocks_the_route() -> None:
    world = serving_world(replicas=4, rollout=GATEWAY)
    world.has_change_times = True
    world.name_conflicts = [{"kind": "Service", "metadata": {"name": "chat-canary", "uid": "s"}}]
    world.drafter("eagle31")
    for _ in range(4):
        world.step()
        world.check()
        world.schedule()
        world.ready()
        world.now += ENDPOINT_PROPAGATION_DELAY
    assert world.status["canary"]["phase"] == "WarmingUp"
    assert shares(world) == {"stable": 100}
    assert world.condition("Degraded") == ("True", "NameTaken")


@pytest.mark.parametrize("kind", ["HTTPRoute", "Service"])
def test_unlisted_services_keep_their_selectors(kind: str) -> None:
    """Right after a rollback the stable Service still selects the promoted pods."""
    world, _, new = monitored()
    world.annotate(rollback=new)
    world.step()
    snapshot = world.observed()
    hidden = replace_facts(
        snapshot,
        children=tuple(item for item in snapshot.cluster.children if item["kind"] != kind),
        unlisted_kinds={kind: f"{kind}s cannot be listed"},
    )
    plan = build_reconcile_plan(hidden, IMAGE, world.now + ENDPOINT_PROPAGATION_DELAY)
    assert not [item for item in plan.objects_to_apply if item["kind"] in ("HTTPRoute", "Service")]
    assert plan.objects_to_delete == ()


def test_next_canary_waits_for_service_in_use() -> None:
    world, _, new = manually_promoted(**REUSE)
    run_until(world, lambda: world.status["stable"]["revision"] == new, places=4)
    world.drafter("eagle3")
    for _ in range(2):
        world.step()
        world.check()
    assert world.status["canary"]["phase"] == "Starting"
    assert (service_revision(world, "canary"), world.route_weights()["chat-canary"]) == (new, TOTAL_WEIGHT)
    run_until(world, lambda: service_revision(world, "canary") != new)
    assert shares(world) == {"stable": 100, "canary": 0, "control": 0}


def test_service_to_delete_serves_until_the_other_is_established() -> None:
    """The promoted pod crashes while it is compared with a retained one, and the promotion is rolled back."""
    world, _ = monitored_world(replicas=1, rollout=GATEWAY)
    world.measure_alone(4, 2.4)
    world.now += MINUTE
    world.has_change_times = True
    run_until(world, lambda: shares(world) == {"stable": 50, "previous": 50})
    del world.objects["Service", "chat-previous"]  # it is recreated, and may not have requests immediately
    world.step()
    assert shares(world) == {"stable": 50, "previous": 0}
    world.crash(world.status["stable"]["revision"], 4)
    world.now += timedelta(minutes=31)
    world.step()
    assert world.status["phase"] == "RollingBack"
    assert not world.unserved_services()
    assert shares(world) == {"stable": 0, "canary": 0, "previous": 100}
    run_until(world, lambda: ("Service", "chat-previous") not in world.objects)
    assert shares(world)["stable"] == 100
