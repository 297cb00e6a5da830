"""Scenarios of rollouts: each plays the user of one resource, and what the world does to it. See test_rollout_faults.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.lab.operator.resources import BUSY, BUSY_GONE, FROZEN, GONE, IDLE, LONG, SHORT, accepted, resource
from tests.lab.operator.stage import Case

Object = dict[str, Any]
Scenario = Callable[[Case], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(play: Scenario) -> Scenario:
    SCENARIOS[play.__name__.replace("_", "-")] = play
    return play


# ------------------------------------------------------------------------------------------- pods that run nothing, and a person
@scenario
async def turned_down_before_it_serves(case: Case) -> None:
    await case.first(resource(case.name))
    await case.apply(resource(case.name, "eagle31", gated=True))
    await case.say(rollback=await case.phase("Starting"))
    await case.ended("RolledBack", drafter="eagle3", words="manually")


@scenario
async def canary_crash_loops(case: Case) -> None:
    await case.first(resource(case.name))
    await case.apply(resource(case.name, "eagle31", engine="aerie.dev/test/crashes"))
    await case.ended("RolledBack", drafter="eagle3", words="are in a crash loop")


@scenario
async def drafter_never_loads(case: Case) -> None:
    await case.first(resource(case.name))
    await case.apply(resource(case.name, "eagle31", engine="aerie.dev/test/hangs", progressDeadline="1m"))
    await case.ended("Failed", drafter="eagle3", words="have not been ready for spec.rollout.progressDeadline (1m)")


@scenario
async def turned_down_in_warm_up_and_tried_again(case: Case) -> None:
    await case.first(resource(case.name, analysis=LONG))
    await case.apply(resource(case.name, "eagle31", analysis=LONG))
    revision = await case.phase("WarmingUp")
    await case.say(rollback=revision)
    await case.ended("RolledBack", drafter="eagle3", words="manually")
    await case.say(rollback=None, retry="1")
    assert await case.phase("WarmingUp") == revision
    await case.say(promote=revision)
    await case.ended("Promoted", drafter="eagle31")


@scenario
async def turned_down_in_analysis(case: Case) -> None:
    await case.first(resource(case.name))
    await case.apply(resource(case.name, "eagle31"))
    await case.say(rollback=await case.phase("Analyzing"))
    await case.ended("RolledBack", drafter="eagle3", words="manually")


@scenario
async def promoted_by_a_person_through_a_ramp(case: Case) -> None:
    ramp = {"stepWeights": [25, 50], "stepDuration": "1s"}
    await case.first(resource(case.name, replicas=4, canary=ramp))
    await case.apply(resource(case.name, "eagle31", replicas=4, canary=ramp))
    await case.say(promote=await case.phase("Analyzing"))
    await case.ended("Promoted", drafter="eagle31", words="manually")


@scenario
async def held_and_turned_down(case: Case) -> None:
    await case.first(resource(case.name, analysis=SHORT))
    await case.apply(resource(case.name, "eagle31", analysis=SHORT))
    await case.say(rollback=await case.phase("Held"))
    await case.ended("RolledBack", drafter="eagle3", words="manually")


@scenario
async def held_and_promoted_by_a_person(case: Case) -> None:
    await case.first(resource(case.name, analysis=SHORT))
    await case.apply(resource(case.name, "eagle31", analysis=SHORT))
    await case.say(promote=await case.phase("Held"))
    await case.ended("Promoted", drafter="eagle31", words="manually")


@scenario
async def node_lost_in_mid_analysis(case: Case) -> None:
    await case.first(resource(case.name))
    await case.apply(resource(case.name, "eagle31", node="node-2", progressDeadline="1m"))
    await case.phase("Analyzing")
    case.faults.append(await asyncio.to_thread(case.stage.faults.silence_node, "node-2"))
    await case.until(lambda status: status["phase"] != "Analyzing", "the canary is given up")
    assert "None of its pods has been ready since" in case.last["message"]
    await asyncio.to_thread(case.faults.pop().undo)  # what was on the node can go when it is back
    await case.ended("RolledBack", drafter="eagle3")


@scenario
async def turned_down_in_the_ramp(case: Case) -> None:
    hold = {"stepWeights": [50], "stepDuration": "1h"}
    await case.first(resource(case.name, replicas=2, canary=hold))
    await case.apply(accepted(resource(case.name, "eagle31", replicas=2, canary=hold)))
    revision = await case.phase("Ramping")
    await case.until(lambda _: case.canary.get("readyReplicas") == 2, "it has grown for its share")
    await case.say(rollback=revision)
    await case.ended("RolledBack", drafter="eagle3", words="manually")


@scenario
async def pods_of_the_ramp_wait_for_room(case: Case) -> None:
    ramp = {"stepWeights": [50], "stepDuration": "0s"}
    await case.first(resource(case.name, replicas=2, canary=ramp))
    await case.apply(accepted(resource(case.name, "eagle31", replicas=2, gated=True, canary=ramp, progressDeadline="1m")))
    await case.open(await case.phase("Starting"))
    await case.phase("Ramping")
    await asyncio.sleep(75)  # longer than progressDeadline: a pod that no node takes says nothing of its revision
    opening = asyncio.create_task(case.open_all(await case.phase("Ramping")))
    try:
        await case.ended("Promoted", drafter="eagle31")
    finally:
        opening.cancel()


@scenario
async def turned_down_in_the_promotion(case: Case) -> None:
    await case.first(resource(case.name, replicas=2))
    await case.apply(accepted(resource(case.name, "eagle31", replicas=2, gated=True)))
    await case.open(await case.phase("Starting"))
    await case.say(rollback=await case.phase("Promoting"))
    await case.ended("RolledBack", drafter="eagle3", words="manually")


@scenario
async def pods_of_the_promotion_wait_for_room(case: Case) -> None:
    await case.first(resource(case.name, replicas=2))
    await case.apply(accepted(resource(case.name, "eagle31", replicas=2, gated=True, progressDeadline="1m")))
    await case.open(await case.phase("Starting"))
    await case.phase("Promoting")
    await asyncio.sleep(75)
    opening = asyncio.create_task(case.open_all(await case.phase("Promoting")))
    try:
        await case.ended("Promoted", drafter="eagle31")
    finally:
        opening.cancel()


@scenario
async def two_changes_in_a_row(case: Case) -> None:
    await case.first(resource(case.name))
    await case.apply(resource(case.name, "eagle31"))
    await case.phase("WarmingUp", "Analyzing")
    await case.apply(accepted(resource(case.name, "better")))
    await case.apply(accepted(resource(case.name, "worse")))  # at once, with a word of a person
    await case.ended("Promoted", drafter="worse")
    results = [(one["result"], one["drafter"]) for one in case.status["rolloutHistory"]]
    assert results[0] == ("Promoted", "models.example/worse")
    assert ("Superseded", "models.example/eagle31") in results
    assert ("Promoted", "models.example/better") not in results


@scenario
async def reverted_in_the_ramp(case: Case) -> None:
    hold = {"stepWeights": [50], "stepDuration": "1h"}
    before = resource(case.name, replicas=2, canary=hold)
    await case.first(before)
    await case.apply(accepted(resource(case.name, "eagle31", replicas=2, canary=hold)))
    await case.phase("Ramping")
    await case.until(lambda _: case.canary.get("readyReplicas") == 2, "it has grown for its share")
    await case.apply(before)
    await case.ended("Superseded", drafter="eagle3", words="reverted to the stable revision")


@scenario
async def reuse_with_exactly_enough_gpus(case: Case) -> None:
    ramp = {"capacity": "Reuse", "stepWeights": [50], "stepDuration": "1s"}
    await case.first(resource(case.name, replicas=4, gpus=2, canary=ramp))  # all eight of the node
    await case.apply(accepted(resource(case.name, "eagle31", replicas=4, gpus=2, canary=ramp)))
    await case.ended("Promoted", drafter="eagle31")


@scenario
async def taken_back_after_the_promotion(case: Case) -> None:
    keep = {"scaleDownDelay": "1h"}
    await case.first(resource(case.name, replicas=2, canary=keep))
    await case.apply(accepted(resource(case.name, "eagle31", replicas=2, canary=keep)))
    await case.watched()
    await case.say(promote=None, rollback=case.status["stable"]["revision"])
    await case.ended("RolledBack", drafter="eagle3", words="Rolled back after promotion. Rollback requested manually.")


@scenario
async def kept_until_its_delay_is_over(case: Case) -> None:
    keep = {"scaleDownDelay": "2s"}
    await case.first(resource(case.name, replicas=2, canary=keep))
    await case.apply(accepted(resource(case.name, "eagle31", replicas=2, canary=keep)))
    await case.ended("Promoted", drafter="eagle31", words="manually")


@scenario
async def autoscaler_in_mid_rollout(case: Case) -> None:
    hold = {"stepWeights": [50], "stepDuration": "1h"}
    await case.first(resource(case.name, replicas=2, canary=hold))
    await case.apply(resource(case.name, "eagle31", replicas=2, canary=hold))
    revision = await case.phase("Analyzing")
    await case.scale(4)
    await case.until(lambda status: status["stable"]["readyReplicas"] == 4, "the stable arm has grown")
    await case.say(promote=revision)
    await case.phase("Ramping")
    await case.until(lambda _: case.canary.get("readyReplicas") == 3, "the canary has grown for its share of four")
    await case.scale(6)
    await case.until(lambda _: case.canary.get("readyReplicas") == 4, "and of six")
    await case.scale(3)
    await case.until(lambda _: case.canary.get("readyReplicas") == 3, "it has shrunk with the fleet")
    quick = {"stepWeights": [50], "stepDuration": "0s"}
    await case.apply(accepted(resource(case.name, "eagle31", replicas=3, canary=quick)))
    await case.ended("Promoted", drafter="eagle31")


@scenario
async def gateway_refuses_the_route(case: Case) -> None:
    def through(**listener: str) -> Object:
        parent = {"name": "lab", "namespace": "projectcontour", **listener}
        return {"mode": "Gateway", "gateway": {"parentRefs": [parent], "hostnames": ["refused.example"]}}

    def told(status: Object) -> bool:
        known = {one["type"]: one for one in status.get("conditions") or []}
        return bool(known.get("Degraded", {}).get("reason") == "RouteNotAccepted")

    nowhere, there = through(sectionName="nowhere"), through()
    await case.first(resource(case.name, traffic=nowhere))
    await case.until(told, "the refusal is told")
    await case.apply(resource(case.name, "eagle31", traffic=nowhere))
    revision = await case.phase("Starting")
    await case.until(
        lambda _: case.canary.get("readyReplicas") == (case.canary.get("control") or {}).get("readyReplicas") == 1,
        "both arms serve",
    )
    await case.scale(2)  # any change: its generation shows that there was a look since
    await case.until(lambda status: status["stable"]["readyReplicas"] == 2, "it is looked at")
    assert case.canary["phase"] == "Starting"
    await case.apply(resource(case.name, "eagle31", replicas=2, traffic=there))
    assert await case.phase("Analyzing") == revision
    await case.until(lambda status: not told(status), "no problem is left")
    await case.say(promote=revision)
    await case.ended("Promoted", drafter="eagle31")


# ---------------------------------------------------------------------------------------------------- engines that are measured
STABLE = {"control": "Stable"}


async def measured(case: Case, drafter: str, *, simulator: str = BUSY, first: str = BUSY, **spec: Any) -> None:
    """A change of drafter on engines that run, compared with the stable pods."""
    word = spec.pop("word", False)
    base = {"replicas": spec.get("replicas", 1), "canary": STABLE | spec.pop("canary", {})}
    await case.first(resource(case.name, simulator=first, **base))
    changed = resource(case.name, drafter, simulator=simulator, **spec | base)
    await case.apply(accepted(changed) if word else changed)


async def found_worse(case: Case) -> None:
    """Until it is rolled back, because it gets significantly fewer tokens per step."""
    await case.ended("RolledBack", drafter="eagle3", verdict="Rollback")
    compared = next(one for one in case.last["comparisons"] if one["metric"] == "TokensPerStep")
    assert compared["upper"] <= 0, case.last


@scenario
async def better_drafter(case: Case) -> None:
    ramp = {"control": "Fresh", "stepWeights": [50], "stepDuration": "1s"}
    await case.first(resource(case.name, replicas=2, simulator=BUSY, canary=ramp))
    await case.apply(resource(case.name, "better", replicas=2, simulator=BUSY, canary=ramp))
    await case.ended("Promoted", drafter="better", verdict="Promote")


@scenario
async def worse_drafter(case: Case) -> None:
    await measured(case, "worse")
    await found_worse(case)


@scenario
async def better_drafter_that_a_person_approves(case: Case) -> None:
    await measured(case, "better", canary={"approval": "Manual"})
    await case.say(promote=await case.phase("AwaitingApproval"))
    await case.ended("Promoted", drafter="better", verdict="Promote")


@scenario
async def better_drafter_that_a_person_turns_down(case: Case) -> None:
    await measured(case, "better", canary={"approval": "Manual"})
    await case.say(rollback=await case.phase("AwaitingApproval"))
    await case.ended("RolledBack", drafter="eagle3", words="manually")


@scenario
async def accepted_and_then_metrics_are_renamed(case: Case) -> None:
    await measured(case, "better", canary={"approval": "Manual"})
    await case.phase("AwaitingApproval")
    await case.corrupt_metrics("renamed")
    await case.ended("RolledBack", drafter="eagle3", words="are invalid")


@scenario
async def accepted_and_then_worse(case: Case) -> None:
    await measured(case, "better", canary={"approval": "Manual"})
    await case.phase("AwaitingApproval")
    await case.corrupt_metrics("worse-drafter")
    await found_worse(case)


@scenario
async def canary_takes_shorter_requests(case: Case) -> None:
    await measured(case, "short", first=IDLE, simulator=IDLE)
    await case.ended("RolledBack", drafter="eagle3", words="it alone rejects requests in between, with status 400")


@scenario
async def metrics_are_gone(case: Case) -> None:
    await measured(case, "better", first=IDLE, simulator=GONE, analysis=SHORT | {"onInconclusive": "Rollback"})
    await case.ended("RolledBack", drafter="eagle3", verdict="Inconclusive")


@scenario
async def metrics_are_no_numbers_in_warm_up(case: Case) -> None:
    await measured(case, "better", first=IDLE, simulator=IDLE, analysis=LONG)
    await case.phase("WarmingUp")
    await case.corrupt_metrics("nan")
    await case.ended("RolledBack", drafter="eagle3", words="are invalid")


@scenario
async def metrics_are_below_zero_in_analysis(case: Case) -> None:
    await measured(case, "better", first=IDLE, simulator=IDLE)
    await case.phase("Analyzing")
    await case.corrupt_metrics("negative")
    await case.ended("RolledBack", drafter="eagle3", words="are invalid")


@scenario
async def metrics_are_frozen(case: Case) -> None:
    """A page that stands still looks like an engine that answers nobody: the canary is stopped for it."""
    await measured(case, "better", simulator=FROZEN, analysis=SHORT)
    await case.ended("RolledBack", drafter="eagle3", verdict="Rollback")


@scenario
async def metrics_are_gone_and_then_worse(case: Case) -> None:
    await measured(case, "worse", simulator=BUSY_GONE, analysis=SHORT)
    await case.phase("Held")
    await case.truth()
    await found_worse(case)


@scenario
async def metrics_are_gone_and_then_no_numbers(case: Case) -> None:
    await measured(case, "better", simulator=BUSY_GONE, analysis=SHORT)
    await case.phase("Held")
    await case.corrupt_metrics("nan")
    await case.ended("RolledBack", drafter="eagle3", words="are invalid")


@scenario
async def promoted_by_a_person_and_worse_in_ramp(case: Case) -> None:
    await measured(case, "worse", replicas=2, canary={"stepWeights": [50], "stepDuration": "1h"}, word=True)
    await found_worse(case)


@scenario
async def promoted_by_a_person_worse_in_promotion(case: Case) -> None:
    await measured(case, "worse", replicas=2, gated=True, word=True)
    await case.open(await case.phase("Starting"))  # and not the second one
    await case.phase("Promoting")
    await found_worse(case)


@scenario
async def metrics_are_no_numbers_in_the_ramp(case: Case) -> None:
    await measured(
        case, "better", first=IDLE, simulator=IDLE, canary={"stepWeights": [50], "stepDuration": "1h"}, replicas=2, word=True
    )
    await case.phase("Ramping")
    await case.corrupt_metrics("nan")
    await case.ended("RolledBack", drafter="eagle3", words="are invalid")


@scenario
async def metrics_are_no_numbers_in_the_promotion(case: Case) -> None:
    await measured(case, "better", first=IDLE, simulator=IDLE, replicas=2, gated=True, word=True)
    await case.open(await case.phase("Starting"))
    await case.phase("Promoting")
    await case.corrupt_metrics("nan")
    await case.ended("RolledBack", drafter="eagle3", words="are invalid")


# ------------------------------------------------------------------------------------------ after a promotion, with old pods kept
KEPT = {"scaleDownDelay": "1h"}


@scenario
async def metrics_are_no_numbers_afterwards(case: Case) -> None:
    await measured(case, "better", first=IDLE, simulator=IDLE, canary=KEPT, word=True)
    await case.watched()
    await case.corrupt_metrics("nan", case.status["stable"]["revision"])
    await case.ended("RolledBack", drafter="eagle3", words="are invalid")


@scenario
async def worse_afterwards(case: Case) -> None:
    await measured(case, "better", canary=KEPT)
    await case.watched()
    await case.corrupt_metrics("worse-drafter", case.status["stable"]["revision"])
    await case.ended("RolledBack", drafter="eagle3", words="Rolled back after promotion. ")


async def falls_with_the_traffic(case: Case) -> str:
    """What is promoted falls, and the pods before fare no better: it is looked at again, for an hour. The promoted revision."""
    await measured(case, "better", canary=KEPT)
    await case.watched()
    new, old = case.status["stable"]["revision"], case.status["previous"]["revision"]
    await case.corrupt_metrics("worse-drafter", old)
    await case.corrupt_metrics("worse-drafter", new)
    await case.until(lambda status: status["phase"] == "Verifying", "old pods get requests again")
    return str(new)


@scenario
async def falls_with_traffic_and_turned_down(case: Case) -> None:
    await case.say(rollback=await falls_with_the_traffic(case))
    await case.ended("RolledBack", drafter="eagle3", words="Rolled back after promotion. Rollback requested manually.")


@scenario
async def falls_with_traffic_then_no_numbers(case: Case) -> None:
    await case.corrupt_metrics("nan", await falls_with_the_traffic(case))
    await case.ended("RolledBack", drafter="eagle3", words="are invalid")
