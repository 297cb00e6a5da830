"""Gateways that reject the route: the status names it, and blocks of the canary do not count."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aerie.rollout.facts.route_status import ROUTE_STATUS_TIMEOUT, route_rejection_message
from tests.golden import Messages
from tests.unit.rollout.world import World, masked, serving_world, world_in_phase

PARENT = {"name": "public", "namespace": "gateways", "sectionName": "https"}
GATEWAY: dict[str, Any] = {"traffic": {"mode": "Gateway", "gateway": {"parentRefs": [PARENT]}}}


def set_route_status(world: World, *statuses: tuple[dict[str, Any], str]) -> None:
    """Write the gateways' part of the route's status: for each parent, whether the route is accepted."""
    parents = [
        {
            "parentRef": parent,
            "conditions": [
                {"type": "Accepted", "status": status, "reason": "NoMatchingParent", "message": "no such listener"},
                {"type": "ResolvedRefs", "status": "True"},
            ],
        }
        for parent, status in statuses
    ]
    world.objects["HTTPRoute", "chat"]["status"] = {"parents": parents}


@pytest.mark.parametrize(
    ("statuses", "is_rejected"),
    [
        ([], False),
        ([(PARENT, "True")], False),
        ([(PARENT, "Unknown")], False),
        ([(PARENT, "False")], True),
        ([(PARENT | {"group": "gateway.networking.k8s.io", "kind": "Gateway"}, "False")], True),
        ([(PARENT, "False"), (PARENT, "True")], False),  # two controllers, one of which serves it
        ([({"name": "former", "namespace": "gateways"}, "False")], False),  # a parent of the previous spec
    ],
)
def test_route_is_rejected_if_all_gateways_with_status_reject(statuses: list[Any], is_rejected: bool, messages: Messages) -> None:
    world = serving_world(rollout=GATEWAY)
    set_route_status(world, *statuses)
    rejection = route_rejection_message(world.observed())
    assert bool(rejection) == is_rejected
    if is_rejected:
        messages.check("rejected route", rejection)
    world.step()
    assert world.condition("Degraded") == (("True", "RouteNotAccepted") if is_rejected else ("False", "AsExpected"))
    assert world.condition("Ready") == ("True", "AllPodsReady")


def test_silent_gateway_is_reported_after_a_delay(messages: Messages) -> None:
    world = serving_world(rollout=GATEWAY)
    route = world.objects["HTTPRoute", "chat"]
    route["metadata"]["creationTimestamp"] = world.now.isoformat()
    plan = world.step()
    assert (world.condition("Degraded"), plan.requeue_after) == (("False", "AsExpected"), ROUTE_STATUS_TIMEOUT)
    world.now += ROUTE_STATUS_TIMEOUT
    plan = world.step()
    assert world.condition("Degraded") == ("True", "GatewayNotResponding")
    messages.check("no status from the gateway", world.message("Degraded"))
    assert (plan.requeue_after, [event.reason for event in plan.events]) == (None, ["GatewayNotResponding"])
    assert world.step().status.to_dict() == world.status
    set_route_status(world, (PARENT, "Unknown"))
    world.step()
    assert world.condition("Degraded") == ("False", "AsExpected")


def test_no_route_has_no_error() -> None:
    assert route_rejection_message(serving_world().observed()) == ""


def test_canary_waits_for_route_until_deadline(messages: Messages) -> None:
    world, _ = world_in_phase("Starting", rollout=GATEWAY)
    set_route_status(world, (PARENT, "False"))
    world.schedule()
    world.ready()
    world.step()
    assert world.status["phase"] == "Starting"
    messages.check("canary without a route", masked(world.message("Progressing"), NEW=world.desired_revision))
    world.now += timedelta(minutes=30)
    world.step()
    assert world.status["rolloutHistory"][0]["result"] == "Failed"
    messages.check("no route within the deadline", world.status["rolloutHistory"][0]["message"])


def test_canary_continues_when_route_is_accepted() -> None:
    world, _ = world_in_phase("Starting", rollout=GATEWAY)
    set_route_status(world, (PARENT, "False"))
    world.schedule()
    world.ready()
    world.step()
    set_route_status(world, (PARENT, "True"))
    world.step()
    assert world.status["phase"] == "WarmingUp"


def test_blocks_during_rejected_route_are_not_counted() -> None:
    world, _ = world_in_phase("WarmingUp", rollout=GATEWAY)
    world.now += timedelta(minutes=5)
    world.step()
    set_route_status(world, (PARENT, "False"))
    world.measure(40, +0.2)
    assert world.status["phase"] == "Analyzing"
    assert not world.status["analysis"].get("comparisons")
    set_route_status(world, (PARENT, "True"))
    world.step()
    assert not world.status["analysis"].get("comparisons"), "nor afterwards"
    world.measure(1, +0.2)
    assert world.status["analysis"]["comparisons"][0]["sampleCount"] == 1


def test_rejected_route_does_not_hold_ramp_step() -> None:
    world, _ = world_in_phase("Ramping", rollout=GATEWAY)
    step = world.status["canary"]["stepIndex"]
    for _ in range(3):
        world.schedule()
        world.ready()
        set_route_status(world, (PARENT, "False"))
        world.now += timedelta(minutes=5)
        world.step()
    assert (world.status["phase"], world.status["canary"]["stepIndex"]) == ("Ramping", step)
