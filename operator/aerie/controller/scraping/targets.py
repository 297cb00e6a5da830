"""Which pods are read: those of a resource whose engine has started.

Ownership is told by labels and by the chain of owners: resource, Deployment, and a ReplicaSet that bears the Deployment's name
and the pod's template hash. Not guaranteed: that nobody in the namespace forges these; who can do that can change the engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from aerie.manifests import naming
from aerie.rollout.facts.snapshot import Object, Observed, labels, owned


@dataclass(frozen=True, slots=True)
class Target:
    """A pod to read."""

    url: str
    group: str
    """Name of its Deployment."""
    run: str
    """Tells one run of its engine from the next."""
    started: float | None = None
    """When the engine's container began, in seconds of Unix time, as the kubelet has it."""


def targets(observed: Observed) -> Iterator[tuple[str, Target]]:
    """Pods of the resource whose engine has started, by name."""
    resource = observed.resource
    groups = {item["metadata"]["name"]: labels(item) for item in observed.of("Deployment") if owned(item, resource.metadata.uid)}
    for pod in observed.pods:
        group = _owner(pod)
        if group not in groups or pod["metadata"].get("deletionTimestamp"):
            continue
        wanted = {key: groups[group].get(key) for key in (naming.NAME, naming.REVISION, naming.CONTROL)}
        if not wanted.items() <= labels(pod).items() or labels(pod).get(naming.NAME) != resource.metadata.name:
            continue
        address, port = _address(pod), _port(pod)
        status = _engine((pod.get("status") or {}).get("containerStatuses"))
        if address and port and (status.get("started") or status.get("ready")):
            run = f"{status.get('containerID')} {status.get('restartCount')}"
            yield pod["metadata"]["name"], Target(f"http://{address}:{port}/metrics", group, run, _began(status))


def _owner(pod: Object) -> str:
    """Name of the Deployment whose ReplicaSet controls the pod; empty when none does."""
    references = pod["metadata"].get("ownerReferences") or []
    found = next((one for one in references if one.get("controller")), None)
    if found is None or (found.get("apiVersion"), found.get("kind")) != ("apps/v1", "ReplicaSet"):
        return ""
    name, _, template = found["name"].rpartition("-")
    return name if template and template == labels(pod).get("pod-template-hash") else ""


def _engine(containers: list[Object] | None) -> Object:
    return next((one for one in containers or [] if one["name"] == naming.ENGINE), {})


def _began(status: Object) -> float | None:
    moment = ((status.get("state") or {}).get("running") or {}).get("startedAt")
    return datetime.fromisoformat(moment).timestamp() if moment else None


def _port(pod: Object) -> int | None:
    ports = _engine(pod["spec"].get("containers")).get("ports") or []
    return next((one["containerPort"] for one in ports if one.get("name") == naming.PORT_NAME), None)


def _address(pod: Object) -> str:
    address = (pod.get("status") or {}).get("podIP") or ""
    return f"[{address}]" if ":" in address else address
