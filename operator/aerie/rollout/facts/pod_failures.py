"""Why a pod does not serve, or was never made, in the words of the cluster, with what to do where it is plain.

Only what is in the pods and their Deployment is said, and no durations: a sentence that changes with the clock would be a write
with every look.

Guarantees: the engine is judged by its own container alone, whatever a sidecar does. A dead pod (evicted, refused by a node) and
one whose node is lost hold no place, serve nothing, and are never taken for a pod that is coming.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from aerie.manifests import naming

KubernetesObject = Mapping[str, Any]

NODE_LOST_TIMEOUT = timedelta(minutes=1)
"""After the end of its grace period, which is what deletionTimestamp says, a pod is not coming down: its node is lost."""
MIN_CRASH_LOOP_RESTARTS = 3
"""Restarts of one engine that are no accident any more."""
MIN_STABLE_RUN = timedelta(hours=1)
"""An engine that ran for so long before it ended is not in a crash loop, however often it has ended in its life."""
_IMAGE_PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})


@dataclass(frozen=True)
class PodFailure:
    """What keeps a pod from serving."""

    reason: str
    """One word: Crash, ImagePull, Config, Rejected, PodsRefused, QuotaExceeded, Unschedulable, NotReady, Starting."""
    message: str
    """A sentence that names the pod, or the Deployment that cannot make it."""

    @property
    def is_transient(self) -> bool:
        """Whether it may pass by itself, without anybody doing anything."""
        return self.reason in ("Starting", "NotReady")

    @property
    def is_resource_shortage(self) -> bool:
        """Whether room is what is lacking: it tells nothing of the revision."""
        return self.reason in ("QuotaExceeded", "Unschedulable")


@dataclass(frozen=True)
class PodCreationFailure:
    """Why a Deployment cannot make its pods, by its condition ReplicaFailure."""

    failure: PodFailure
    since: datetime | None

    @property
    def is_resource_shortage(self) -> bool:
        """Whether a quota is exhausted."""
        return self.failure.is_resource_shortage


_REASONS_BY_SEVERITY = (
    "Crash",
    "ImagePull",
    "Config",
    "Rejected",
    "PodsRefused",
    "QuotaExceeded",
    "Unschedulable",
    "NotReady",
    "Starting",
)


def read_pod_creation_failure(deployment: KubernetesObject | None) -> PodCreationFailure | None:
    """Why the Deployment cannot make pods: quota, PodSecurity, a webhook, no service account; None when it can."""
    if deployment is None:
        return None
    condition = _condition(deployment, "ReplicaFailure")
    if condition.get("status") != "True":
        return None
    words = condition.get("message") or condition.get("reason") or "no reason is given"
    reason = "QuotaExceeded" if "exceeded quota" in words else "PodsRefused"
    since = condition.get("lastTransitionTime")
    message = f"Deployment {_name(deployment)} cannot make its pods: {words}"
    return PodCreationFailure(PodFailure(reason, message), datetime.fromisoformat(since) if since else None)


def is_pod_terminal(pod: KubernetesObject) -> bool:
    """Whether the pod has ended for good, and is replaced: evicted, refused by its node, or ended with it."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def node_lost_at(pod: KubernetesObject) -> datetime | None:
    """From when on a pod that is on its way out holds no place any more, because its node is lost; None for all others."""
    deleted = pod["metadata"].get("deletionTimestamp")
    return datetime.fromisoformat(deleted) + NODE_LOST_TIMEOUT if deleted else None


def is_pod_unschedulable(pod: KubernetesObject) -> bool:
    """Whether no node takes the pod."""
    return _condition(pod, "PodScheduled").get("status") == "False"


def is_pod_ready(pod: KubernetesObject) -> bool:
    """Whether the pod serves."""
    return _condition(pod, "Ready").get("status") == "True" and not pod["metadata"].get("deletionTimestamp")


def not_ready_since(pod: KubernetesObject) -> datetime | None:
    """When the pod ceased to serve, or was made; None when it serves, or when nothing tells."""
    if is_pod_ready(pod):
        return None
    told = _condition(pod, "Ready").get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(told) if told else None


def is_in_crash_loop(pod: KubernetesObject) -> bool:
    """Whether the engine of the pod ends again and again. Restarts of days do not add up: its last run was a short one too."""
    engine = _engine_container_status(pod)
    if is_pod_ready(pod) or (engine.get("restartCount") or 0) < MIN_CRASH_LOOP_RESTARTS:
        return False
    state = engine.get("state") or {}
    ended = state.get("terminated") or (engine.get("lastState") or {}).get("terminated") or {}
    began, over = ended.get("startedAt"), ended.get("finishedAt")
    return not (began and over) or datetime.fromisoformat(over) - datetime.fromisoformat(began) < MIN_STABLE_RUN


def count_restarts_since(pods: Sequence[KubernetesObject], since: datetime) -> dict[str, int]:
    """By name, how often the engine of a pod has been restarted, of those pods whose engine has ended since then.

    An engine that ended with status 0 was told to, or has no fault of its own.
    """
    found: dict[str, int] = {}
    for pod in pods:
        engine = _engine_container_status(pod)
        ended = (engine.get("lastState") or {}).get("terminated") or (engine.get("state") or {}).get("terminated") or {}
        over = ended.get("finishedAt")
        if over and ended.get("exitCode") != 0 and datetime.fromisoformat(over) >= since:
            waits = "terminated" in (engine.get("state") or {})  # it is not restarted yet
            found[_name(pod)] = (engine.get("restartCount") or 0) + waits
    return found


def is_pod_unrecoverable(pod: KubernetesObject) -> bool:
    """Whether the pod will not serve unless somebody changes something: a crash loop, an image or a setting that is not there."""
    trouble = read_pod_failure(pod, {})
    return trouble is not None and (trouble.reason in ("ImagePull", "Config") or is_in_crash_loop(pod))


def most_severe_failure(
    pods: Sequence[KubernetesObject], last_log_lines: Mapping[str, str], creation_failure: PodCreationFailure | None = None
) -> PodFailure | None:
    """The trouble of a group that most needs somebody, of the first pod by name that has it; None when all serve. A lack of room
    is told beside a graver one: a few pods with that are excused, and then room alone can be what is waited for."""
    troubles = [trouble for pod in sorted(pods, key=_name) if (trouble := read_pod_failure(pod, last_log_lines)) is not None]
    if creation_failure is not None:
        troubles.append(creation_failure.failure)
    gravest, room = (
        select_most_severe(*troubles),
        select_most_severe(*(trouble for trouble in troubles if trouble.is_resource_shortage)),
    )
    if gravest is None or room is None or gravest.is_resource_shortage:
        return gravest
    return replace(gravest, message=f"{gravest.message.rstrip('.')}; and {room.message}")


def select_most_severe(*failures: PodFailure) -> PodFailure | None:
    """The trouble that most needs somebody, the first of equal ones."""
    return min(failures, key=lambda trouble: _REASONS_BY_SEVERITY.index(trouble.reason), default=None)


def read_pod_failure(pod: KubernetesObject, last_log_lines: Mapping[str, str]) -> PodFailure | None:
    """What keeps the pod from serving; None when it serves."""
    if is_pod_ready(pod):
        return None
    name, status = _name(pod), pod.get("status") or {}
    if status.get("phase") == "Failed":
        return PodFailure(
            "Rejected", f"pod {name} failed: {status.get('message') or status.get('reason') or 'no reason is given'}"
        )
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return PodFailure("Unschedulable", f"pod {name} has no node: {scheduled.get('message') or 'no reason is given'}")
    for container in _container_statuses(status):
        if (trouble := _read_container_failure(name, container, last_log_lines)) is not None:
            return trouble
    if any(container.get("started") for container in status.get("containerStatuses") or []):
        return PodFailure("NotReady", f"pod {name} has started and does not answer its readiness probe")
    return PodFailure("Starting", f"pod {name} is starting")


def find_crashed_container(pod: KubernetesObject) -> str | None:
    """The container whose last lines would tell why the pod does not serve."""
    for container in _container_statuses(pod.get("status") or {}):
        state = container.get("state") or {}
        if not container.get("ready") and ("terminated" in (container.get("lastState") or {}) or "terminated" in state):
            return str(container["name"])
    return None


def _read_container_failure(pod: str, container: KubernetesObject, last_lines: Mapping[str, str]) -> PodFailure | None:
    name, state = container["name"], container.get("state") or {}
    waiting: Mapping[str, Any] = state.get("waiting") or {}
    reason, said = waiting.get("reason") or "", waiting.get("message") or ""
    if reason in _IMAGE_PULL_REASONS:
        return PodFailure("ImagePull", f"pod {pod} cannot get the image {container.get('image')}: {said or reason}")
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    if ended and not container.get("ready") and ended.get("exitCode") != 0:
        # The count of restarts would be another sentence with each of them.
        lines = last_lines.get(pod) or ended.get("message") or ""
        how = f"ended with status {ended.get('exitCode')}" + (f" ({ended['reason']})" if ended.get("reason") else "")
        told = f"; its last lines: {lines.strip()}" if lines.strip() else ""
        return PodFailure("Crash", f"container {name} of pod {pod} {how}{told}")
    if reason not in ("", "ContainerCreating", "PodInitializing", "CrashLoopBackOff"):
        return PodFailure("Config", f"container {name} of pod {pod} cannot be made: {said or reason}")
    return None


def _container_statuses(status: Mapping[str, Any]) -> Iterator[KubernetesObject]:
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def _engine_container_status(pod: KubernetesObject) -> KubernetesObject:
    """The status of the engine's container."""
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    engine: KubernetesObject = next(
        (container for container in containers if container.get("name") == naming.ENGINE_CONTAINER), {}
    )
    return engine


def _condition(item: KubernetesObject, kind: str) -> Mapping[str, Any]:
    """The condition of a pod or a Deployment."""
    conditions = (item.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _name(pod: KubernetesObject) -> str:
    return str(pod["metadata"]["name"])
