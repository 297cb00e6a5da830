"""Which pods of a group are late: those that were asked for and have not served for spec.rollout.progressDeadline.

    a pod that does not serve ─► late when it has not served for the deadline, by its own conditions
    a pod that was never made ─► late when its Deployment has reported ReplicaFailure for the deadline
    no progress at all        ─► whatever is asked for and does not serve is late after STALL deadlines

Guarantees: time alone makes no pod late. A step that lasts for hours because its pods come in batches, a fleet of any size, and a
raised spec.replicas make none late; nor does a pod that is ready, dead, or on its way out. A wait always ends: pods that are
replaced again and again, each of them too young to be late, are late when the group has come no further for STALL deadlines.

A pod that waits for room (no node takes it, a quota is exhausted) tells nothing of its revision and is counted apart; while there
is such a pod, a lack of progress means nothing. Of many pods a few may be late for their nodes' sake: `tolerated` says how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import KubernetesObject

STALL_DEADLINE_MULTIPLE = 2
"""Deadlines without any progress after which every pod that is waited for is late."""
PODS_PER_TOLERATED_FAILURE = 20
"""One pod in so many may be late, or crash, before it counts against the revision: 5 %."""


def max_tolerated_failures(pod_count: int) -> int:
    """How many of `size` pods may fail before it is the revision's fault: 5 %, at least one, and never half of them."""
    return 0 if pod_count < 3 else max(1, pod_count // PODS_PER_TOLERATED_FAILURE)


@dataclass(frozen=True)
class LatePods:
    """Of one group of pods, at one moment."""

    late_count: int = 0
    """Late pods, those that wait for room left out."""
    late_unschedulable_count: int = 0
    """Late pods that wait for room."""
    has_resource_shortage: bool = False
    """Whether any pod waits for room, late or not."""
    next_late_at: datetime | None = None
    """When the next pod that is waited for now becomes late; None when none is waited for, or all of them are late."""

    def tolerated_count(self, pod_count: int) -> int:
        """Late pods of a group of `size` that hold nothing up, because they are few."""
        return min(self.late_count + self.late_unschedulable_count, max_tolerated_failures(pod_count))

    def exceeds_tolerance(self, pod_count: int) -> bool:
        """Whether so many of a group of `size` are late that it counts against the revision."""
        return self.late_count > max_tolerated_failures(pod_count)


def count_late_pods(
    live_pods: Sequence[KubernetesObject],
    requested: int,
    creation_failure: pod_failures.PodCreationFailure | None,
    stalled_since: datetime | None,
    deadline: timedelta,
    now: datetime,
) -> LatePods:
    """The lateness of a group of which `asked` pods are asked for and `alive` are there. `refusal`: why its Deployment cannot
    make the others; `stalled_since`: since when the group has been waited for without progress, where that is known."""
    stalled = stalled_since + STALL_DEADLINE_MULTIPLE * deadline if stalled_since is not None else None
    late, roomless, coming = 0, 0, []
    wants_room = creation_failure is not None and creation_failure.is_resource_shortage
    for pod in live_pods:
        since = pod_failures.not_ready_since(pod)
        if pod_failures.is_pod_ready(pod) or since is None:
            continue
        wants_room = wants_room or pod_failures.is_pod_unschedulable(pod)
        at = since + deadline if stalled is None else min(since + deadline, stalled)
        if now < at:
            coming.append(at)
        elif pod_failures.is_pod_unschedulable(pod):
            roomless += 1
        else:
            late += 1
    missing = max(0, requested - len(live_pods))
    at_last = (
        creation_failure.since + deadline if creation_failure is not None and creation_failure.since is not None else stalled
    )
    if missing and at_last is not None:
        if now < at_last:
            coming.append(at_last)
        elif creation_failure is not None and creation_failure.is_resource_shortage:
            roomless += missing
        else:
            late += missing
    return LatePods(late, roomless, wants_room, min(coming, default=None))
