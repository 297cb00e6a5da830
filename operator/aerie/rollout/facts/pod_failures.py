"""Reasons why a pod is not ready, or was never created, in Kubernetes' own words, with the fix where it is evident.

Messages follow from the pods and their Deployment alone and contain no durations: a message that changes with the clock would
cause a write in every reconcile.

Guarantees: the engine is judged by its own container alone, whatever a sidecar does. A terminal pod (evicted, rejected by a
node) and one whose node is lost take no capacity, serve nothing, and never count as a pod that is starting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from aerie.manifests import naming
from aerie.rollout.reasons import PodFailureReason

KubernetesObject = Mapping[str, Any]

NODE_LOST_TIMEOUT = timedelta(minutes=1)
"""Time after the end of its grace period (deletionTimestamp) after which a terminating pod counts as stuck: its node is lost."""
MIN_CRASH_LOOP_RESTARTS = 3
"""Restarts of one engine from which on they are no accident."""
MIN_STABLE_RUN = timedelta(hours=1)
"""Run time after which an engine that ended is not in a crash loop, however often it has ended in its life."""
_IMAGE_PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})


@dataclass(frozen=True)
class PodFailure:
    """Reason why a pod is not ready."""

    reason: PodFailureReason
    message: str
    """A sentence that names the pod, or the Deployment that cannot create it."""

    @property
    def is_transient(self) -> bool:
        """Whether it may resolve automatically, without anybody acting."""
        return self.reason in ("Starting", "NotReady")

    @property
    def is_resource_shortage(self) -> bool:
        """Whether resources are missing: that says nothing of the revision."""
        return self.reason in ("QuotaExceeded", "Unschedulable")


@dataclass(frozen=True)
class PodCreationFailure:
    """Reason why a Deployment cannot create its pods, by its condition ReplicaFailure."""

    failure: PodFailure
    since: datetime | None

    @property
    def is_resource_shortage(self) -> bool:
        """Whether a quota is exhausted."""
        return self.failure.is_resource_shortage


_REASONS_BY_SEVERITY: tuple[PodFailureReason, ...] = (
    "CrashLoopBackOff",
    "ImagePullBackOff",
    "CreateContainerError",
    "PodFailed",
    "FailedCreate",
    "QuotaExceeded",
    "Unschedulable",
    "NotReady",
    "Starting",
)


def read_pod_creation_failure(deployment: KubernetesObject | None) -> PodCreationFailure | None:
    """Return why the Deployment cannot create pods: quota, PodSecurity, a webhook, no service account; None when it can."""
    if deployment is None:
        return None
    condition = _condition(deployment, "ReplicaFailure")
    if condition.get("status") != "True":
        return None
    cause = condition.get("message") or condition.get("reason") or "no reason given"
    reason: PodFailureReason = "QuotaExceeded" if "exceeded quota" in cause else "FailedCreate"
    since = condition.get("lastTransitionTime")
    message = f"Deployment {_name(deployment)} cannot create its pods: {cause}"
    return PodCreationFailure(PodFailure(reason, message), datetime.fromisoformat(since) if since else None)


def is_pod_terminal(pod: KubernetesObject) -> bool:
    """Return whether the pod has ended permanently and is replaced: evicted, rejected by its node, or ended with it."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def node_lost_at(pod: KubernetesObject) -> datetime | None:
    """Return when a terminating pod stops taking capacity, because its node is lost; None for all others."""
    deletion_timestamp = pod["metadata"].get("deletionTimestamp")
    return datetime.fromisoformat(deletion_timestamp) + NODE_LOST_TIMEOUT if deletion_timestamp else None


def is_pod_unschedulable(pod: KubernetesObject) -> bool:
    """Return whether no node takes the pod (condition PodScheduled is False)."""
    return _condition(pod, "PodScheduled").get("status") == "False"


def is_pod_ready(pod: KubernetesObject) -> bool:
    """Return whether the pod is ready and not terminating."""
    return _condition(pod, "Ready").get("status") == "True" and not pod["metadata"].get("deletionTimestamp")


def not_ready_since(pod: KubernetesObject) -> datetime | None:
    """Return when the pod ceased to be ready, got its node, or was created; None when it is ready, or when the time is unknown.

    The scheduler reports the node before its kubelet reports the condition Ready: until then, the time at which it got the node
    counts, so that a pod that has waited for a node is not late when it gets one.
    """
    if is_pod_ready(pod):
        return None
    changed_at = _condition(pod, "Ready").get("lastTransitionTime")
    times = [datetime.fromisoformat(changed_at)] if changed_at else []
    began_at = placed_at(pod) or _created_at(pod)
    return max([*times, began_at] if began_at is not None else times, default=None)


def placed_at(pod: KubernetesObject) -> datetime | None:
    """Return when the pod got its node, or was created where that time is unknown; None while it waits for a node."""
    if is_pod_unschedulable(pod):
        return None
    timestamp = _condition(pod, "PodScheduled").get("lastTransitionTime")
    return datetime.fromisoformat(timestamp) if timestamp else _created_at(pod)


def _created_at(pod: KubernetesObject) -> datetime | None:
    timestamp = pod["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(timestamp) if timestamp else None


def is_in_crash_loop(pod: KubernetesObject) -> bool:
    """Return whether the engine of the pod ends repeatedly. Restarts of days do not add up: its last run was a short one too."""
    engine = _engine_container_status(pod)
    if is_pod_ready(pod) or (engine.get("restartCount") or 0) < MIN_CRASH_LOOP_RESTARTS:
        return False
    state = engine.get("state") or {}
    last_termination = state.get("terminated") or (engine.get("lastState") or {}).get("terminated") or {}
    started_at, finished_at = last_termination.get("startedAt"), last_termination.get("finishedAt")
    return (
        not (started_at and finished_at)
        or datetime.fromisoformat(finished_at) - datetime.fromisoformat(started_at) < MIN_STABLE_RUN
    )


def count_restarts_since(pods: Sequence[KubernetesObject], since: datetime) -> dict[str, int]:
    """Return the restart count of each pod's engine by pod name, for the pods whose engine has failed since then."""
    restarts_by_pod: dict[str, int] = {}
    for pod in pods:
        failed_at = read_engine_failure_time(pod)
        if failed_at is not None and failed_at >= since:
            pending_restart = "terminated" in (_engine_container_status(pod).get("state") or {})  # not restarted yet
            restarts_by_pod[_name(pod)] = read_restart_count(pod) + pending_restart
    return restarts_by_pod


def read_restart_count(pod: KubernetesObject) -> int:
    """Return how often the pod's engine was restarted."""
    return _engine_container_status(pod).get("restartCount") or 0


def read_engine_failure_time(pod: KubernetesObject) -> datetime | None:
    """Return when the pod's engine failed last, in whole seconds; None where it has not.

    An engine that ended with status 0 was stopped on purpose, or is not at fault itself.
    """
    engine = _engine_container_status(pod)
    last_termination = (engine.get("lastState") or {}).get("terminated") or (engine.get("state") or {}).get("terminated") or {}
    finished_at = last_termination.get("finishedAt")
    return datetime.fromisoformat(finished_at) if finished_at and last_termination.get("exitCode") != 0 else None


def is_pod_unrecoverable(pod: KubernetesObject) -> bool:
    """Return whether the pod stays unready unless somebody changes something: a crash loop, a missing image or a missing
    setting."""
    failure = read_pod_failure(pod, {})
    return failure is not None and (failure.reason in ("ImagePullBackOff", "CreateContainerError") or is_in_crash_loop(pod))


def most_severe_failure(
    pods: Sequence[KubernetesObject], last_log_lines: Mapping[str, str], creation_failure: PodCreationFailure | None = None
) -> PodFailure | None:
    """Return the failure of these pods that most needs attention, of the first such pod by name; None when all are ready.

    A resource shortage is appended to a more severe failure. A few pods with that failure are tolerated, and then the shortage
    alone can be what is waited for.
    """
    failures = [failure for pod in sorted(pods, key=_name) if (failure := read_pod_failure(pod, last_log_lines)) is not None]
    if creation_failure is not None:
        failures.append(creation_failure.failure)
    most_severe = select_most_severe(*failures)
    shortage = select_most_severe(*(failure for failure in failures if failure.is_resource_shortage))
    if most_severe is None or shortage is None or most_severe.is_resource_shortage:
        return most_severe
    return replace(most_severe, message=f"{most_severe.message.rstrip('.')}; and {shortage.message}")


def select_most_severe(*failures: PodFailure) -> PodFailure | None:
    """Return the failure that most needs attention, the first of equal ones."""
    return min(failures, key=lambda failure: _REASONS_BY_SEVERITY.index(failure.reason), default=None)


def read_pod_failure(pod: KubernetesObject, last_log_lines: Mapping[str, str]) -> PodFailure | None:
    """Return why the pod is not ready; None when it is."""
    if is_pod_ready(pod):
        return None
    name, status = _name(pod), pod.get("status") or {}
    if status.get("phase") == "Failed":
        return PodFailure("PodFailed", f"pod {name} failed: {status.get('message') or status.get('reason') or 'no reason given'}")
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return PodFailure("Unschedulable", f"pod {name} is unschedulable: {scheduled.get('message') or 'no reason given'}")
    for container in _container_statuses(status):
        if (failure := _read_container_failure(name, container, last_log_lines)) is not None:
            return failure
    if any(container.get("started") for container in status.get("containerStatuses") or []):
        return PodFailure("NotReady", f"pod {name} has started, but its readiness probe fails")
    return PodFailure("Starting", f"pod {name} is starting")


def find_crashed_container(pod: KubernetesObject) -> str | None:
    """Return the container whose last log lines would explain why the pod is not ready."""
    for container in _container_statuses(pod.get("status") or {}):
        state = container.get("state") or {}
        if not container.get("ready") and ("terminated" in (container.get("lastState") or {}) or "terminated" in state):
            return str(container["name"])
    return None


def _read_container_failure(pod_name: str, container: KubernetesObject, last_log_lines: Mapping[str, str]) -> PodFailure | None:
    container_name, state = container["name"], container.get("state") or {}
    waiting: Mapping[str, Any] = state.get("waiting") or {}
    reason, message = waiting.get("reason") or "", waiting.get("message") or ""
    if reason in _IMAGE_PULL_REASONS:
        return PodFailure("ImagePullBackOff", f"pod {pod_name} cannot pull image {container.get('image')}: {message or reason}")
    termination = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    if termination and not container.get("ready") and termination.get("exitCode") != 0:
        # The restart count is left out: it would change the message with each restart.
        log_text = last_log_lines.get(pod_name) or termination.get("message") or ""
        exit_text = f"exited with status {termination.get('exitCode')}" + (
            f" ({termination['reason']})" if termination.get("reason") else ""
        )
        last_lines_text = f"; last log lines: {log_text.strip()}" if log_text.strip() else ""
        return PodFailure("CrashLoopBackOff", f"container {container_name} of pod {pod_name} {exit_text}{last_lines_text}")
    if reason not in ("", "ContainerCreating", "PodInitializing", "CrashLoopBackOff"):
        return PodFailure(
            "CreateContainerError", f"container {container_name} of pod {pod_name} cannot be created: {message or reason}"
        )
    return None


def _container_statuses(status: Mapping[str, Any]) -> Iterator[KubernetesObject]:
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def _engine_container_status(pod: KubernetesObject) -> KubernetesObject:
    """Return the status of the engine's container."""
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    engine: KubernetesObject = next(
        (container for container in containers if container.get("name") == naming.ENGINE_CONTAINER), {}
    )
    return engine


def _condition(item: KubernetesObject, kind: str) -> Mapping[str, Any]:
    """Return a condition of a pod or a Deployment; empty where it has none of that type."""
    conditions = (item.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _name(pod: KubernetesObject) -> str:
    return str(pod["metadata"]["name"])
