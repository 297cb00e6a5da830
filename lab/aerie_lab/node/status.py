"""A pod's status as a kubelet writes it, from what is known of its containers. Pure.

Sources of reasons and rules: kubernetes pkg/kubelet (getPhase, GenerateContainersReadyCondition, GeneratePodReadyCondition,
kubelet's event and waiting reasons), read for behaviour.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aerie_lab.kube.client import KubeObject


def format_timestamp(seconds: float) -> str:
    """Return a Unix time in the form of Kubernetes."""
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class ContainerState:
    """State of one container. Exactly one of waiting, running and terminated is reported, in the order of the fields."""

    name: str
    image: str
    init: bool = False
    terminated: dict[str, Any] | None = None
    running_since: float | None = None
    waiting: tuple[str, str] = ("ContainerCreating", "")
    last_terminated: dict[str, Any] | None = None
    restarts: int = 0
    started: bool = False
    """The startup probe, if any, has succeeded and the container runs."""
    ready: bool = False
    container_id: str = ""

    @property
    def is_done(self) -> bool:
        """Ended, and not to be started again."""
        return self.terminated is not None

    def to_status(self) -> KubeObject:
        """Return the containerStatuses entry."""
        if self.terminated is not None:
            state: dict[str, Any] = {"terminated": self.terminated}
        elif self.running_since is not None:
            state = {"running": {"startedAt": format_timestamp(self.running_since)}}
        elif self.last_terminated is not None and self.waiting == ("", ""):
            state = {"terminated": self.last_terminated}  # ended, and about to be restarted immediately
        else:
            reason, message = self.waiting
            state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        status: dict[str, Any] = {
            "name": self.name,
            "image": self.image,
            "imageID": f"lab://{self.image}" if self.container_id else "",
            "restartCount": self.restarts,
            "ready": self.ready or (self.init and self.terminated is not None and self.terminated["exitCode"] == 0),
            "started": self.started and self.running_since is not None and self.terminated is None,
            "state": state,
            "lastState": {"terminated": self.last_terminated} if self.last_terminated else {},
        }
        if self.container_id:
            status["containerID"] = f"lab://{self.container_id}"
        return status


@dataclass(frozen=True)
class PodFacts:
    """Facts of a pod's status apart from its containers."""

    pod: KubeObject
    node_address: str
    pod_address: str | None
    start_time: float
    has_network: bool
    failure: tuple[str, str] | None = None
    """(reason, message) when the pod as a whole has failed."""
    is_finished: bool = False
    """Nothing of the pod runs, and nothing will run any more."""


def compute_phase(init: Sequence[ContainerState], main: Sequence[ContainerState]) -> str:
    """Pending, Running, Succeeded or Failed."""
    if any(c.terminated and c.terminated["exitCode"] != 0 for c in init):
        return "Failed"
    if not all(c.is_done for c in init):
        return "Pending"
    if all(c.is_done for c in main):
        codes = [(c.terminated or {})["exitCode"] for c in main]
        return "Failed" if any(codes) else "Succeeded"
    never_started = any(
        c.running_since is None and c.terminated is None and c.last_terminated is None and c.waiting[0] != "CrashLoopBackOff"
        for c in main
    )
    return "Pending" if never_started else "Running"


def build_conditions(
    facts: PodFacts, current_phase: str, init: Sequence[ContainerState], main: Sequence[ContainerState], now: float
) -> list[KubeObject]:
    """Return the kubelet's conditions; lastTransitionTime moves only where the status differs from the one in `facts.pod`."""
    conditions = {c["type"]: c for c in (facts.pod.get("status") or {}).get("conditions") or []}
    unready = [c.name for c in main if not c.ready]
    pending_init = [c.name for c in init if not (c.terminated and c.terminated["exitCode"] == 0)]
    finished = current_phase in ("Succeeded", "Failed")
    initialized = not pending_init
    if finished:
        unready_reason = ("PodCompleted" if current_phase == "Succeeded" else "PodFailed", "")
    else:
        unready_reason = ("ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]")
    containers_ready = not unready and not finished
    gates = [gate["conditionType"] for gate in facts.pod["spec"].get("readinessGates") or []]
    closed = [gate for gate in gates if conditions.get(gate, {}).get("status") != "True"]
    if containers_ready and closed:
        messages = (
            f'the status of pod readiness gate "{gate}" is not "True"'
            if gate in conditions
            else f'corresponding condition of pod readiness gate "{gate}" does not exist.'
            for gate in closed
        )
        ready_reason = ("ReadinessGatesNotReady", "; ".join(messages))
    else:
        ready_reason = unready_reason
    desired = [
        ("PodReadyToStartContainers", facts.has_network and not finished, ("", "")),
        (
            "Initialized",
            initialized,
            ("ContainersNotInitialized", f"containers with incomplete status: [{' '.join(pending_init)}]"),
        ),
        ("ContainersReady", containers_ready, unready_reason),
        ("Ready", containers_ready and not closed, ready_reason),
        ("PodScheduled", True, ("", "")),
    ]
    result = []
    for kind, is_true, (reason, message) in desired:
        status = "True" if is_true else "False"
        previous = conditions.get(kind)
        moved = previous is None or previous["status"] != status
        entry: KubeObject = {
            "type": kind,
            "status": status,
            "lastProbeTime": None,
            "lastTransitionTime": format_timestamp(now) if previous is None or moved else previous["lastTransitionTime"],
            "observedGeneration": facts.pod["metadata"].get("generation", 0),
            "reason": reason if not is_true else ("PodCompleted" if kind == "Initialized" and finished else None),
            "message": message if not is_true else None,
        }
        result.append({name: value for name, value in entry.items() if value != ""})
    return result


def build_pod_status(facts: PodFacts, init: Sequence[ContainerState], main: Sequence[ContainerState], now: float) -> KubeObject:
    """Return the status to write; a strategic merge patch keeps the conditions of others."""
    current_phase = compute_phase(init, main)
    if facts.is_finished and (facts.failure or current_phase != "Succeeded"):
        current_phase = "Failed"
    elif facts.failure and current_phase in ("Succeeded", "Failed"):
        current_phase = "Running"  # it will be Failed; a controller must not see another outcome before
    status: KubeObject = {
        "phase": current_phase,
        "observedGeneration": facts.pod["metadata"].get("generation", 0),
        "conditions": build_conditions(facts, current_phase, init, main, now),
        "hostIP": facts.node_address,
        "hostIPs": [{"ip": facts.node_address}],
        "startTime": format_timestamp(facts.start_time),
        "containerStatuses": [c.to_status() for c in main],
        "qosClass": (facts.pod.get("status") or {}).get("qosClass", "BestEffort"),
    }
    if init:
        status["initContainerStatuses"] = [c.to_status() for c in init]
    if facts.pod_address:
        status |= {"podIP": facts.pod_address, "podIPs": [{"ip": facts.pod_address}]}
    if facts.failure:
        status["reason"], status["message"] = facts.failure
    return status


def status_covers(current: object, desired: object) -> bool:
    """Return whether the API server's `current` status contains all of `desired`, so that nothing has to be written.

    Absent and empty are the same; a `state` or `lastState` must be the same kind; conditions of others do not count.
    """
    if isinstance(desired, dict):
        existing = current if isinstance(current, dict) else {}
        for name, value in desired.items():
            if name == "conditions":
                by_type = {entry["type"]: entry for entry in existing.get(name) or []}
                if not all(status_covers(by_type.get(entry["type"]), entry) for entry in value):
                    return False
            elif not status_covers(existing.get(name), value):
                return False
            elif name in ("state", "lastState") and (existing.get(name) or {}).keys() != value.keys():
                return False  # the status has another kind of state
        return True
    if isinstance(desired, list):
        entries = current if isinstance(current, list) else []
        return len(entries) == len(desired) and all(status_covers(k, w) for k, w in zip(entries, desired, strict=True))
    return current == desired or (not current and not desired)
