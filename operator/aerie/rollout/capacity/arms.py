"""The arms of a rollout as they are, and how many pods each is to have in the phase that the canary is in.

Guarantee: pure; the numbers are those of capacity.py, for every phase of machine.py, and of lateness.py: a few late pods of many
hold no phase up, and no phase is late while none of its pods is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from aerie.api.status import TRAFFIC_SHIFT_PHASES
from aerie.rollout.capacity import replica_counts
from aerie.rollout.capacity.replica_counts import ArmReplicas, Capacity, PodCounts
from aerie.rollout.facts import pod_failures as pods
from aerie.rollout.facts.late_pods import STALL_DEADLINE_MULTIPLE, LatePods, count_late_pods
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot


@dataclass(frozen=True)
class ArmPods:
    """The pods of one arm."""

    live_pods: tuple[KubernetesObject, ...]
    terminal_pods: tuple[KubernetesObject, ...]
    counts: PodCounts
    late_pods: LatePods

    @classmethod
    def from_snapshot(
        cls, snapshot: Snapshot, revision: str, now: datetime, *, control: bool = False, stalled_since: datetime | None = None
    ) -> ArmPods:
        alive = snapshot.live_pods(revision, control=control)
        deployment = snapshot.deployment(revision, control=control)
        replicas = (deployment or {}).get("spec", {}).get("replicas") or 0
        late = count_late_pods(
            alive,
            replicas,
            pods.read_pod_creation_failure(deployment),
            stalled_since,
            snapshot.resource.spec.rollout.progress_deadline,
            now,
        )
        asked = max(replicas, len(alive))
        counts = PodCounts(
            asked,
            snapshot.terminating_pod_count(revision, control=control),
            snapshot.ready_pod_count(revision, control=control),
            tolerated_late=late.tolerated_count(asked),
        )
        return cls(alive, snapshot.terminal_pods(revision, control=control), counts, late)

    @property
    def exceeds_late_tolerance(self) -> bool:
        """Whether so many pods are late that it counts against the revision."""
        return self.late_pods.exceeds_tolerance(self.counts.requested)


@dataclass(frozen=True)
class RolloutPods:
    """The arms as they are, and the places that there are for them."""

    capacity: Capacity
    stable: ArmPods
    canary: ArmPods
    control: ArmPods
    is_stalled: bool = False
    """Whether the arm that grows has got no further for so long that it is late, whether its pods have ever been made or not."""
    stalls_at: datetime | None = None
    """When it will be; None when it is, or is not waited for."""

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
        """`stalled_since`: since when pods of the arm that `grows` have been waited for without progress, by the status."""
        spec = snapshot.resource.spec
        stalls = stalled_since + STALL_DEADLINE_MULTIPLE * spec.rollout.progress_deadline if stalled_since is not None else None
        forth, back = (stalled_since, None) if growing_arm == "canary" else (None, stalled_since)
        return cls(
            Capacity.from_spec(spec.replicas, spec.rollout.canary),
            ArmPods.from_snapshot(snapshot, stable, now, stalled_since=back),
            ArmPods.from_snapshot(snapshot, canary, now, stalled_since=forth),
            ArmPods.from_snapshot(snapshot, stable, now, control=True, stalled_since=forth),
            stalls is not None and now >= stalls,
            stalls if stalls is not None and now < stalls else None,
        )

    def target_replicas(self, phase: str, ramp: Sequence[int], step: int | None, *, by_pods: bool) -> ArmReplicas:
        """Pods that each arm is to have in this phase."""
        arms = (self.stable.counts, self.canary.counts, self.control.counts)
        if phase in TRAFFIC_SHIFT_PHASES:
            return replica_counts.replicas_during_ramp_up(
                self.capacity, self.canary_target(phase, ramp, step, by_pods=by_pods), *arms
            )
        return replica_counts.with_substitute_control_pods(
            replica_counts.replicas_during_analysis(self.capacity), self.capacity, *arms
        )

    def canary_target(self, phase: str, ramp: Sequence[int], step: int | None, *, by_pods: bool) -> int:
        """Serving pods that the canary needs in this phase."""
        if phase == "Promoting":
            return self.capacity.replicas
        if phase == "Ramping":
            return replica_counts.canary_replicas_for_traffic(
                self.capacity, replica_counts.ramp_step_percent(ramp, step), by_pods=by_pods
            )
        return self.capacity.canary_replicas

    def has_ready_pods(self, phase: str, ramp: Sequence[int], step: int | None, *, by_pods: bool) -> bool:
        """Whether the pods that the phase asks for serve, but for the few that are late."""
        enough = self.canary.counts.ready_or_tolerated >= self.canary_target(phase, ramp, step, by_pods=by_pods)
        controlled = phase in TRAFFIC_SHIFT_PHASES or self.control.counts.ready_or_tolerated >= self.capacity.control_replicas
        return enough and controlled

    @property
    def is_rollback_blocked(self) -> bool:
        """Whether so many stable pods are late, for whatever reason, that the way back to them does not end by itself."""
        return _exceeds_tolerance(self.stable) or (self.is_stalled and not self.stable.late_pods.has_resource_shortage)

    @property
    def waits_only_for_control(self) -> bool:
        """Whether a canary that starts waits for pods of the stable revision alone."""
        return (
            self.canary.counts.ready_or_tolerated >= self.capacity.canary_replicas
            and self.control.counts.ready_or_tolerated < self.capacity.control_replicas
        )

    def exceeds_deadline(self, phase: str) -> bool:
        """Whether pods that the phase waits for are late, and too many of them to be excused.

        While the canary starts, a lack of room ends it too: nobody is served by a canary that waits for a GPU for ever. Once it
        is accepted, room is all that it waits for.
        """
        if phase in TRAFFIC_SHIFT_PHASES:
            return self.canary.exceeds_late_tolerance
        groups = (self.canary, self.control)
        return any(map(_exceeds_tolerance, groups)) or (
            self.is_stalled and not any(group.late_pods.has_resource_shortage for group in groups)
        )

    def waits_only_for_resources(self) -> bool:
        """Whether all that is late waits for room: of what the canary is, nothing is known then."""
        groups = (self.canary, self.control)
        return any(group.late_pods.late_unschedulable_count for group in groups) and not any(
            group.late_pods.late_count for group in groups
        )

    def next_late_at(self, phase: str) -> datetime | None:
        """When the next pod that the phase waits for becomes late."""
        groups = (self.canary,) if phase in TRAFFIC_SHIFT_PHASES else (self.canary, self.control)
        moments = [group.late_pods.next_late_at for group in groups] + ([] if phase in TRAFFIC_SHIFT_PHASES else [self.stalls_at])
        return min((moment for moment in moments if moment is not None), default=None)


def count_missing_ready_pods(snapshot: Snapshot, revisions: Iterable[str], now: datetime) -> int:
    """Serving pods that the spec owes its users beyond those of these revisions: others stand in for them until they serve."""
    spec = snapshot.resource.spec
    groups = (ArmPods.from_snapshot(snapshot, revision, now).counts for revision in revisions)
    return Capacity.from_spec(spec.replicas, spec.rollout.canary).missing_ready_pods(*groups)


def _exceeds_tolerance(group: ArmPods) -> bool:
    counted = group.late_pods
    return replace(counted, late_count=counted.late_count + counted.late_unschedulable_count).exceeds_tolerance(
        group.counts.requested
    )
