"""Finds the pods to scrape: those of a resource whose engine has started.

Ownership follows from labels and from the chain of owners: resource, Deployment, and a ReplicaSet with the Deployment's name and
the pod's template hash. Not guaranteed: protection against forged labels and owners in the namespace; who can forge them can also
change the engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from aerie.manifests import naming
from aerie.rollout.facts.pod_address import find_engine_url
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot, is_owned_by, read_labels


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """Metrics endpoint of a pod."""

    url: str
    deployment: str
    """Name of the pod's Deployment."""
    run_id: str
    """Identifies one run of the engine's container."""
    started_at: float | None = None
    """Start time of the engine's container in seconds of Unix time, as reported by the kubelet."""


def find_engine_endpoints(snapshot: Snapshot) -> Iterator[tuple[str, EngineEndpoint]]:
    """Yield the pods of the resource whose engine has started, by name."""
    resource = snapshot.resource
    deployment_labels = {
        item["metadata"]["name"]: read_labels(item)
        for item in snapshot.cluster.children_of_kind("Deployment")
        if is_owned_by(item, resource.metadata.uid)
    }
    for pod in snapshot.cluster.pods:
        deployment = _find_deployment_name(pod)
        if deployment not in deployment_labels or pod["metadata"].get("deletionTimestamp"):
            continue
        expected_labels = {
            key: deployment_labels[deployment].get(key)
            for key in (naming.NAME_LABEL, naming.REVISION_LABEL, naming.CONTROL_LABEL)
        }
        if (
            not expected_labels.items() <= read_labels(pod).items()
            or read_labels(pod).get(naming.NAME_LABEL) != resource.metadata.name
        ):
            continue
        url = find_engine_url(pod)
        status = _find_engine_container((pod.get("status") or {}).get("containerStatuses"))
        if url is not None and (status.get("started") or status.get("ready")):
            run_id = f"{status.get('containerID')} {status.get('restartCount')}"
            yield (
                pod["metadata"]["name"],
                EngineEndpoint(f"{url}/metrics", deployment, run_id, _container_started_at(status)),
            )


def _find_deployment_name(pod: KubernetesObject) -> str:
    """Return the name of the Deployment whose ReplicaSet controls the pod; empty when there is none."""
    references = pod["metadata"].get("ownerReferences") or []
    controller = next((reference for reference in references if reference.get("controller")), None)
    if controller is None or (controller.get("apiVersion"), controller.get("kind")) != ("apps/v1", "ReplicaSet"):
        return ""
    name, _, template_hash = controller["name"].rpartition("-")
    return name if template_hash and template_hash == read_labels(pod).get("pod-template-hash") else ""


def _find_engine_container(containers: list[KubernetesObject] | None) -> KubernetesObject:
    return next((container for container in containers or [] if container["name"] == naming.ENGINE_CONTAINER), {})


def _container_started_at(status: KubernetesObject) -> float | None:
    started_at = ((status.get("state") or {}).get("running") or {}).get("startedAt")
    return datetime.fromisoformat(started_at).timestamp() if started_at else None
