"""Hard failures of a canary. They need no statistics: any of them aborts the canary immediately.

Guarantees: a reason names only what the canary's own pods show, and only where the reference pods show it less. A fault of both
is a fault of the cluster. No single pod decides for all: of many pods a few may crash, fail or report invalid metrics
(late_pods.max_tolerated_failures).
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
    """Yield a message for each hard failure of the canary's pods.

    `reference`: pods that the canary is compared with. `invalid_metrics`: what is wrong with the metrics of a pod, by pod name.
    `not_ready_timeout`: how long all pods of the canary may be not ready; None: without limit.
    """
    crashing_pods = _crash_looping_pods(canary)
    if _is_canary_fault(crashing_pods, canary, _crash_looping_pods(reference), reference):
        pod_failure = pod_failures.read_pod_failure(crashing_pods[0], last_lines)
        yield f"Its pods are in a crash loop: {pod_failure.message if pod_failure else crashing_pods[0]['metadata']['name']}."
    failed_pods = _recently_failed_pods(canary, now)
    if len(failed_pods) >= pod_failures.MIN_CRASH_LOOP_RESTARTS and _is_canary_fault(
        failed_pods, canary, _recently_failed_pods(reference, now), reference
    ):
        pod_failure = pod_failures.read_pod_failure(failed_pods[0], last_lines)
        message = pod_failure.message if pod_failure else failed_pods[0]["metadata"]["name"]
        yield f"Its pods fail repeatedly: {message.rstrip('.')}."
    invalid_pods = [pod for pod in canary.live_pods if pod["metadata"]["name"] in invalid_metrics]
    if _is_canary_fault(
        invalid_pods, canary, [pod for pod in reference.live_pods if pod["metadata"]["name"] in invalid_metrics], reference
    ):
        pod_name = invalid_pods[0]["metadata"]["name"]
        yield f"The metrics of pod {pod_name} are invalid: {invalid_metrics[pod_name].rstrip('.')}."
    if not_ready_timeout is not None and canary.live_pods and not any(map(pod_failures.is_pod_ready, canary.live_pods)):
        since = max(
            (not_ready_since for pod in canary.live_pods if (not_ready_since := pod_failures.not_ready_since(pod)) is not None),
            default=None,
        )
        if since is not None and now >= since + not_ready_timeout:
            yield f"None of its pods has been ready since {since:%H:%M:%S} UTC."


def _is_canary_fault(
    affected_canary_pods: Collection[KubernetesObject],
    canary: ArmPods,
    affected_reference_pods: Collection[KubernetesObject],
    reference: ArmPods,
) -> bool:
    """Return whether the fault is the canary's: it affects more canary pods than the fault of one node explains, and a larger
    share of them than of the reference pods."""
    if len(affected_canary_pods) <= max_tolerated_failures(canary.counts.requested):
        return False
    return len(affected_canary_pods) * max(1, reference.counts.requested) > len(affected_reference_pods) * max(
        1, canary.counts.requested
    )


def _crash_looping_pods(arm_pods: ArmPods) -> list[KubernetesObject]:
    return [pod for pod in arm_pods.live_pods if pod_failures.is_in_crash_loop(pod)]


def _recently_failed_pods(arm_pods: ArmPods, now: datetime) -> list[KubernetesObject]:
    """Return terminated pods that got their nodes within the last hour: evicted repeatedly, or rejected by every node."""
    placed_pods = ((pod, pod_failures.placed_at(pod)) for pod in arm_pods.terminal_pods)
    return [pod for pod, placed_at in placed_pods if placed_at is not None and placed_at > now - pod_failures.MIN_STABLE_RUN]
