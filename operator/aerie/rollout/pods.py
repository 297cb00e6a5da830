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

from aerie.resources import names

Object = Mapping[str, Any]

HANGS = timedelta(minutes=1)
"""After the end of its grace period, which is what deletionTimestamp says, a pod is not coming down: its node is lost."""
CRASHES = 3
"""Restarts of one engine that are no accident any more."""
LONG_RUN = timedelta(hours=1)
"""An engine that ran for so long before it ended is not in a crash loop, however often it has ended in its life."""
_PULLS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})


@dataclass(frozen=True)
class Trouble:
    """What keeps a pod from serving."""

    reason: str
    """One word: Crash, ImagePull, Config, Rejected, PodsRefused, QuotaExceeded, Unschedulable, NotReady, Starting."""
    message: str
    """A sentence that names the pod, or the Deployment that cannot make it."""

    @property
    def waits(self) -> bool:
        """Whether it may pass by itself, without anybody doing anything."""
        return self.reason in ("Starting", "NotReady")

    @property
    def for_room(self) -> bool:
        """Whether room is what is lacking: it tells nothing of the revision."""
        return self.reason in ("QuotaExceeded", "Unschedulable")


@dataclass(frozen=True)
class Refusal:
    """Why a Deployment cannot make its pods, by its condition ReplicaFailure."""

    trouble: Trouble
    since: datetime | None

    @property
    def for_room(self) -> bool:
        """Whether a quota is exhausted."""
        return self.trouble.for_room


_WORST = (
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


def refusal_of(deployment: Object | None) -> Refusal | None:
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
    return Refusal(Trouble(reason, message), datetime.fromisoformat(since) if since else None)


def dead(pod: Object) -> bool:
    """Whether the pod has ended for good, and is replaced: evicted, refused by its node, or ended with it."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def hangs_at(pod: Object) -> datetime | None:
    """From when on a pod that is on its way out holds no place any more, because its node is lost; None for all others."""
    deleted = pod["metadata"].get("deletionTimestamp")
    return datetime.fromisoformat(deleted) + HANGS if deleted else None


def waits_for_room(pod: Object) -> bool:
    """Whether no node takes the pod."""
    return _condition(pod, "PodScheduled").get("status") == "False"


def ready(pod: Object) -> bool:
    """Whether the pod serves."""
    return _condition(pod, "Ready").get("status") == "True" and not pod["metadata"].get("deletionTimestamp")


def not_ready_since(pod: Object) -> datetime | None:
    """When the pod ceased to serve, or was made; None when it serves, or when nothing tells."""
    if ready(pod):
        return None
    told = _condition(pod, "Ready").get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(told) if told else None


def crash_loop(pod: Object) -> bool:
    """Whether the engine of the pod ends again and again. Restarts of days do not add up: its last run was a short one too."""
    engine = _engine(pod)
    if ready(pod) or (engine.get("restartCount") or 0) < CRASHES:
        return False
    state = engine.get("state") or {}
    ended = state.get("terminated") or (engine.get("lastState") or {}).get("terminated") or {}
    began, over = ended.get("startedAt"), ended.get("finishedAt")
    return not (began and over) or datetime.fromisoformat(over) - datetime.fromisoformat(began) < LONG_RUN


def restarts_since(group: Sequence[Object], since: datetime) -> dict[str, int]:
    """By name, how often the engine of a pod has been restarted, of those pods whose engine has ended since then.

    An engine that ended with status 0 was told to, or has no fault of its own.
    """
    found: dict[str, int] = {}
    for pod in group:
        engine = _engine(pod)
        ended = (engine.get("lastState") or {}).get("terminated") or (engine.get("state") or {}).get("terminated") or {}
        over = ended.get("finishedAt")
        if over and ended.get("exitCode") != 0 and datetime.fromisoformat(over) >= since:
            waits = "terminated" in (engine.get("state") or {})  # it is not restarted yet
            found[_name(pod)] = (engine.get("restartCount") or 0) + waits
    return found


def broken(pod: Object) -> bool:
    """Whether the pod will not serve unless somebody changes something: a crash loop, an image or a setting that is not there."""
    trouble = trouble_of(pod, {})
    return trouble is not None and (trouble.reason in ("ImagePull", "Config") or crash_loop(pod))


def worst(group: Sequence[Object], last_lines: Mapping[str, str], refusal: Refusal | None = None) -> Trouble | None:
    """The trouble of a group that most needs somebody, of the first pod by name that has it; None when all serve. A lack of room
    is told beside a graver one: a few pods with that are excused, and then room alone can be what is waited for."""
    troubles = [trouble for pod in sorted(group, key=_name) if (trouble := trouble_of(pod, last_lines)) is not None]
    if refusal is not None:
        troubles.append(refusal.trouble)
    gravest, room = graver(*troubles), graver(*(trouble for trouble in troubles if trouble.for_room))
    if gravest is None or room is None or gravest.for_room:
        return gravest
    return replace(gravest, message=f"{gravest.message.rstrip('.')}; and {room.message}")


def graver(*troubles: Trouble) -> Trouble | None:
    """The trouble that most needs somebody, the first of equal ones."""
    return min(troubles, key=lambda trouble: _WORST.index(trouble.reason), default=None)


def trouble_of(pod: Object, last_lines: Mapping[str, str]) -> Trouble | None:
    """What keeps the pod from serving; None when it serves."""
    if ready(pod):
        return None
    name, status = _name(pod), pod.get("status") or {}
    if status.get("phase") == "Failed":
        return Trouble("Rejected", f"pod {name} failed: {status.get('message') or status.get('reason') or 'no reason is given'}")
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return Trouble("Unschedulable", f"pod {name} has no node: {scheduled.get('message') or 'no reason is given'}")
    for container in _containers(status):
        if (trouble := _of_container(name, container, last_lines)) is not None:
            return trouble
    if any(container.get("started") for container in status.get("containerStatuses") or []):
        return Trouble("NotReady", f"pod {name} has started and does not answer its readiness probe")
    return Trouble("Starting", f"pod {name} is starting")


def crashed(pod: Object) -> str | None:
    """The container whose last lines would tell why the pod does not serve."""
    for container in _containers(pod.get("status") or {}):
        state = container.get("state") or {}
        if not container.get("ready") and ("terminated" in (container.get("lastState") or {}) or "terminated" in state):
            return str(container["name"])
    return None


def _of_container(pod: str, container: Object, last_lines: Mapping[str, str]) -> Trouble | None:
    name, state = container["name"], container.get("state") or {}
    waiting: Mapping[str, Any] = state.get("waiting") or {}
    reason, said = waiting.get("reason") or "", waiting.get("message") or ""
    if reason in _PULLS:
        return Trouble("ImagePull", f"pod {pod} cannot get the image {container.get('image')}: {said or reason}")
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    if ended and not container.get("ready") and ended.get("exitCode") != 0:
        # The count of restarts would be another sentence with each of them.
        lines = last_lines.get(pod) or ended.get("message") or ""
        how = f"ended with status {ended.get('exitCode')}" + (f" ({ended['reason']})" if ended.get("reason") else "")
        told = f"; its last lines: {lines.strip()}" if lines.strip() else ""
        return Trouble("Crash", f"container {name} of pod {pod} {how}{told}")
    if reason not in ("", "ContainerCreating", "PodInitializing", "CrashLoopBackOff"):
        return Trouble("Config", f"container {name} of pod {pod} cannot be made: {said or reason}")
    return None


def _containers(status: Mapping[str, Any]) -> Iterator[Object]:
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def _engine(pod: Object) -> Object:
    """The status of the engine's container."""
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    engine: Object = next((container for container in containers if container.get("name") == names.ENGINE), {})
    return engine


def _condition(item: Object, kind: str) -> Mapping[str, Any]:
    """The condition of a pod or a Deployment."""
    conditions = (item.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])
