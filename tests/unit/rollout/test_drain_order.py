"""Drain order: pods and Services of an arm are deleted when the gateway has observed its zero weight, not before."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from aerie.rollout.capacity.drain_order import MIN_ROUTE_PROPAGATION, ROUTE_PROPAGATION_TIMEOUT
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from tests.unit.rollout.test_route_status import GATEWAY, PARENT
from tests.unit.rollout.world import World, world_in_phase

MOMENT = timedelta(milliseconds=100)


def weights(world: World) -> dict[str, int]:
    rule = world.objects["HTTPRoute", "chat"]["spec"]["rules"][0]
    return {backend["name"]: backend["weight"] for backend in rule["backendRefs"]}


def observe_generation(world: World, generation: int) -> None:
    """Set the gateway's observed generation of the route."""
    condition: dict[str, Any] = {"type": "Accepted", "status": "True", "observedGeneration": generation}
    world.objects["HTTPRoute", "chat"]["status"] = {"parents": [{"parentRef": PARENT, "conditions": [condition]}]}


def rolled_back_canary() -> tuple[World, str, int]:
    """Return a canary whose rollback was just sent to the gateway: its world, its Deployment and the route's generation."""
    world, old = world_in_phase("Analyzing", rollout=GATEWAY)
    world.has_change_times = True
    canary_deployment = next(name for name in world.replicas() if old not in name)
    world.annotate(rollback=world.status["canary"]["revision"])
    world.step()
    assert weights(world)["chat-canary"] == 0
    for _ in range(3):
        world.step()
    assert weights(world) == {"chat-stable": TOTAL_WEIGHT}
    generation = world.objects["HTTPRoute", "chat"]["metadata"]["generation"]
    return world, canary_deployment, generation


def test_canary_keeps_pods_until_gateway_observed_zero_weight() -> None:
    world, canary_deployment, generation = rolled_back_canary()
    observe_generation(world, generation - 1)
    for remaining in (MIN_ROUTE_PROPAGATION, MOMENT):
        world.now += MIN_ROUTE_PROPAGATION - remaining
        assert world.step().requeue_after == remaining
        assert world.replicas()[canary_deployment] == 1
        assert ("Service", "chat-canary") in world.objects
    world.now += MOMENT
    assert world.step().requeue_after == timedelta(seconds=1)
    assert world.replicas()[canary_deployment] == 1
    observe_generation(world, generation)
    for _ in range(3):
        world.step()
    assert canary_deployment not in world.replicas()
    assert ("Service", "chat-canary") not in world.objects


def test_wait_for_stale_gateway_status_is_bounded() -> None:
    world, canary_deployment, generation = rolled_back_canary()
    observe_generation(world, generation - 1)
    world.now += ROUTE_PROPAGATION_TIMEOUT - MOMENT
    world.step()
    assert world.replicas()[canary_deployment] == 1
    world.now += MOMENT
    for _ in range(3):
        world.step()
    assert canary_deployment not in world.replicas()


def test_gateway_without_status_gets_minimum_delay() -> None:
    world, canary_deployment, _ = rolled_back_canary()
    del world.objects["HTTPRoute", "chat"]["metadata"]["generation"]
    world.now += MIN_ROUTE_PROPAGATION
    for _ in range(3):
        world.step()
    assert canary_deployment not in world.replicas()


def test_scale_up_is_not_delayed() -> None:
    world, _ = world_in_phase("Analyzing", rollout=GATEWAY)
    world.has_change_times = True
    world.edit(replicas=5)
    world.step()
    assert 5 in world.replicas().values()


def test_api_server_clock_may_be_ahead() -> None:
    world, canary_deployment, _ = rolled_back_canary()
    route = world.objects["HTTPRoute", "chat"]["metadata"]
    route["managedFields"][0]["time"] = (world.now + timedelta(seconds=9)).isoformat()
    assert world.step().requeue_after == MIN_ROUTE_PROPAGATION
    world.now += timedelta(seconds=9) + MIN_ROUTE_PROPAGATION
    for _ in range(3):
        world.step()
    assert canary_deployment not in world.replicas()


REUSE = {"capacity": "Reuse", "control": "Stable", "stepWeights": []}


def test_last_stable_pod_is_deleted_after_zero_weight_is_observed() -> None:
    """Two GPUs for two pods: the stable pod has to be deleted before the canary's second one can start."""
    world, old = world_in_phase("Analyzing", replicas=2, rollout={**GATEWAY, "canary": REUSE})
    world.has_change_times = True
    stable = f"chat-{old}"
    world.annotate(promote=world.status["canary"]["revision"])
    world.step()
    assert (weights(world), world.replicas()[stable]) == ({"chat-stable": 0, "chat-canary": TOTAL_WEIGHT}, 1)
    observe_generation(world, world.objects["HTTPRoute", "chat"]["metadata"]["generation"])
    world.now += MIN_ROUTE_PROPAGATION
    world.step()
    assert world.replicas()[stable] == 0


def test_rolled_back_canary_keeps_pods_until_zero_weight() -> None:
    world, old = world_in_phase("Analyzing", replicas=2, rollout={**GATEWAY, "canary": REUSE})
    canary_deployment = next(name for name in world.replicas() if old not in name)
    world.annotate(promote=world.status["canary"]["revision"])
    world.step()
    world.has_change_times = True
    world.annotate(rollback=world.status["canary"]["revision"])
    for _ in range(8):
        world.step()
        world.schedule(2)
        world.ready()
        weight = weights(world).get("chat-canary", 0)
        assert weight == 0 or world.replicas()[canary_deployment] > 0
        world.now += timedelta(seconds=5)
    assert canary_deployment not in world.replicas()


def test_silent_gateway_is_polled_with_backoff() -> None:
    world, _, generation = rolled_back_canary()
    observe_generation(world, generation - 1)
    start, reconcile_count = world.now, 0
    while world.now < start + ROUTE_PROPAGATION_TIMEOUT:
        requeue_after = world.step().requeue_after
        assert requeue_after is not None
        assert requeue_after > timedelta(0)
        world.now += requeue_after
        reconcile_count += 1
    assert reconcile_count < 12
