"""Late pods of an arm: those that were requested and have not been ready for spec.rollout.progressDeadline.

    a pod that is not ready     ─► late when it has not been ready for the deadline, by its own conditions; from
                                    the time at which it has a node, where it has waited for one
    a pod that was not created  ─► late when its Deployment has reported ReplicaFailure for the deadline
    no progress at all          ─► each requested pod that is not ready is late after STALL_DEADLINE_MULTIPLE deadlines

Guarantees: time alone makes no pod late. A step that lasts for hours because its pods come in batches, any number of pods, and
a raised spec.replicas make none late. A pod that is ready, terminal or terminating is never late. A wait always ends: pods
that are replaced repeatedly, each of them too young to be late, are late once the arm has made no progress for
STALL_DEADLINE_MULTIPLE deadlines.

A pod that waits for resources (no node takes it, a quota is exhausted) says nothing of its revision and is counted separately;
while there is such a pod, a lack of progress means nothing. Of many pods a few may be late because of their nodes:
`max_tolerated_failures` is their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import KubernetesObject

STALL_DEADLINE_MULTIPLE = 2
"""Deadlines without any progress after which every awaited pod is late."""
PODS_PER_TOLERATED_FAILURE = 20
"""Pods for each of which one may be late, or crash, before it counts against the revision: 5 %."""


def max_tolerated_failures(pod_count: int) -> int:
    """Return how many of `pod_count` pods may fail before it counts against the revision: 5 %, at least one, and never half of
    them."""
    return 0 if pod_count < 3 else max(1, pod_count // PODS_PER_TOLERATED_FAILURE)


@dataclass(frozen=True)
class LatePods:
    """Late pods of one arm at one moment."""

    late_count: int = 0
    """Late pods without those that wait for resources."""
    late_unschedulable_count: int = 0
    """Late pods that wait for resources."""
    has_resource_shortage: bool = False
    """Whether any pod waits for resources, late or not."""
    next_late_at: datetime | None = None
    """Time at which the next awaited pod becomes late; None when none is awaited, or all of them are late."""

    def tolerated_count(self, pod_count: int) -> int:
        """Return how many late pods, of an arm of `pod_count`, delay nothing because they are few."""
        return min(self.late_count + self.late_unschedulable_count, max_tolerated_failures(pod_count))

    def exceeds_tolerance(self, pod_count: int) -> bool:
        """Return whether so many of `pod_count` pods are late that it counts against the revision."""
        return self.late_count > max_tolerated_failures(pod_count)


def count_late_pods(
    live_pods: Sequence[KubernetesObject],
    requested: int,
    creation_failure: pod_failures.PodCreationFailure | None,
    stalled_since: datetime | None,
    deadline: timedelta,
    now: datetime,
) -> LatePods:
    """Return the late pods of an arm with `requested` pods, of which `live_pods` exist.

    `creation_failure`: why its Deployment cannot create the others. `stalled_since`: since when the arm has been awaited
    without progress, where that is known.
    """
    stalled_at = stalled_since + STALL_DEADLINE_MULTIPLE * deadline if stalled_since is not None else None
    late_count, late_unschedulable_count, late_times = 0, 0, []
    has_resource_shortage = creation_failure is not None and creation_failure.is_resource_shortage
    for pod in live_pods:
        not_ready_since = pod_failures.not_ready_since(pod)
        if pod_failures.is_pod_ready(pod) or not_ready_since is None:
            continue
        has_resource_shortage = has_resource_shortage or pod_failures.is_pod_unschedulable(pod)
        late_at = not_ready_since + deadline if stalled_at is None else min(not_ready_since + deadline, stalled_at)
        if now < late_at:
            late_times.append(late_at)
        elif pod_failures.is_pod_unschedulable(pod):
            late_unschedulable_count += 1
        else:
            late_count += 1
    missing_count = max(0, requested - len(live_pods))
    missing_late_at = (
        creation_failure.since + deadline if creation_failure is not None and creation_failure.since is not None else stalled_at
    )
    if missing_count and missing_late_at is not None:
        if now < missing_late_at:
            late_times.append(missing_late_at)
        elif creation_failure is not None and creation_failure.is_resource_shortage:
            late_unschedulable_count += missing_count
        else:
            late_count += missing_count
    return LatePods(late_count, late_unschedulable_count, has_resource_shortage, min(late_times, default=None))
