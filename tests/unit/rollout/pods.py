"""Pods of a simulated cluster: their states, and their objects in the API server.

Guarantees: a pod's object has the conditions and the container status that a kubelet would report in its state.
Not guaranteed: transitions. Controllers and faults change the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from aerie.manifests import naming

GRACE_PERIOD = timedelta(seconds=120)
"""terminationGracePeriodSeconds."""

State = Literal["Loading", "Serving", "NotReady", "Crashing", "Roomless", "Imageless", "Failed"]


@dataclass
class Pod:
    """A pod; `document` is its object in the API server."""

    name: str
    deployment: str
    """Name of its Deployment."""
    labels: Mapping[str, str]
    template: str
    created_at: datetime
    state: State
    since: datetime
    """Time at which it entered this state."""
    serves_at: datetime | None = None
    """Time at which it has loaded."""
    restarts: int = 0
    ended: datetime | None = None
    """Time at which its engine's process ended last."""
    deleted: datetime | None = None
    node: str = ""
    """Node on which it runs; empty while it waits for room."""
    placed_at: datetime | None = None
    """Time at which it got its node."""
    is_reported: bool = True
    """Whether its kubelet has reported it; before that, only the scheduler has."""
    gone_at: datetime | None = None
    """Time at which it has drained; None: not before its node comes back."""
    _built: tuple[Any, dict[str, Any]] | None = field(default=None, repr=False, compare=False)
    """The last object, and what it depends on."""

    @property
    def alive(self) -> bool:
        return self.deleted is None and self.state != "Failed"

    @property
    def serves(self) -> bool:
        return self.deleted is None and self.state == "Serving"

    @property
    def holds_place(self) -> bool:
        """Return whether it holds a place."""
        return self.state not in ("Failed", "Roomless")

    @property
    def revision(self) -> str:
        return self.labels[naming.REVISION_LABEL]

    @property
    def product(self) -> str:
        """Return the GPU of its node."""
        return self.node.partition("-")[0]

    def become(self, state: State, now: datetime, serves_at: datetime | None = None) -> None:
        self.state, self.since, self.serves_at = state, now, serves_at

    def document(self) -> dict[str, Any]:
        """Return its object in the API server; it must not be changed. It is built again only after a change of the pod."""
        depends_on = (self.state, self.since, self.restarts, self.ended, self.deleted, self.node, self.is_reported)
        if self._built is None or self._built[0] != depends_on:
            self._built = depends_on, self._build_document()
        return self._built[1]

    def _build_document(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "name": self.name,
            "labels": dict(self.labels),
            "creationTimestamp": self.created_at.isoformat(),
        }
        if self.deleted is not None:
            metadata["deletionTimestamp"] = (self.deleted + GRACE_PERIOD).isoformat()
        spec: dict[str, Any] = {"nodeName": self.node} if self.node else {}
        spec["containers"] = [{"name": naming.ENGINE_CONTAINER, "ports": [{"name": "http", "containerPort": 8000}]}]
        status = self._status()
        if self.node:
            status["podIP"] = f"10.0.0.{self.name.rpartition('-')[2].lstrip('0')}"
        return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status}

    def _status(self) -> dict[str, Any]:
        if self.state == "Failed":
            return {"phase": "Failed", "reason": "Evicted", "message": "The node was low on ephemeral-storage."}
        scheduled = {"type": "PodScheduled", "status": "False" if self.state == "Roomless" else "True"}
        if self.state == "Roomless":
            scheduled |= {"reason": "Unschedulable", "message": "0/9 nodes are available: insufficient nvidia.com/gpu."}
            return {"phase": "Pending", "conditions": [scheduled]}
        if self.placed_at is not None:
            scheduled |= {"lastTransitionTime": self.placed_at.isoformat()}
        if not self.is_reported:
            return {"phase": "Pending", "conditions": [scheduled]}
        ready = {
            "type": "Ready",
            "status": "True" if self.state == "Serving" else "False",
            "lastTransitionTime": self.since.isoformat(),
        }
        engine: dict[str, Any] = {"name": naming.ENGINE_CONTAINER, "image": "vllm", "ready": self.state == "Serving"}
        engine |= {"restartCount": self.restarts, "started": self.state in ("Serving", "NotReady"), "state": {"running": {}}}
        if self.state == "Crashing":
            engine |= {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}
        if self.state == "Crashing" or self.ended is not None:
            ended = {"finishedAt": self.ended.isoformat()} if self.ended is not None else {}
            engine |= {"lastState": {"terminated": {"exitCode": 1, "reason": "Error", **ended}}}
        elif self.state == "Imageless":
            engine |= {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}
        return {"phase": "Running", "conditions": [scheduled, ready], "containerStatuses": [engine]}
