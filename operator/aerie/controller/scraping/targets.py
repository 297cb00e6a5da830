"""Which pods are read: those of a resource whose engine has started.

Ownership is told by labels and by the chain of owners: resource, Deployment, and a ReplicaSet that bears the Deployment's name
and the pod's template hash. Not guaranteed: that nobody in the namespace forges these; who can do that can change the engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from aerie.manifests import naming
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot, is_owned_by, read_labels


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """A pod to read."""

    url: str
    deployment: str
    """Name of its Deployment."""
    run_id: str
    """Tells one run of its engine from the next."""
    started_at: float | None = None
    """When the engine's container began, in seconds of Unix time, as the kubelet has it."""


def find_engine_endpoints(snapshot: Snapshot) -> Iterator[tuple[str, EngineEndpoint]]:
    """Pods of the resource whose engine has started, by name."""
    resource = snapshot.resource
    groups = {
        item["metadata"]["name"]: read_labels(item)
        for item in snapshot.children_of_kind("Deployment")
        if is_owned_by(item, resource.metadata.uid)
    }
    for pod in snapshot.pods:
        group = _find_deployment_name(pod)
        if group not in groups or pod["metadata"].get("deletionTimestamp"):
            continue
        wanted = {key: groups[group].get(key) for key in (naming.NAME_LABEL, naming.REVISION_LABEL, naming.CONTROL_LABEL)}
        if not wanted.items() <= read_labels(pod).items() or read_labels(pod).get(naming.NAME_LABEL) != resource.metadata.name:
            continue
        address, port = _format_pod_address(pod), _find_metrics_port(pod)
        status = _find_engine_container((pod.get("status") or {}).get("containerStatuses"))
        if address and port and (status.get("started") or status.get("ready")):
            run = f"{status.get('containerID')} {status.get('restartCount')}"
            yield (
                pod["metadata"]["name"],
                EngineEndpoint(f"http://{address}:{port}/metrics", group, run, _container_started_at(status)),
            )


def _find_deployment_name(pod: KubernetesObject) -> str:
    """Name of the Deployment whose ReplicaSet controls the pod; empty when none does."""
    references = pod["metadata"].get("ownerReferences") or []
    found = next((one for one in references if one.get("controller")), None)
    if found is None or (found.get("apiVersion"), found.get("kind")) != ("apps/v1", "ReplicaSet"):
        return ""
    name, _, template = found["name"].rpartition("-")
    return name if template and template == read_labels(pod).get("pod-template-hash") else ""


def _find_engine_container(containers: list[KubernetesObject] | None) -> KubernetesObject:
    return next((one for one in containers or [] if one["name"] == naming.ENGINE_CONTAINER), {})


def _container_started_at(status: KubernetesObject) -> float | None:
    moment = ((status.get("state") or {}).get("running") or {}).get("startedAt")
    return datetime.fromisoformat(moment).timestamp() if moment else None


def _find_metrics_port(pod: KubernetesObject) -> int | None:
    ports = _find_engine_container(pod["spec"].get("containers")).get("ports") or []
    return next((one["containerPort"] for one in ports if one.get("name") == naming.ENGINE_PORT_NAME), None)


def _format_pod_address(pod: KubernetesObject) -> str:
    address = (pod.get("status") or {}).get("podIP") or ""
    return f"[{address}]" if ":" in address else address
