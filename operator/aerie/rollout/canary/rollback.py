"""Rollback of a canary: its traffic is removed first, and its pods as stable pods become ready.

Guarantees: pure. A canary that has ended stays, with phase RollingBack, until the stable arm has as many ready pods as it is
expected to have. An isolated canary gets no traffic, as long as another pod is ready. Not guaranteed: that this happens; a
rollback that cannot end is reversed (blocked_rollback.py).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from aerie.api.status import AnalysisStatus, Arm, CanaryArm, RolloutOutcome, Status
from aerie.rollout.canary.messages import build_blocked_rollback_message
from aerie.rollout.canary.transition import CanaryTransition, build_awaited_readiness, read_stalled_since
from aerie.rollout.capacity import replica_counts, traffic_weights
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.facts.snapshot import Snapshot


def roll_back_canary(
    snapshot: Snapshot,
    stable: Arm,
    canary_arm: CanaryArm,
    analysis: AnalysisStatus | None,
    outcome: RolloutOutcome | None,
    now: datetime,
) -> CanaryTransition:
    """Return the transition of a canary that is rolled back. With an outcome it has just ended: its traffic is removed first, its
    pods by the next reconcile."""
    resource = snapshot.resource
    stalled_since = read_stalled_since(canary_arm) if canary_arm.phase == "RollingBack" else None
    fleet = RolloutPods.from_snapshot(snapshot, stable.revision, canary_arm.revision, now, stalled_since, growing_arm="stable")
    replicas, pod_counts = resource.spec.replicas, (fleet.stable.counts, fleet.canary.counts, fleet.control.counts)
    arms = replica_counts.replicas_during_rollback(fleet.capacity, *pod_counts)
    weights = traffic_weights.rollback_weights(replicas, arms, *pod_counts)
    if canary_arm.is_isolated:  # no user was served by it before
        weights = traffic_weights.single_arm_weights(*pod_counts)
    if outcome is not None and canary_arm.step_start_time is None:  # traffic is removed before pods
        arms = replace(arms, canary=fleet.canary.counts.requested)
    if outcome is None and arms.canary == arms.control == 0:
        condition = ConditionUpdate(PROGRESSING, "False", "RolledBack", f"Revision {canary_arm.revision} was removed.")
        return CanaryTransition(None, arms, weights, condition, analysis, requeue_after=timedelta(0))
    recorded_outcome = outcome or next(
        (
            past_outcome
            for past_outcome in (resource.status or Status()).rollout_history
            if past_outcome.revision == canary_arm.revision
        ),
        None,
    )
    reason = f"{recorded_outcome.message} " if recorded_outcome else ""
    message = f"{reason}Rolling back: {fleet.stable.counts.ready}/{replicas} pods of stable revision {stable.revision} ready."
    if outcome is None and fleet.is_rollback_blocked:
        message = f"{message} {build_blocked_rollback_message(resource, stable, canary_arm)}"
    condition = ConditionUpdate(PROGRESSING, "True", "RollingBack", message)
    rolling_back_arm = canary_arm.model_copy(update={"phase": "RollingBack"})
    rolling_back_arm = rolling_back_arm.model_copy(
        update={"readiness": build_awaited_readiness(canary_arm, rolling_back_arm, fleet, arms, now)}
    )
    return CanaryTransition(
        rolling_back_arm, arms, weights, condition, analysis, outcome, timedelta(0) if outcome else timedelta(seconds=5)
    )
