"""Result of one reconcile of a canary: pods and weights of each arm, the readiness it waits for, status and outcome.

Guarantees: pure. `CanaryArm` and `AnalysisStatus` of a transition contain all that must survive a crash. Not guaranteed: that
pods become ready; the time since the last progress is in the status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from aerie.api.status import AnalysisStatus, CanaryArm, ReadinessProgress, RolloutOutcome, Status
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.conditions import ConditionUpdate, truncate_message

OutcomeResult = Literal["Promoted", "RolledBack", "Superseded", "Failed", "Explored"]


@dataclass(frozen=True)
class CanaryTransition:
    """State of the canary after this reconcile."""

    canary: CanaryArm | None
    """The canary; None: it is promoted, or removed."""
    arms: ArmReplicas
    """Pods to request."""
    weights: Mapping[str, int]
    """Share of the traffic by arm, in parts of traffic_weights.TOTAL_WEIGHT."""
    progressing: ConditionUpdate
    analysis: AnalysisStatus | None
    outcome: RolloutOutcome | None = None
    requeue_after: timedelta | None = None


def build_outcome(
    canary: CanaryArm, result: OutcomeResult, reason: str, status: Status, analysis: AnalysisStatus | None, now: datetime
) -> RolloutOutcome:
    """Return how the canary has ended, with its comparisons."""
    return RolloutOutcome(
        revision=canary.revision,
        change=canary.change,
        result=result,
        message=truncate_message(reason),
        start_time=canary.start_time,
        completion_time=now,
        drafter=canary.drafter,
        replaced_drafter=status.stable.drafter if status.stable else None,
        comparisons=analysis.comparisons if analysis and (canary.ready_time or canary.phase == "Evaluating") else [],
    )


def read_stalled_since(canary_arm: CanaryArm) -> datetime | None:
    """Return since when pods have been waited for without progress."""
    return canary_arm.readiness.start_time if canary_arm.readiness is not None else None


def build_awaited_readiness(
    canary_before: CanaryArm, canary_after: CanaryArm, fleet: RolloutPods, arms: ArmReplicas, now: datetime
) -> ReadinessProgress | None:
    """Return the readiness that `canary_after` waits for. Its start time is now where the phase or the step has changed, or where
    more pods are ready than ever before."""
    awaited_arms = (fleet.stable,) if canary_after.phase == "RollingBack" else (fleet.canary, fleet.control)
    ready_pods = sum(arm_pods.counts.ready for arm_pods in awaited_arms)
    requested_pods = arms.stable if canary_after.phase == "RollingBack" else arms.canary + arms.control
    if ready_pods >= requested_pods or any(arm_pods.late_pods.has_resource_shortage for arm_pods in awaited_arms):
        return None
    progress_before = canary_before.readiness
    if (
        progress_before is None
        or ready_pods > progress_before.max_ready_replicas
        or (canary_after.phase, canary_after.step_index) != (canary_before.phase, canary_before.step_index)
    ):
        return ReadinessProgress(start_time=now, max_ready_replicas=ready_pods)
    return progress_before
