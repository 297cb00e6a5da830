"""Current pods of a rollout's arms, and the target replicas of each arm in the canary's phase.

Guarantee: pure. Replica counts are those of capacity/replica_counts.py, for every phase of canary/state_machine.py, and
lateness is that of facts/late_pods.py: a few late pods of many delay no phase, and no phase is late while none of its pods is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from aerie.api.status import TRAFFIC_SHIFT_PHASES
from aerie.rollout.capacity import replica_counts
from aerie.rollout.capacity.replica_counts import ArmReplicas, Capacity, PodCounts
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.late_pods import STALL_DEADLINE_MULTIPLE, LatePods, count_late_pods
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot


@dataclass(frozen=True)
class ArmPods:
    """Pods of one arm."""

    live_pods: tuple[KubernetesObject, ...]
    terminal_pods: tuple[KubernetesObject, ...]
    counts: PodCounts
    late_pods: LatePods

    @classmethod
    def from_snapshot(
        cls, snapshot: Snapshot, revision: str, now: datetime, *, control: bool = False, stalled_since: datetime | None = None
    ) -> ArmPods:
        """Return the pods of the revision's Deployment, or of its control Deployment. See `count_late_pods` for
        `stalled_since`."""
        live_pods = snapshot.cluster.live_pods(revision, control=control)
        deployment = snapshot.cluster.deployment(revision, control=control)
        replicas = (deployment or {}).get("spec", {}).get("replicas") or 0
        late_pods = count_late_pods(
            live_pods,
            replicas,
            pod_failures.read_pod_creation_failure(deployment),
            stalled_since,
            snapshot.resource.spec.rollout.progress_deadline,
            now,
        )
        requested = max(replicas, len(live_pods))
        counts = PodCounts(
            requested,
            snapshot.cluster.terminating_pod_count(revision, control=control),
            snapshot.cluster.ready_pod_count(revision, control=control),
            tolerated_late=late_pods.tolerated_count(requested),
        )
        return cls(live_pods, snapshot.cluster.terminal_pods(revision, control=control), counts, late_pods)

    @property
    def exceeds_late_tolerance(self) -> bool:
        """Whether so many pods are late that it counts against the revision."""
        return self.late_pods.exceeds_tolerance(self.counts.requested)


@dataclass(frozen=True)
class RolloutPods:
    """Pods of all arms, and the capacity for them."""

    capacity: Capacity
    stable: ArmPods
    canary: ArmPods
    control: ArmPods
    is_stalled: bool = False
    """Whether the growing arm has made no progress for so long that it is late, whether its pods were ever created or not."""
    stalls_at: datetime | None = None
    """Time at which it will be; None when it is, or is not awaited."""

    @classmethod
    def from_snapshot(
        cls,
        snapshot: Snapshot,
        stable: str,
        canary: str,
        now: datetime,
        stalled_since: datetime | None = None,
        growing_arm: Literal["canary", "stable"] = "canary",
    ) -> RolloutPods:
        """Return the pods of all arms. `stalled_since`: since when, by the status, pods of `growing_arm` have been awaited
        without progress."""
        spec = snapshot.resource.spec
        stalls_at = (
            stalled_since + STALL_DEADLINE_MULTIPLE * spec.rollout.progress_deadline if stalled_since is not None else None
        )
        canary_stalled_since, stable_stalled_since = (stalled_since, None) if growing_arm == "canary" else (None, stalled_since)
        return cls(
            Capacity.from_spec(spec.replicas, spec.rollout.canary),
            ArmPods.from_snapshot(snapshot, stable, now, stalled_since=stable_stalled_since),
            ArmPods.from_snapshot(snapshot, canary, now, stalled_since=canary_stalled_since),
            ArmPods.from_snapshot(snapshot, stable, now, control=True, stalled_since=canary_stalled_since),
            stalls_at is not None and now >= stalls_at,
            stalls_at if stalls_at is not None and now < stalls_at else None,
        )

    def target_replicas(self, phase: str, ramp: Sequence[int], step: int | None, *, by_pods: bool) -> ArmReplicas:
        """Return the target replicas of each arm in this phase."""
        pod_counts = (self.stable.counts, self.canary.counts, self.control.counts)
        if phase in TRAFFIC_SHIFT_PHASES:
            return replica_counts.replicas_during_ramp_up(
                self.capacity, self.canary_target(phase, ramp, step, by_pods=by_pods), *pod_counts
            )
        return replica_counts.with_substitute_control_pods(
            replica_counts.replicas_during_analysis(self.capacity), self.capacity, *pod_counts
        )

    def canary_target(self, phase: str, ramp: Sequence[int], step: int | None, *, by_pods: bool) -> int:
        """Return the ready pods that the canary needs in this phase."""
        if phase == "Promoting":
            return self.capacity.replicas
        if phase == "Ramping":
            return replica_counts.canary_replicas_for_traffic(
                self.capacity, replica_counts.ramp_step_percent(ramp, step), by_pods=by_pods
            )
        return self.capacity.canary_replicas

    def has_ready_pods(self, phase: str, ramp: Sequence[int], step: int | None, *, by_pods: bool) -> bool:
        """Return whether the pods that the phase requests are ready, except for the few that are late."""
        has_canary_pods = self.canary.counts.ready_or_tolerated >= self.canary_target(phase, ramp, step, by_pods=by_pods)
        has_control_pods = (
            phase in TRAFFIC_SHIFT_PHASES or self.control.counts.ready_or_tolerated >= self.capacity.control_replicas
        )
        return has_canary_pods and has_control_pods

    @property
    def is_rollback_blocked(self) -> bool:
        """Whether so many stable pods are late, for whatever reason, that the rollback to them does not end automatically."""
        return _exceeds_tolerance(self.stable) or (self.is_stalled and not self.stable.late_pods.has_resource_shortage)

    @property
    def waits_only_for_control(self) -> bool:
        """Whether a starting canary waits for control pods of the stable revision alone."""
        return (
            self.canary.counts.ready_or_tolerated >= self.capacity.canary_replicas
            and self.control.counts.ready_or_tolerated < self.capacity.control_replicas
        )

    def exceeds_deadline(self, phase: str) -> bool:
        """Return whether awaited pods of the phase are late, and too many of them to be tolerated.

        While the canary starts, a resource shortage ends it too: nobody benefits from a canary that waits for a GPU forever.
        Once it has passed, it waits for resources without a limit.
        """
        if phase in TRAFFIC_SHIFT_PHASES:
            return self.canary.exceeds_late_tolerance
        arms = (self.canary, self.control)
        return any(map(_exceeds_tolerance, arms)) or (
            self.is_stalled and not any(arm.late_pods.has_resource_shortage for arm in arms)
        )

    def waits_only_for_resources(self) -> bool:
        """Return whether everything that is late waits for resources: nothing is known of the canary then."""
        arms = (self.canary, self.control)
        return any(arm.late_pods.late_unschedulable_count for arm in arms) and not any(arm.late_pods.late_count for arm in arms)

    def next_late_at(self, phase: str) -> datetime | None:
        """Return when the next awaited pod of the phase becomes late."""
        arms = (self.canary,) if phase in TRAFFIC_SHIFT_PHASES else (self.canary, self.control)
        moments = [arm.late_pods.next_late_at for arm in arms] + ([] if phase in TRAFFIC_SHIFT_PHASES else [self.stalls_at])
        return min((moment for moment in moments if moment is not None), default=None)


def count_missing_ready_pods(snapshot: Snapshot, revisions: Iterable[str], now: datetime) -> int:
    """Return the ready pods that are missing, by the spec, beyond those of these revisions: others stand in until they are
    ready."""
    spec = snapshot.resource.spec
    pod_counts = (ArmPods.from_snapshot(snapshot, revision, now).counts for revision in revisions)
    return Capacity.from_spec(spec.replicas, spec.rollout.canary).missing_ready_pods(*pod_counts)


def _exceeds_tolerance(arm: ArmPods) -> bool:
    late_pods = arm.late_pods
    return replace(late_pods, late_count=late_pods.late_count + late_pods.late_unschedulable_count).exceeds_tolerance(
        arm.counts.requested
    )
