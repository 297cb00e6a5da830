"""How many pods each arm is to have at one moment of a rollout.

    Starting … AwaitingApproval   stable  canary  control     the canary's and the control's pods are equal in number
    Ramping, Promoting            stable▼ canary▲             the control's place goes to the canary
    RollingBack                   stable▲ canary▼
    Watching, Rechecking          stable  previous            in the places that canary and control had

Two sources of places. `Surge`: canary and control come on top of the stable pods, and no more than that ever does; stable pods
go only where the canary's have taken their place and serve. `Reuse`: no pod on top; the stable arm makes room first.

Guarantees, for every input: pods that serve are never given up below the floor (`Surge`: the replicas of the spec; `Reuse`:
those less the places lent to canary and control), but for the few pods that are late, which the rollout goes around; all arms
together ask for no more than the places there are, but for control pods that stand in although the spec asks for no control any
more, which keep theirs; a canary never shrinks on its way up. `Reuse` leaves a stable pod whatever
spec.replicas is: where that is too small for canary, control and a stable pod, so many run until the canary has ended. Not
guaranteed: that the cluster has the places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aerie.api.rollout import CanarySpec
from aerie.rollout.facts.late_pods import max_tolerated_failures


@dataclass(frozen=True)
class PodCounts:
    """Of one arm."""

    requested: int = 0
    """Replicas asked for so far, or the pods there are where those are more."""
    terminating: int = 0
    """Besides them the pods on their way out, which still hold their GPUs."""
    ready: int = 0
    tolerated_late: int = 0
    """Pods that are late and so few that they hold nothing up (lateness.py)."""

    @property
    def ready_or_tolerated(self) -> int:
        """Pods that need not be waited for."""
        return self.ready + self.tolerated_late

    @property
    def allocated(self) -> int:
        """Places that the arm holds."""
        return self.requested + self.terminating


@dataclass(frozen=True)
class ArmReplicas:
    """Replicas to ask for."""

    stable: int
    canary: int = 0
    control: int = 0


@dataclass(frozen=True)
class Capacity:
    """What the spec lets a rollout of `replicas` pods take."""

    replicas: int
    canary_replicas: int
    control_replicas: int
    max_total_pods: int
    """Pods of all arms together."""
    min_ready_pods: int
    """Serving pods that are never given up on purpose."""

    @classmethod
    def from_spec(cls, replicas: int, canary: CanarySpec) -> Capacity:
        """The places of the resource. A canary is never larger than what it is to replace."""
        size = min(canary.replicas, replicas)
        control = size if canary.control == "Fresh" else 0
        if canary.capacity == "Surge":
            return cls(replicas, size, control, max_total_pods=replicas + size + control, min_ready_pods=replicas)
        total = max(replicas, size + control + 1) if replicas else 0
        return cls(replicas, size, control, max_total_pods=total, min_ready_pods=total - size - control)

    def missing_ready_pods(self, *arms: PodCounts) -> int:
        """Serving pods that are missing from the floor, beside those of these arms: others have to stand in for them. Late pods
        are excused as far as a fleet of that size may have some, and not the larger one that it was before."""
        excused = min(sum(arm.tolerated_late for arm in arms), max_tolerated_failures(self.min_ready_pods))
        return max(0, self.min_ready_pods - sum(arm.ready for arm in arms) - excused)


def replicas_during_analysis(capacity: Capacity) -> ArmReplicas:
    """While the canary starts and is judged."""
    stable = min(capacity.replicas, capacity.max_total_pods - capacity.canary_replicas - capacity.control_replicas)
    return ArmReplicas(max(0, stable), capacity.canary_replicas, capacity.control_replicas)


def with_substitute_control_pods(
    target: ArmReplicas, capacity: Capacity, stable: PodCounts, canary: PodCounts, control: PodCounts
) -> ArmReplicas:
    """The same with the control pods that stand in for stable ones, where the spec asks for no control any more. They keep the
    places that they hold; none is asked for anew."""
    same = min(control.requested, capacity.missing_ready_pods(stable, canary)) if control.ready else 0
    return ArmReplicas(target.stable, target.canary, max(target.control, same))


def replicas_during_ramp_up(
    capacity: Capacity, canary_target: int, stable: PodCounts, canary: PodCounts, control: PodCounts
) -> ArmReplicas:
    """On the way to a canary of `goal` pods, from what is there. The control is no longer needed, but where its pods stand in for
    stable ones that do not serve. A canary that is larger, because the ramp was lowered or replicas are fewer, gives a pod up
    when a stable one serves for it."""
    canary_target = max(capacity.canary_replicas, min(canary_target, capacity.replicas))
    same = min(control.requested, capacity.missing_ready_pods(stable, canary)) if control.ready else 0
    wanted_stable = max(0, min(capacity.replicas, capacity.max_total_pods - canary_target - same))
    # What the canary's serving pods carry already, the stable ones need not.
    kept = max(wanted_stable, min(capacity.replicas, capacity.missing_ready_pods(canary)))
    free = capacity.max_total_pods - stable.allocated - canary.allocated - control.allocated
    more_stable = max(0, min(kept - stable.requested, free))
    more_canary = max(0, min(canary_target - canary.requested, free - more_stable))
    most_canary = max(canary_target, min(capacity.replicas, capacity.missing_ready_pods(stable)))
    asked = max(capacity.canary_replicas, min(most_canary, canary.requested + more_canary))
    return ArmReplicas(min(kept, stable.requested + more_stable), asked, same)


def replicas_during_rollback(capacity: Capacity, stable: PodCounts, canary: PodCounts, control: PodCounts) -> ArmReplicas:
    """On the way back to the stable arm alone: pods of control and canary stand in for stable ones that do not serve, and one
    goes when a stable one serves."""
    free = capacity.max_total_pods - stable.allocated - canary.allocated - control.allocated
    more_stable = max(0, min(capacity.replicas - stable.requested, free))
    needed = capacity.missing_ready_pods(stable)
    same = min(control.requested, needed) if control.ready else 0
    kept = max(0, min(canary.requested, needed - min(same, control.ready))) if canary.ready else 0
    return ArmReplicas(min(capacity.replicas, stable.requested + more_stable), kept, same)


def max_retained_replicas(capacity: Capacity) -> int:
    """Pods of the revision before that may stay after a promotion: in the places that canary and control had."""
    return max(0, min(capacity.replicas, capacity.max_total_pods - capacity.replicas))


def ramp_step_percent(ramp: Sequence[int], step: int | None) -> int:
    """Percent of the traffic that a step of the ramp asks for: of a ramp that has become shorter the last share, and of an empty
    ramp nothing, because it asks for no step."""
    return ramp[min(step or 0, len(ramp) - 1)] if ramp else 0


def canary_replicas_for_traffic(capacity: Capacity, traffic_percent: int, *, by_pods: bool) -> int:
    """Pods that the canary needs for `share` percent of the traffic.

    By weight (Gateway) as many as the share of the load is of the fleet; by pods (Service) so many that they are that share of
    all that serve.
    """
    if not by_pods:
        return max(capacity.canary_replicas, -(-capacity.replicas * traffic_percent // 100))
    for size in range(capacity.canary_replicas, capacity.replicas):
        stable = min(capacity.replicas, capacity.max_total_pods - size)
        if 100 * size >= traffic_percent * (size + stable):
            return size
    return capacity.replicas
