"""A gateway that refuses the route: the status says so, and nothing about the canary is decided by what the pods count."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aerie.rollout.facts.route_status import ROUTE_STATUS_TIMEOUT, route_rejection_message
from tests.unit.rollout.world import World, canarying, serving

PARENT = {"name": "public", "namespace": "gateways", "sectionName": "https"}
GATEWAY: dict[str, Any] = {"traffic": {"mode": "Gateway", "gateway": {"parentRefs": [PARENT]}}}
REFUSED = "Gateway gateways/public, listener https does not accept HTTPRoute chat (NoMatchingParent: no such listener)."


def says(world: World, *told: tuple[dict[str, Any], str]) -> None:
    """The gateways write into the route's status: parent, and whether it is accepted."""
    parents = [
        {
            "parentRef": parent,
            "conditions": [
                {"type": "Accepted", "status": status, "reason": "NoMatchingParent", "message": "no such listener"},
                {"type": "ResolvedRefs", "status": "True"},
            ],
        }
        for parent, status in told
    ]
    world.objects["HTTPRoute", "chat"]["status"] = {"parents": parents}


@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ([], ""),
        ([(PARENT, "True")], ""),
        ([(PARENT, "Unknown")], ""),
        ([(PARENT, "False")], REFUSED),
        ([(PARENT | {"group": "gateway.networking.k8s.io", "kind": "Gateway"}, "False")], REFUSED),
        ([(PARENT, "False"), (PARENT, "True")], ""),  # two controllers, one of which serves it
        ([({"name": "former", "namespace": "gateways"}, "False")], ""),  # what the spec named before
    ],
)
def test_refused_is_what_every_gateway_that_has_spoken_refuses(told: list[Any], refused: str) -> None:
    world = serving(rollout=GATEWAY)
    says(world, *told)
    assert route_rejection_message(world.observed()) == refused
    world.step()
    assert world.condition("Degraded") == (("True", "RouteNotAccepted") if refused else ("False", "AsExpected"))
    assert world.condition("Ready") == ("True", "AllPodsReady")


def test_a_gateway_that_says_nothing_is_told_after_a_while() -> None:
    world = serving(rollout=GATEWAY)
    route = world.objects["HTTPRoute", "chat"]
    route["metadata"]["creationTimestamp"] = world.now.isoformat()
    plan = world.step()
    assert (world.condition("Degraded"), plan.requeue_after) == (("False", "AsExpected"), ROUTE_STATUS_TIMEOUT)
    world.now += ROUTE_STATUS_TIMEOUT
    plan = world.step()
    assert world.condition("Degraded") == ("True", "GatewayNotResponding")
    assert "Gateway gateways/public (spec.rollout.traffic.gateway.parentRefs)" in world.message("Degraded")
    assert (plan.requeue_after, [event.reason for event in plan.events]) == (None, ["GatewayNotResponding"])
    assert world.step().status.to_dict() == world.status
    says(world, (PARENT, "Unknown"))
    world.step()
    assert world.condition("Degraded") == ("False", "AsExpected")


def test_without_a_route_there_is_nothing_to_refuse() -> None:
    assert route_rejection_message(serving().observed()) == ""


def test_a_canary_waits_for_the_route_and_fails_at_its_deadline() -> None:
    world, _ = canarying("Starting", rollout=GATEWAY)
    says(world, (PARENT, "False"))
    world.schedule()
    world.ready()
    world.step()
    assert world.status["phase"] == "Starting"
    assert world.message("Progressing").endswith(f"Nothing is decided: {REFUSED}")
    world.now += timedelta(minutes=30)
    world.step()
    assert world.status["rolloutHistory"][0]["result"] == "Failed"
    assert world.status["rolloutHistory"][0]["message"] == f"{REFUSED} So it was for spec.rollout.progressDeadline (30m)."


def test_a_canary_goes_on_once_the_route_is_accepted() -> None:
    world, _ = canarying("Starting", rollout=GATEWAY)
    says(world, (PARENT, "False"))
    world.schedule()
    world.ready()
    world.step()
    says(world, (PARENT, "True"))
    world.step()
    assert world.status["phase"] == "WarmingUp"


def test_blocks_of_the_meantime_count_for_nothing() -> None:
    world, _ = canarying("WarmingUp", rollout=GATEWAY)
    world.now += timedelta(minutes=5)
    world.step()
    says(world, (PARENT, "False"))
    world.measure(40, +0.2)
    assert world.status["phase"] == "Analyzing"
    assert not world.status["analysis"].get("comparisons")
    says(world, (PARENT, "True"))
    world.step()
    assert not world.status["analysis"].get("comparisons"), "nor afterwards"
    world.measure(1, +0.2)
    assert world.status["analysis"]["comparisons"][0]["sampleCount"] == 1


def test_a_step_of_the_ramp_is_not_held_where_the_route_is_refused() -> None:
    world, _ = canarying("Ramping", rollout=GATEWAY)
    step = world.status["canary"]["stepIndex"]
    for _ in range(3):
        world.schedule()
        world.ready()
        says(world, (PARENT, "False"))
        world.now += timedelta(minutes=5)
        world.step()
    assert (world.status["phase"], world.status["canary"]["stepIndex"]) == ("Ramping", step)
