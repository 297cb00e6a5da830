"""Faults of a canary that need no statistics: any of them ends it at once.

Guarantees: only what the canary's own pods show is said, and only where the pods that it is compared with show it less: a fault
of both is a fault of the cluster. No pod decides over a fleet: of many pods a few may crash, fail or lie (lateness.tolerated).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta

from aerie.rollout.capacity.arms import ArmPods
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.late_pods import max_tolerated_failures
from aerie.rollout.facts.snapshot import KubernetesObject


def find_abort_reasons(
    canary: ArmPods,
    reference: ArmPods,
    invalid_metrics: Mapping[str, str],
    not_ready_timeout: timedelta | None,
    last_lines: Mapping[str, str],
    now: datetime,
) -> Iterator[str]:
    """Sentences on the canary's pods. `others`: the pods that it is compared with; `unreadable`: what is wrong with the metrics
    page of a pod, by its name; `patience`: for how long all pods of the canary may be away; None: as long as they like."""
    crashing = _crash_looping_pods(canary)
    if _is_canary_fault(crashing, canary, _crash_looping_pods(reference), reference):
        trouble = pod_failures.read_pod_failure(crashing[0], last_lines)
        yield f"It crashes again and again: {trouble.message if trouble else crashing[0]['metadata']['name']}."
    failing = _recently_failed_pods(canary, now)
    if len(failing) >= pod_failures.MIN_CRASH_LOOP_RESTARTS and _is_canary_fault(
        failing, canary, _recently_failed_pods(reference, now), reference
    ):
        trouble = pod_failures.read_pod_failure(failing[0], last_lines)
        said = trouble.message if trouble else failing[0]["metadata"]["name"]
        yield f"Its pods fail again and again: {said.rstrip('.')}."
    lying = [pod for pod in canary.live_pods if pod["metadata"]["name"] in invalid_metrics]
    if _is_canary_fault(
        lying, canary, [pod for pod in reference.live_pods if pod["metadata"]["name"] in invalid_metrics], reference
    ):
        name = lying[0]["metadata"]["name"]
        yield f"The metrics of pod {name} cannot be believed: {invalid_metrics[name].rstrip('.')}."
    if not_ready_timeout is not None and canary.live_pods and not any(map(pod_failures.is_pod_ready, canary.live_pods)):
        since = max(
            (moment for pod in canary.live_pods if (moment := pod_failures.not_ready_since(pod)) is not None), default=None
        )
        if since is not None and now >= since + not_ready_timeout:
            yield f"None of its pods has served since {since:%H:%M:%S}."


def _is_canary_fault(
    mine: Collection[KubernetesObject], canary: ArmPods, theirs: Collection[KubernetesObject], others: ArmPods
) -> bool:
    """Whether the fault is the canary's: more of its pods have it than a node's fault explains, and a larger share of them
    than of the others."""
    if len(mine) <= max_tolerated_failures(canary.counts.requested):
        return False
    return len(mine) * max(1, others.counts.requested) > len(theirs) * max(1, canary.counts.requested)


def _crash_looping_pods(group: ArmPods) -> list[KubernetesObject]:
    return [pod for pod in group.live_pods if pod_failures.is_in_crash_loop(pod)]


def _recently_failed_pods(group: ArmPods, now: datetime) -> list[KubernetesObject]:
    """Pods of the last hour that have ended for good: evicted again and again, or refused by every node."""
    made = ((pod, pod["metadata"].get("creationTimestamp")) for pod in group.terminal_pods)
    return [pod for pod, at in made if at and datetime.fromisoformat(at) > now - pod_failures.MIN_STABLE_RUN]
