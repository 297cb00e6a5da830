"""Why a pod does not serve, in the words of the cluster, with what to do where it is plain.

Only what is in the pods themselves is said, and no durations: a sentence that changes with the clock would be a write with
every look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Object = Mapping[str, Any]

_PULLS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})


@dataclass(frozen=True)
class Trouble:
    """What keeps a pod from serving."""

    reason: str
    """One word: Unschedulable, ImagePull, Crash, Config, Starting, NotReady."""
    message: str
    """A sentence that names the pod."""

    @property
    def waits(self) -> bool:
        """Whether it may pass by itself, without anybody doing anything."""
        return self.reason in ("Starting", "NotReady")


_WORST = ("Crash", "ImagePull", "Config", "Rejected", "Unschedulable", "NotReady", "Starting")


def ready(pod: Object) -> bool:
    """Whether the pod serves."""
    return _condition(pod, "Ready").get("status") == "True" and not pod["metadata"].get("deletionTimestamp")


def not_ready_since(pod: Object) -> datetime | None:
    """When the pod ceased to serve, or was made; None when it serves, or when nothing tells."""
    if ready(pod):
        return None
    told = _condition(pod, "Ready").get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(told) if told else None


def restarts(pod: Object) -> int:
    """How often the engine of the pod has been started anew."""
    return max((one.get("restartCount") or 0 for one in _containers(pod.get("status") or {})), default=0)


def worst(pods: Sequence[Object], last_lines: Mapping[str, str]) -> Trouble | None:
    """The trouble that most needs somebody, of the first pod by name that has it; None when all serve."""
    found = [trouble for pod in sorted(pods, key=_name) if (trouble := trouble_of(pod, last_lines)) is not None]
    return min(found, key=lambda trouble: _WORST.index(trouble.reason), default=None)


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


def _condition(pod: Object, kind: str) -> Mapping[str, Any]:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])
