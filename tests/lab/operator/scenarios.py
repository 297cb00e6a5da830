"""Rollout scenarios: the user's actions on one resource, and the faults of its cluster. See test_rollout_faults.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.lab.operator.environment import Case
from tests.lab.operator.resources import (
    BUSY,
    BUSY_NO_METRICS,
    FROZEN,
    IDLE,
    LONG,
    NO_METRICS,
    SHORT,
    resource,
    with_manual_promotion,
)

Object = dict[str, Any]
Scenario = Callable[[Case], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__.replace("_", "-")] = function
    return function


# ----------------------------------------------------------------------------------- pods that run nothing, with manual actions
@scenario
async def rolled_back_before_it_is_ready(case: Case) -> None:
    await case.apply_first_revision(resource(case.name))
    await case.apply(resource(case.name, "eagle31", gated=True))
    await case.annotate(rollback=await case.until_phase("Starting"))
    await case.until_ended("RolledBack", drafter="eagle3", message="manually")


@scenario
async def canary_crash_loops(case: Case) -> None:
    await case.apply_first_revision(resource(case.name))
    await case.apply(resource(case.name, "eagle31", engine="aerie.dev/test/crashes"))
    await case.until_ended("RolledBack", drafter="eagle3", message="are in a crash loop")


@scenario
async def drafter_never_loads(case: Case) -> None:
    await case.apply_first_revision(resource(case.name))
    await case.apply(resource(case.name, "eagle31", engine="aerie.dev/test/hangs", progressDeadline="1m"))
    await case.until_ended("Failed", drafter="eagle3", message="have not been ready for spec.rollout.progressDeadline (1m)")


@scenario
async def rolled_back_in_warm_up_and_retried(case: Case) -> None:
    await case.apply_first_revision(resource(case.name, analysis=LONG))
    await case.apply(resource(case.name, "eagle31", analysis=LONG))
    revision = await case.until_phase("WarmingUp")
    await case.annotate(rollback=revision)
    await case.until_ended("RolledBack", drafter="eagle3", message="manually")
    await case.annotate(rollback=None, retry="1")
    assert await case.until_phase("WarmingUp") == revision
    await case.annotate(promote=revision)
    await case.until_ended("Promoted", drafter="eagle31")


@scenario
async def rolled_back_in_analysis(case: Case) -> None:
    await case.apply_first_revision(resource(case.name))
    await case.apply(resource(case.name, "eagle31"))
    await case.annotate(rollback=await case.until_phase("Analyzing"))
    await case.until_ended("RolledBack", drafter="eagle3", message="manually")


@scenario
async def promoted_manually_with_a_ramp(case: Case) -> None:
    ramp = {"stepWeights": [25, 50], "stepDuration": "1s"}
    await case.apply_first_revision(resource(case.name, replicas=4, canary=ramp))
    await case.apply(resource(case.name, "eagle31", replicas=4, canary=ramp))
    await case.annotate(promote=await case.until_phase("Analyzing"))
    await case.until_ended("Promoted", drafter="eagle31", message="manually")


@scenario
async def held_and_rolled_back(case: Case) -> None:
    await case.apply_first_revision(resource(case.name, analysis=SHORT))
    await case.apply(resource(case.name, "eagle31", analysis=SHORT))
    await case.annotate(rollback=await case.until_phase("Held"))
    await case.until_ended("RolledBack", drafter="eagle3", message="manually")


@scenario
async def held_and_promoted_manually(case: Case) -> None:
    await case.apply_first_revision(resource(case.name, analysis=SHORT))
    await case.apply(resource(case.name, "eagle31", analysis=SHORT))
    await case.annotate(promote=await case.until_phase("Held"))
    await case.until_ended("Promoted", drafter="eagle31", message="manually")


@scenario
async def held_and_extended_twice(case: Case) -> None:
    await case.apply_first_revision(resource(case.name, analysis=SHORT))
    await case.apply(resource(case.name, "eagle31", analysis=SHORT))
    revision = await case.until_phase("Held")
    for _ in range(2):
        end = datetime.now(UTC) + timedelta(seconds=20)
        await case.annotate(extend=f"{revision}/{end.isoformat()}")
        await case.until_phase("Analyzing")
        assert case.canary["extensionEndTime"]
        await case.until_phase("Held")
    await case.annotate(rollback=revision)
    await case.until_ended("RolledBack", drafter="eagle3", message="manually")


@scenario
async def node_lost_in_mid_analysis(case: Case) -> None:
    await case.apply_first_revision(resource(case.name))
    await case.apply(resource(case.name, "eagle31", node="node-2", progressDeadline="1m"))
    await case.until_phase("Analyzing")
    case.faults.append(await asyncio.to_thread(case.environment.faults.silence_node, "node-2"))
    await case.until(lambda status: status["phase"] != "Analyzing", "the canary is rolled back")
    assert "None of its pods has been ready since" in case.last["message"]
    await asyncio.to_thread(case.faults.pop().undo)  # the node's pods can be deleted when it is back
    await case.until_ended("RolledBack", drafter="eagle3")


@scenario
async def rolled_back_in_the_ramp(case: Case) -> None:
    hold = {"stepWeights": [50], "stepDuration": "1h"}
    await case.apply_first_revision(resource(case.name, replicas=2, canary=hold))
    await case.apply(with_manual_promotion(resource(case.name, "eagle31", replicas=2, canary=hold)))
    revision = await case.until_phase("Ramping")
    await case.until(lambda _: case.canary.get("readyReplicas") == 2, "it has grown for its weight")
    await case.annotate(rollback=revision)
    await case.until_ended("RolledBack", drafter="eagle3", message="manually")


@scenario
async def pods_of_the_ramp_wait_for_room(case: Case) -> None:
    ramp = {"stepWeights": [50], "stepDuration": "0s"}
    await case.apply_first_revision(resource(case.name, replicas=2, canary=ramp))
    await case.apply(
        with_manual_promotion(resource(case.name, "eagle31", replicas=2, gated=True, canary=ramp, progressDeadline="1m"))
    )
    await case.open_gate(await case.until_phase("Starting"))
    await case.until_phase("Ramping")
    await asyncio.sleep(75)  # longer than progressDeadline: an unschedulable pod is no failure of its revision
    opening = asyncio.create_task(case.open_gates(await case.until_phase("Ramping")))
    try:
        await case.until_ended("Promoted", drafter="eagle31")
    finally:
        opening.cancel()


@scenario
async def rolled_back_in_the_promotion(case: Case) -> None:
    await case.apply_first_revision(resource(case.name, replicas=2))
    await case.apply(with_manual_promotion(resource(case.name, "eagle31", replicas=2, gated=True)))
    await case.open_gate(await case.until_phase("Starting"))
    await case.annotate(rollback=await case.until_phase("Promoting"))
    await case.until_ended("RolledBack", drafter="eagle3", message="manually")


@scenario
async def pods_of_the_promotion_wait_for_room(case: Case) -> None:
    await case.apply_first_revision(resource(case.name, replicas=2))
    await case.apply(with_manual_promotion(resource(case.name, "eagle31", replicas=2, gated=True, progressDeadline="1m")))
    await case.open_gate(await case.until_phase("Starting"))
    await case.until_phase("Promoting")
    await asyncio.sleep(75)
    opening = asyncio.create_task(case.open_gates(await case.until_phase("Promoting")))
    try:
        await case.until_ended("Promoted", drafter="eagle31")
    finally:
        opening.cancel()


@scenario
async def two_changes_in_a_row(case: Case) -> None:
    await case.apply_first_revision(resource(case.name))
    await case.apply(resource(case.name, "eagle31"))
    await case.until_phase("WarmingUp", "Analyzing")
    await case.apply(with_manual_promotion(resource(case.name, "better")))
    await case.apply(with_manual_promotion(resource(case.name, "worse")))  # immediately, with a manual promotion
    await case.until_ended("Promoted", drafter="worse")
    results = [(record["result"], record["drafter"]) for record in case.status["rolloutHistory"]]
    assert results[0] == ("Promoted", "models.example/worse")
    assert ("Superseded", "models.example/eagle31") in results
    assert ("Promoted", "models.example/better") not in results


@scenario
async def reverted_in_the_ramp(case: Case) -> None:
    hold = {"stepWeights": [50], "stepDuration": "1h"}
    before = resource(case.name, replicas=2, canary=hold)
    await case.apply_first_revision(before)
    await case.apply(with_manual_promotion(resource(case.name, "eagle31", replicas=2, canary=hold)))
    await case.until_phase("Ramping")
    await case.until(lambda _: case.canary.get("readyReplicas") == 2, "it has grown for its weight")
    await case.apply(before)
    await case.until_ended("Superseded", drafter="eagle3", message="reverted to the stable revision")


@scenario
async def reuse_with_exactly_enough_gpus(case: Case) -> None:
    ramp = {"capacity": "Reuse", "stepWeights": [50], "stepDuration": "1s"}
    await case.apply_first_revision(resource(case.name, replicas=4, gpus=2, canary=ramp))  # all eight of the node
    await case.apply(with_manual_promotion(resource(case.name, "eagle31", replicas=4, gpus=2, canary=ramp)))
    await case.until_ended("Promoted", drafter="eagle31")


@scenario
async def rolled_back_after_the_promotion(case: Case) -> None:
    keep = {"scaleDownDelay": "1h"}
    await case.apply_first_revision(resource(case.name, replicas=2, canary=keep))
    await case.apply(with_manual_promotion(resource(case.name, "eagle31", replicas=2, canary=keep)))
    await case.until_monitoring()
    await case.annotate(promote=None, rollback=case.status["stable"]["revision"])
    await case.until_ended("RolledBack", drafter="eagle3", message="Rolled back after promotion. Rollback requested manually.")


@scenario
async def retained_until_the_delay_has_passed(case: Case) -> None:
    keep = {"scaleDownDelay": "2s"}
    await case.apply_first_revision(resource(case.name, replicas=2, canary=keep))
    await case.apply(with_manual_promotion(resource(case.name, "eagle31", replicas=2, canary=keep)))
    await case.until_ended("Promoted", drafter="eagle31", message="manually")


@scenario
async def autoscaler_in_mid_rollout(case: Case) -> None:
    hold = {"stepWeights": [50], "stepDuration": "1h"}
    await case.apply_first_revision(resource(case.name, replicas=2, canary=hold))
    await case.apply(resource(case.name, "eagle31", replicas=2, canary=hold))
    revision = await case.until_phase("Analyzing")
    await case.scale(4)
    await case.until(lambda status: status["stable"]["readyReplicas"] == 4, "the stable arm has grown")
    await case.annotate(promote=revision)
    await case.until_phase("Ramping")
    await case.until(lambda _: case.canary.get("readyReplicas") == 3, "the canary has grown for its weight with four replicas")
    await case.scale(6)
    await case.until(lambda _: case.canary.get("readyReplicas") == 4, "and with six")
    await case.scale(3)
    await case.until(lambda _: case.canary.get("readyReplicas") == 3, "it has shrunk with the fleet")
    quick = {"stepWeights": [50], "stepDuration": "0s"}
    await case.apply(with_manual_promotion(resource(case.name, "eagle31", replicas=3, canary=quick)))
    await case.until_ended("Promoted", drafter="eagle31")


@scenario
async def gateway_rejects_the_route(case: Case) -> None:
    def gateway_with(**listener: str) -> Object:
        parent = {"name": "lab", "namespace": "projectcontour", **listener}
        return {"mode": "Gateway", "gateway": {"parentRefs": [parent], "hostnames": ["refused.example"]}}

    def is_route_rejected(status: Object) -> bool:
        conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
        return bool(conditions.get("Degraded", {}).get("reason") == "RouteNotAccepted")

    rejected, accepted = gateway_with(sectionName="nowhere"), gateway_with()
    await case.apply_first_revision(resource(case.name, traffic=rejected))
    await case.until(is_route_rejected, "the rejection is shown")
    await case.apply(resource(case.name, "eagle31", traffic=rejected))
    revision = await case.until_phase("Starting")
    await case.until(
        lambda _: case.canary.get("readyReplicas") == (case.canary.get("control") or {}).get("readyReplicas") == 1,
        "both arms serve",
    )
    await case.scale(2)  # any change: its generation shows that it was reconciled since
    await case.until(lambda status: status["stable"]["readyReplicas"] == 2, "it is reconciled")
    assert case.canary["phase"] == "Starting"
    await case.apply(resource(case.name, "eagle31", replicas=2, traffic=accepted))
    assert await case.until_phase("Analyzing") == revision
    await case.until(lambda status: not is_route_rejected(status), "no problem is left")
    await case.annotate(promote=revision)
    await case.until_ended("Promoted", drafter="eagle31")


# ---------------------------------------------------------------------------------------------------- engines that are measured
STABLE_CONTROL = {"control": "Stable"}


async def start_measured_canary(case: Case, drafter: str, *, simulator: str = BUSY, first: str = BUSY, **spec: Any) -> None:
    """Change the drafter on running engines, compared with the stable pods; `promote`: with a manual promotion."""
    promote = spec.pop("promote", False)
    base = {"replicas": spec.get("replicas", 1), "canary": STABLE_CONTROL | spec.pop("canary", {})}
    await case.apply_first_revision(resource(case.name, simulator=first, **base))
    changed = resource(case.name, drafter, simulator=simulator, **spec | base)
    await case.apply(with_manual_promotion(changed) if promote else changed)


async def until_rolled_back_as_worse(case: Case) -> None:
    """Wait until the canary is rolled back because of significantly fewer tokens per step."""
    await case.until_ended("RolledBack", drafter="eagle3", verdict="Rollback")
    comparison = next(comparison for comparison in case.last["comparisons"] if comparison["metric"] == "TokensPerStep")
    assert comparison["upper"] <= 0, case.last


@scenario
async def better_drafter(case: Case) -> None:
    ramp = {"control": "Fresh", "stepWeights": [50], "stepDuration": "1s"}
    await case.apply_first_revision(resource(case.name, replicas=2, simulator=BUSY, canary=ramp))
    await case.apply(resource(case.name, "better", replicas=2, simulator=BUSY, canary=ramp))
    await case.until_ended("Promoted", drafter="better", verdict="Promote")


@scenario
async def worse_drafter(case: Case) -> None:
    await start_measured_canary(case, "worse")
    await until_rolled_back_as_worse(case)


@scenario
async def better_drafter_approved_manually(case: Case) -> None:
    await start_measured_canary(case, "better", canary={"approval": "Manual"})
    await case.annotate(promote=await case.until_phase("AwaitingApproval"))
    await case.until_ended("Promoted", drafter="better", verdict="Promote")


@scenario
async def better_drafter_rolled_back_manually(case: Case) -> None:
    await start_measured_canary(case, "better", canary={"approval": "Manual"})
    await case.annotate(rollback=await case.until_phase("AwaitingApproval"))
    await case.until_ended("RolledBack", drafter="eagle3", message="manually")


@scenario
async def accepted_then_metrics_are_renamed(case: Case) -> None:
    await start_measured_canary(case, "better", canary={"approval": "Manual"})
    await case.until_phase("AwaitingApproval")
    await case.corrupt_metrics("renamed")
    await case.until_ended("RolledBack", drafter="eagle3", message="are invalid")


@scenario
async def accepted_then_worse(case: Case) -> None:
    await start_measured_canary(case, "better", canary={"approval": "Manual"})
    await case.until_phase("AwaitingApproval")
    await case.corrupt_metrics("worse-drafter")
    await until_rolled_back_as_worse(case)


@scenario
async def canary_takes_shorter_requests(case: Case) -> None:
    await start_measured_canary(case, "short", first=IDLE, simulator=IDLE)
    await case.until_ended("RolledBack", drafter="eagle3", message="it alone rejects requests in between, with status 400")


@scenario
async def metrics_are_missing(case: Case) -> None:
    await start_measured_canary(case, "better", first=IDLE, simulator=NO_METRICS, analysis=SHORT | {"onInconclusive": "Rollback"})
    await case.until_ended("RolledBack", drafter="eagle3", verdict="Inconclusive")


@scenario
async def metrics_are_no_numbers_in_warm_up(case: Case) -> None:
    await start_measured_canary(case, "better", first=IDLE, simulator=IDLE, analysis=LONG)
    await case.until_phase("WarmingUp")
    await case.corrupt_metrics("nan")
    await case.until_ended("RolledBack", drafter="eagle3", message="are invalid")


@scenario
async def metrics_are_below_zero_in_analysis(case: Case) -> None:
    await start_measured_canary(case, "better", first=IDLE, simulator=IDLE)
    await case.until_phase("Analyzing")
    await case.corrupt_metrics("negative")
    await case.until_ended("RolledBack", drafter="eagle3", message="are invalid")


@scenario
async def metrics_are_frozen(case: Case) -> None:
    """Frozen metrics look like an engine that answers no request: the canary is rolled back."""
    await start_measured_canary(case, "better", simulator=FROZEN, analysis=SHORT)
    await case.until_ended("RolledBack", drafter="eagle3", verdict="Rollback")


@scenario
async def metrics_are_missing_then_worse(case: Case) -> None:
    await start_measured_canary(case, "worse", simulator=BUSY_NO_METRICS, analysis=SHORT)
    await case.until_phase("Held")
    await case.repair_metrics()
    await until_rolled_back_as_worse(case)


@scenario
async def metrics_are_missing_then_no_numbers(case: Case) -> None:
    await start_measured_canary(case, "better", simulator=BUSY_NO_METRICS, analysis=SHORT)
    await case.until_phase("Held")
    await case.corrupt_metrics("nan")
    await case.until_ended("RolledBack", drafter="eagle3", message="are invalid")


@scenario
async def promoted_manually_worse_in_ramp(case: Case) -> None:
    await start_measured_canary(case, "worse", replicas=2, canary={"stepWeights": [50], "stepDuration": "1h"}, promote=True)
    await until_rolled_back_as_worse(case)


@scenario
async def promoted_manually_worse_in_promotion(case: Case) -> None:
    await start_measured_canary(case, "worse", replicas=2, gated=True, promote=True)
    await case.open_gate(await case.until_phase("Starting"))  # but not the second one
    await case.until_phase("Promoting")
    await until_rolled_back_as_worse(case)


@scenario
async def metrics_are_no_numbers_in_the_ramp(case: Case) -> None:
    await start_measured_canary(
        case, "better", first=IDLE, simulator=IDLE, canary={"stepWeights": [50], "stepDuration": "1h"}, replicas=2, promote=True
    )
    await case.until_phase("Ramping")
    await case.corrupt_metrics("nan")
    await case.until_ended("RolledBack", drafter="eagle3", message="are invalid")


@scenario
async def metrics_are_no_numbers_in_the_promotion(case: Case) -> None:
    await start_measured_canary(case, "better", first=IDLE, simulator=IDLE, replicas=2, gated=True, promote=True)
    await case.open_gate(await case.until_phase("Starting"))
    await case.until_phase("Promoting")
    await case.corrupt_metrics("nan")
    await case.until_ended("RolledBack", drafter="eagle3", message="are invalid")


# --------------------------------------------------------------------------------------- after a promotion, with retained pods
RETENTION = {"scaleDownDelay": "1h"}


@scenario
async def metrics_are_no_numbers_in_monitoring(case: Case) -> None:
    await start_measured_canary(case, "better", first=IDLE, simulator=IDLE, canary=RETENTION, promote=True)
    await case.until_monitoring()
    await case.corrupt_metrics("nan", case.status["stable"]["revision"])
    await case.until_ended("RolledBack", drafter="eagle3", message="are invalid")


@scenario
async def worse_in_monitoring(case: Case) -> None:
    await start_measured_canary(case, "better", canary=RETENTION)
    await case.until_monitoring()
    await case.corrupt_metrics("worse-drafter", case.status["stable"]["revision"])
    await case.until_ended("RolledBack", drafter="eagle3", message="Rolled back after promotion. ")


async def drops_with_the_traffic(case: Case) -> str:
    """Let the acceptance of promoted and previous pods drop: phase Verifying lasts an hour. Return the promoted revision."""
    await start_measured_canary(case, "better", canary=RETENTION)
    await case.until_monitoring()
    new, old = case.status["stable"]["revision"], case.status["previous"]["revision"]
    await case.corrupt_metrics("worse-drafter", old)
    await case.corrupt_metrics("worse-drafter", new)
    await case.until(lambda status: status["phase"] == "Verifying", "old pods get requests again")
    return str(new)


@scenario
async def drops_with_traffic_and_rolled_back(case: Case) -> None:
    await case.annotate(rollback=await drops_with_the_traffic(case))
    await case.until_ended("RolledBack", drafter="eagle3", message="Rolled back after promotion. Rollback requested manually.")


@scenario
async def drops_with_traffic_then_no_numbers(case: Case) -> None:
    await case.corrupt_metrics("nan", await drops_with_the_traffic(case))
    await case.until_ended("RolledBack", drafter="eagle3", message="are invalid")
