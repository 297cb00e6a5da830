"""Replicas of each arm at one moment of a rollout.

    Starting … AwaitingApproval   stable  canary  control     the canary's and the control's pods are equal in number
    Ramping, Promoting            stable▼ canary▲             the control's capacity goes to the canary
    RollingBack                   stable▲ canary▼
    Monitoring, Verifying         stable  previous            in the capacity that canary and control had

There are two sources of capacity. `Surge`: canary and control come on top of the stable pods, and no more than that ever does;
stable pods are removed only where the canary's have replaced them and are ready. `Reuse`: no pod on top; the stable arm makes
room first.

Guarantees, for every input: Ready pods are never given up below the floor, except for the few late pods, which the rollout
does not wait for. The floor is the replicas of the spec for `Surge`, and those less the capacity lent to canary and control
for `Reuse`. All arms together request no more than the capacity. The exception are control pods that stand in although the
spec requests no control any more: they keep theirs. A canary never shrinks while it advances. `Reuse` leaves a stable pod
whatever spec.replicas is: where that is too small for canary, control and a stable pod, so many run until the canary has
ended. Not guaranteed: that the cluster has the resources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aerie.api.rollout import CanarySpec
from aerie.rollout.facts.late_pods import max_tolerated_failures


@dataclass(frozen=True)
class PodCounts:
    """Pod counts of one arm."""

    requested: int = 0
    """Replicas requested so far, or the existing pods where those are more."""
    terminating: int = 0
    """Terminating pods besides them, which still hold their GPUs."""
    ready: int = 0
    tolerated_late: int = 0
    """Late pods that are so few that they delay nothing (facts/late_pods.py)."""

    @property
    def ready_or_tolerated(self) -> int:
        """Pods that need not be awaited."""
        return self.ready + self.tolerated_late

    @property
    def allocated(self) -> int:
        """Capacity that the arm holds, in pods."""
        return self.requested + self.terminating


@dataclass(frozen=True)
class ArmReplicas:
    """Replicas to request for each arm."""

    stable: int
    canary: int = 0
    control: int = 0


@dataclass(frozen=True)
class Capacity:
    """Capacity that the spec grants to a rollout of `replicas` pods."""

    replicas: int
    canary_replicas: int
    control_replicas: int
    max_total_pods: int
    """Pods of all arms together."""
    min_ready_pods: int
    """Ready pods that are never given up on purpose."""

    @classmethod
    def from_spec(cls, replicas: int, canary: CanarySpec) -> Capacity:
        """Return the capacity of the resource. A canary is never larger than the arm that it replaces."""
        canary_replicas = min(canary.replicas, replicas)
        control_replicas = canary_replicas if canary.control == "Fresh" else 0
        if canary.capacity == "Surge":
            return cls(
                replicas,
                canary_replicas,
                control_replicas,
                max_total_pods=replicas + canary_replicas + control_replicas,
                min_ready_pods=replicas,
            )
        max_total_pods = max(replicas, canary_replicas + control_replicas + 1) if replicas else 0
        return cls(
            replicas,
            canary_replicas,
            control_replicas,
            max_total_pods=max_total_pods,
            min_ready_pods=max_total_pods - canary_replicas - control_replicas,
        )

    def missing_ready_pods(self, *arms: PodCounts) -> int:
        """Return the ready pods that are missing from the floor beyond those of these arms: others have to stand in for them.

        Late pods are tolerated as far as the present number of replicas allows, and not the larger one before it.
        """
        tolerated = min(sum(arm.tolerated_late for arm in arms), max_tolerated_failures(self.min_ready_pods))
        return max(0, self.min_ready_pods - sum(arm.ready for arm in arms) - tolerated)


def replicas_during_analysis(capacity: Capacity) -> ArmReplicas:
    """Return the replicas while the canary starts and is analyzed."""
    stable_replicas = min(capacity.replicas, capacity.max_total_pods - capacity.canary_replicas - capacity.control_replicas)
    return ArmReplicas(max(0, stable_replicas), capacity.canary_replicas, capacity.control_replicas)


def with_substitute_control_pods(
    target: ArmReplicas, capacity: Capacity, stable: PodCounts, canary: PodCounts, control: PodCounts
) -> ArmReplicas:
    """Return the target with control pods that stand in for stable ones, where the spec requests no control any more.

    They keep the capacity that they hold; no new one is requested.
    """
    substitutes = min(control.requested, capacity.missing_ready_pods(stable, canary)) if control.ready else 0
    return ArmReplicas(target.stable, target.canary, max(target.control, substitutes))


def replicas_during_ramp_up(
    capacity: Capacity, canary_target: int, stable: PodCounts, canary: PodCounts, control: PodCounts
) -> ArmReplicas:
    """Return the replicas on the way to a canary of `canary_target` pods, from the current counts.

    The control is no longer needed, except where its pods stand in for stable ones that are not ready. A canary that is too
    large, because the ramp was lowered or replicas were reduced, loses a pod once a stable one is ready for it.
    """
    canary_target = max(capacity.canary_replicas, min(canary_target, capacity.replicas))
    substitutes = min(control.requested, capacity.missing_ready_pods(stable, canary)) if control.ready else 0
    stable_goal = max(0, min(capacity.replicas, capacity.max_total_pods - canary_target - substitutes))
    # The stable pods need not serve the traffic that ready canary pods serve already.
    stable_target = max(stable_goal, min(capacity.replicas, capacity.missing_ready_pods(canary)))
    available = capacity.max_total_pods - stable.allocated - canary.allocated - control.allocated
    added_stable = max(0, min(stable_target - stable.requested, available))
    added_canary = max(0, min(canary_target - canary.requested, available - added_stable))
    max_canary = max(canary_target, min(capacity.replicas, capacity.missing_ready_pods(stable)))
    canary_replicas = max(capacity.canary_replicas, min(max_canary, canary.requested + added_canary))
    return ArmReplicas(min(stable_target, stable.requested + added_stable), canary_replicas, substitutes)


def replicas_during_rollback(capacity: Capacity, stable: PodCounts, canary: PodCounts, control: PodCounts) -> ArmReplicas:
    """Return the replicas during a rollback to the stable arm alone.

    Pods of control and canary stand in for stable ones that are not ready; one is removed once a stable one is ready.
    """
    available = capacity.max_total_pods - stable.allocated - canary.allocated - control.allocated
    added_stable = max(0, min(capacity.replicas - stable.requested, available))
    missing = capacity.missing_ready_pods(stable)
    control_substitutes = min(control.requested, missing) if control.ready else 0
    canary_substitutes = max(0, min(canary.requested, missing - min(control_substitutes, control.ready))) if canary.ready else 0
    return ArmReplicas(min(capacity.replicas, stable.requested + added_stable), canary_substitutes, control_substitutes)


def max_retained_replicas(capacity: Capacity) -> int:
    """Return how many pods of the previous revision may stay after a promotion: in the capacity that canary and control had."""
    return max(0, min(capacity.replicas, capacity.max_total_pods - capacity.replicas))


def ramp_step_percent(ramp: Sequence[int], step: int | None) -> int:
    """Return the percentage of the traffic at a step of the ramp.

    Of a ramp that has become shorter that is the last one; of an empty ramp 0, because it has no step.
    """
    return ramp[min(step or 0, len(ramp) - 1)] if ramp else 0


def canary_replicas_for_traffic(capacity: Capacity, traffic_percent: int, *, by_pods: bool) -> int:
    """Return the pods that the canary needs for `traffic_percent` of the traffic.

    By weight (Gateway), that is this share of the replicas. By pods (Service), it is so many that they are this share of all
    ready pods.
    """
    if not by_pods:
        return max(capacity.canary_replicas, -(-capacity.replicas * traffic_percent // 100))
    for canary_replicas in range(capacity.canary_replicas, capacity.replicas):
        stable_replicas = min(capacity.replicas, capacity.max_total_pods - canary_replicas)
        if 100 * canary_replicas >= traffic_percent * (canary_replicas + stable_replicas):
            return canary_replicas
    return capacity.replicas
