"""Requests go to a Service when the gateway has had the time to learn what is behind it, in whatever way a rollout goes."""

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
from tests.unit.rollout.world import IMAGE, World, canarying, monitoring, serving

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
REUSE = {**GATEWAY, "canary": {"capacity": "Reuse", "stepWeights": []}}
SURGE = {**GATEWAY, "canary": {"stepWeights": [], "scaleDownDelay": "10m"}}


def shares(world: World) -> dict[str, int]:
    """Shares by arm, in percent."""
    return {name.removeprefix("chat-"): 100 * weight // TOTAL_WEIGHT for name, weight in world.route_weights().items()}


def leads(world: World, arm: str) -> str:
    """The revision that the arm's Service leads to."""
    return str(world.objects["Service", f"chat-{arm}"]["spec"]["selector"][naming.REVISION_LABEL])


def lives(world: World, until: Callable[[], bool], places: int = 1000, heaviest: float = 100) -> list[dict[str, int]]:
    """The shares of one look after another, a second apart, until something is so; in none of them are requests lost."""
    seen: list[dict[str, int]] = []
    for _ in range(200):
        world.step()
        assert not world.unserved_services(), (shares(world), world.now)
        assert world.heaviest() <= heaviest, (shares(world), world.now)
        if not seen or seen[-1] != shares(world):
            seen.append(shares(world))
        if until():
            return seen
        world.schedule(places)
        world.ready()
        assert not world.unserved_services(), (shares(world), world.now)
        world.now += SECOND
    raise AssertionError(f"it never comes to that: {shares(world)}, {world.message('Progressing')}")


def promoting(**rollout: Any) -> tuple[World, str, str]:
    """A canary that a person has promoted, while it is compared: its world, the stable revision and its own."""
    world, old = canarying("Analyzing", replicas=4, rollout=rollout)
    world.has_change_times = True
    new = world.status["canary"]["revision"]
    world.annotate(promote=new)
    return world, old, new


def test_in_place_of_stable_pods_the_canarys_service_serves_until_the_stable_one_leads_to_its_pods() -> None:
    world, _, new = promoting(**REUSE)
    lives(world, lambda: world.status["stable"]["revision"] == new, places=4)
    promoted = world.now
    assert (leads(world, "stable"), leads(world, "canary"), shares(world)) == (new, new, {"stable": 0, "canary": 100})
    assert world.plan().requeue_after == ENDPOINT_PROPAGATION_DELAY
    world.now += ENDPOINT_PROPAGATION_DELAY - SECOND
    assert world.step().requeue_after == SECOND
    assert shares(world) == {"stable": 0, "canary": 100}
    lives(world, lambda: shares(world) == {"stable": 100})
    assert world.now == promoted + ENDPOINT_PROPAGATION_DELAY
    assert ("Service", "chat-canary") in world.objects, "proxies may still send to it"
    lives(world, lambda: ("Service", "chat-canary") not in world.objects)


def test_beside_stable_pods_the_few_that_are_left_never_get_all_requests() -> None:
    world, old = canarying("Analyzing", replicas=12, rollout=SURGE)
    world.has_change_times = True
    new = world.status["canary"]["revision"]
    world.annotate(promote=new)
    lives(world, lambda: world.status["stable"]["revision"] == new, heaviest=2)
    lives(world, lambda: shares(world) == {"stable": 100}, heaviest=2)
    assert world.replicas()[f"chat-{new}"] == 12
    lives(world, lambda: world.replicas()[f"chat-{old}"] == 2, heaviest=2)


def test_arms_of_a_canary_are_made_before_they_have_requests() -> None:
    world = serving(replicas=4, rollout=GATEWAY)
    world.has_change_times = True
    world.drafter("eagle31")
    for _ in range(3):
        world.step()
        world.check()
    assert shares(world) == {"stable": 100, "canary": 0, "control": 0}
    made = world.now
    seen = lives(world, lambda: shares(world)["canary"] > 0)
    assert (world.status["phase"], world.now - made) == ("WarmingUp", ENDPOINT_PROPAGATION_DELAY)
    assert [one["stable"] for one in seen] == [100, 66]


def taken_back(**more: Any) -> tuple[World, str, str]:
    """A promotion of twelve pods that a person takes back, with the two pods that were kept."""
    world, old = monitoring(replicas=12, rollout=GATEWAY, **more)
    world.settle()
    world.now += MINUTE
    world.has_change_times = True
    return world, old, world.desired_revision


def test_a_promotion_that_is_taken_back_leads_requests_to_the_few_old_pods_when_the_others_have_theirs() -> None:
    world, old, new = taken_back()
    began = world.now
    world.annotate(rollback=new)
    world.step()
    assert world.status["stable"]["revision"] == old
    assert (leads(world, "stable"), leads(world, "canary"), shares(world)) == (new, new, {"stable": 100})
    seen = lives(world, lambda: leads(world, "stable") == old, heaviest=1.2)
    assert seen == [{"stable": 100}, {"stable": 0, "canary": 100}]
    assert began + ENDPOINT_PROPAGATION_DELAY < world.now < began + 2 * ENDPOINT_PROPAGATION_DELAY, (
        "and when the gateway has seen that nothing goes to it"
    )
    lives(world, lambda: world.route_weights()["chat-stable"] > 0, heaviest=1.2)
    lives(world, lambda: world.replicas() == {f"chat-{old}": 12}, heaviest=2)
    assert (shares(world), world.status["phase"]) == ({"stable": 100}, "RolledBack")


def test_promoted_pods_that_do_not_serve_are_left_at_once() -> None:
    world, old, new = taken_back()
    world.ready(new, "False")
    world.annotate(rollback=new)
    world.step()
    assert (leads(world, "stable"), shares(world)) == (old, {"stable": 100, "canary": 0})


def test_old_pods_that_get_requests_again_get_them_through_a_service_that_is_known() -> None:
    world, _, _ = taken_back()
    world.measure_alone(4, 2.4)
    assert world.status["phase"] == "Verifying"
    assert shares(world) == {"stable": 100}
    world.now += ENDPOINT_PROPAGATION_DELAY
    world.step()
    assert shares(world) == {"stable": 85, "previous": 14}
    world.annotate(rollback=world.desired_revision)
    seen = lives(world, lambda: world.status["phase"] == "RolledBack", heaviest=2)
    assert seen[1] == {"stable": 0, "canary": 100}, "not to two pods, although their Service is known"
    assert seen[-1] == {"stable": 100}


def test_a_service_that_was_led_astray_is_put_right_at_once_and_others_serve_meanwhile() -> None:
    world, _ = canarying("Analyzing", replicas=4, rollout=GATEWAY)
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


def test_where_there_is_nothing_else_requests_go_where_they_are_to_go() -> None:
    world = serving(rollout=GATEWAY)
    world.has_change_times = True
    del world.objects["Service", "chat-stable"]
    assert [item["kind"] for item in world.step().objects_to_apply] == ["Service"]
    del world.objects["HTTPRoute", "chat"]
    world.step()
    assert shares(world) == {"stable": 100}


def test_an_arm_that_is_to_have_none_stands_in_for_a_service_that_is_gone() -> None:
    world, _ = canarying("Starting", replicas=4, rollout=GATEWAY)
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


def test_a_first_route_waits_for_nothing() -> None:
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
        (MAX_SERVER_CLOCK_LEAD + SECOND, timedelta(0)),  # that dates nothing
        (-4 * SECOND, ENDPOINT_PROPAGATION_DELAY - 4 * SECOND),
        (-timedelta(hours=1), timedelta(0)),
    ],
)
def test_the_servers_clock_may_be_another_one(ahead: timedelta, waited: timedelta) -> None:
    world, _, new = promoting(**REUSE)
    lives(world, lambda: world.status["stable"]["revision"] == new, places=4)
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


def test_paused_nothing_is_led_anywhere_and_then_it_goes_on() -> None:
    world, _, new = promoting(**REUSE)
    lives(world, lambda: world.status["stable"]["revision"] == new, places=4)
    world.edit(rollout={**REUSE, "paused": True})
    world.now += ENDPOINT_PROPAGATION_DELAY
    plan = world.step()
    assert (plan.objects_to_apply, plan.objects_to_delete, plan.requeue_after) == ((), (), None)
    assert shares(world) == {"stable": 0, "canary": 100}
    world.edit(rollout=REUSE)
    lives(world, lambda: shares(world) == {"stable": 100})


def test_where_somebody_else_has_an_arms_service_no_route_is_applied() -> None:
    world = serving(replicas=4, rollout=GATEWAY)
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
def test_what_cannot_be_listed_is_not_led_elsewhere(kind: str) -> None:
    """Taken back a moment ago: the stable Service still leads to the promoted pods."""
    world, _, new = taken_back()
    world.annotate(rollback=new)
    world.step()
    seen = world.observed()
    hidden = replace_facts(
        seen,
        children=tuple(one for one in seen.cluster.children if one["kind"] != kind),
        unlisted_kinds={kind: f"{kind}s cannot be listed"},
    )
    plan = build_reconcile_plan(hidden, IMAGE, world.now + ENDPOINT_PROPAGATION_DELAY)
    assert not [item for item in plan.objects_to_apply if item["kind"] in ("HTTPRoute", "Service")]
    assert plan.objects_to_delete == ()


def test_a_canary_that_follows_a_promotion_at_once_waits_for_the_service_that_still_serves() -> None:
    world, _, new = promoting(**REUSE)
    lives(world, lambda: world.status["stable"]["revision"] == new, places=4)
    world.drafter("eagle3")
    for _ in range(2):
        world.step()
        world.check()
    assert world.status["canary"]["phase"] == "Starting"
    assert (leads(world, "canary"), world.route_weights()["chat-canary"]) == (new, TOTAL_WEIGHT)
    lives(world, lambda: leads(world, "canary") != new)
    assert shares(world) == {"stable": 100, "canary": 0, "control": 0}


def test_a_service_that_is_about_to_go_serves_until_the_one_that_was_led_back_is_known() -> None:
    """The promoted pod crashes while it is compared with one of before, and what was promoted is taken back."""
    world, _ = monitoring(replicas=1, rollout=GATEWAY)
    world.measure_alone(4, 2.4)
    world.now += MINUTE
    world.has_change_times = True
    lives(world, lambda: shares(world) == {"stable": 50, "previous": 50})
    del world.objects["Service", "chat-previous"]  # it is made anew, and may have no requests at once
    world.step()
    assert shares(world) == {"stable": 50, "previous": 0}
    world.crash(world.status["stable"]["revision"], 4)
    world.now += timedelta(minutes=31)
    world.step()
    assert world.status["phase"] == "RollingBack"
    assert not world.unserved_services()
    assert shares(world) == {"stable": 0, "canary": 0, "previous": 100}
    lives(world, lambda: ("Service", "chat-previous") not in world.objects)
    assert shares(world)["stable"] == 100
