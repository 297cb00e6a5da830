"""Pods and GPUs that a change needs beside those that run, and the nodes on which they fit now.

    pod template ─► GPUs of a pod ─┐
    pods on nodes ─► free GPUs ────┴─► pods that fit, by node

A node counts where it is not cordoned, and the node selector, required node affinity and tolerations of the pod admit it.

Guarantees: pure. What cannot be known is stated, and never counted as zero. Not guaranteed: that the scheduler agrees. CPU,
memory, volumes, rules between pods, quotas and autoscalers of nodes are not considered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aerie.cli.inputs.gpus import is_gpu_resource
from aerie.cli.plan.change import PlannedChange
from aerie.manifests import naming
from aerie.manifests.pod.placement import GPU_PRODUCT_LABELS
from aerie.rollout.capacity.replica_counts import Capacity, replicas_during_analysis
from aerie.rollout.facts.snapshot import ClusterState, KubernetesObject, read_labels

_NO_EXECUTE_EFFECTS = frozenset({"NoSchedule", "NoExecute"})


@dataclass(frozen=True)
class PodNeed:
    """Pods of a change."""

    canary: int = 0
    control: int = 0
    extra: int = 0
    """Pods at most beside those that are requested now."""


@dataclass(frozen=True)
class PodGpus:
    """GPUs that a pod requests."""

    resource: str = ""
    """Such as nvidia.com/gpu; empty without GPUs."""
    count: int | None = 0
    """None: unknown."""
    problem: str = ""
    """Why the count is unknown, as a sentence."""


@dataclass(frozen=True)
class NodeRoom:
    """A node that admits the pod."""

    name: str
    product: str
    free: int
    """Free GPUs."""
    pods: int
    """Pods that fit."""


@dataclass(frozen=True)
class ClusterRoom:
    """Room for the pods."""

    nodes: tuple[NodeRoom, ...]
    """Nodes with GPUs that admit the pod, those with most room first."""
    excluded: int
    """Nodes with such GPUs that do not admit it."""
    pending: int
    """Pods without a node that request the same GPUs."""

    @property
    def pods(self) -> int:
        return sum(node.pods for node in self.nodes)


def count_pods(change: PlannedChange) -> PodNeed:
    """Return the pods that the change needs."""
    spec = change.desired.resource.spec
    requested = _count_requested(change.snapshot.cluster)
    if change.kind == "Canary":
        capacity = Capacity.from_spec(spec.replicas, spec.rollout.canary)
        arms = replicas_during_analysis(capacity)
        return PodNeed(arms.canary, arms.control, max(0, capacity.max_total_pods - requested))
    if change.kind in ("FirstRevision", "Scaling", "InPlace", "Adopted", "Withdrawn"):
        return PodNeed(extra=max(0, spec.replicas - requested))
    return PodNeed()


def _count_requested(cluster: ClusterState) -> int:
    deployments = (item for item in cluster.children_of_kind("Deployment") if naming.REVISION_LABEL in read_labels(item))
    return sum(int(item["spec"].get("replicas") or 0) for item in deployments)


def read_pod_gpus(template: Mapping[str, Any] | None) -> PodGpus:
    """Return the GPUs of a pod of this template."""
    if template is None:
        return PodGpus(count=None, problem="The pod is unknown.")
    spec = template["spec"]
    if spec.get("resourceClaims"):
        return PodGpus(count=None, problem="The pod gets devices by resourceClaims (DRA), which are not counted here.")
    requests = _count_requests(spec)
    if len(requests) > 1:
        return PodGpus(count=None, problem=f"The pod requests several kinds of GPUs: {', '.join(sorted(requests))}.")
    return next((PodGpus(name, count) for name, count in requests.items()), PodGpus())


def _count_requests(pod_spec: Mapping[str, Any]) -> dict[str, int]:
    """Return the GPUs that a pod requests, by resource. An init container's are used before those of the others, or with them
    where it keeps running."""
    totals: dict[str, int] = {}
    largest: dict[str, int] = {}
    for container in pod_spec.get("initContainers") or ():
        keeps_running = container.get("restartPolicy") == "Always"
        for name, count in _read_gpu_limits(container):
            if keeps_running:
                totals[name] = totals.get(name, 0) + count
            largest[name] = max(largest.get(name, 0), count + (0 if keeps_running else totals.get(name, 0)))
    for container in pod_spec.get("containers") or ():
        for name, count in _read_gpu_limits(container):
            totals[name] = totals.get(name, 0) + count
    counts = {name: max(totals.get(name, 0), largest.get(name, 0)) for name in (*totals, *largest)}
    return {name: count for name, count in counts.items() if count}


def _read_gpu_limits(container: Mapping[str, Any]) -> list[tuple[str, int]]:
    limits = (container.get("resources") or {}).get("limits") or {}
    return [(name, int(amount)) for name, amount in limits.items() if is_gpu_resource(name) and str(amount).isdecimal()]


def compute_room(
    template: Mapping[str, Any], gpus: PodGpus, nodes: Iterable[KubernetesObject], pods: Sequence[KubernetesObject]
) -> ClusterRoom:
    """Return the room for pods of the template. `pods`: all of the cluster that have not ended. `gpus`: with a count."""
    assert gpus.count
    used: dict[str, int] = {}
    pending = 0
    for pod in pods:
        count = _count_requests(pod["spec"]).get(gpus.resource, 0)
        if node_name := pod["spec"].get("nodeName"):
            used[node_name] = used.get(node_name, 0) + count
        elif count:
            pending += 1
    rooms, excluded = [], 0
    for node in nodes:
        amount = str(((node.get("status") or {}).get("allocatable") or {}).get(gpus.resource, "0"))
        if not amount.isdecimal() or not int(amount):
            continue
        if not admits(node, template["spec"]):
            excluded += 1
            continue
        name, labels = node["metadata"]["name"], read_labels(node)
        free = max(0, int(amount) - used.get(name, 0))
        product = next((labels[label] for label in GPU_PRODUCT_LABELS if label in labels), "")
        rooms.append(NodeRoom(name, product, free, free // gpus.count))
    return ClusterRoom(tuple(sorted(rooms, key=lambda room: (-room.pods, -room.free, room.name))), excluded, pending)


def admits(node: KubernetesObject, pod_spec: Mapping[str, Any]) -> bool:
    """Return whether a node admits a pod, by its labels and taints."""
    spec, labels = node.get("spec") or {}, read_labels(node)
    if spec.get("unschedulable"):
        return False
    if any(labels.get(key) != value for key, value in (pod_spec.get("nodeSelector") or {}).items()):
        return False
    affinity = ((pod_spec.get("affinity") or {}).get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    if affinity is not None and not any(_matches_term(node, term) for term in affinity.get("nodeSelectorTerms") or ()):
        return False
    tolerations = pod_spec.get("tolerations") or ()
    taints = [taint for taint in spec.get("taints") or () if taint.get("effect") in _NO_EXECUTE_EFFECTS]
    return all(any(_tolerates(toleration, taint) for toleration in tolerations) for taint in taints)


def _matches_term(node: KubernetesObject, term: Mapping[str, Any]) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    names = {"metadata.name": node["metadata"]["name"]}
    return bool(expressions or fields) and (
        all(_matches(read_labels(node), expression) for expression in expressions)
        and all(_matches(names, field) for field in fields)
    )


def _matches(labels: Mapping[str, str], expression: Mapping[str, Any]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            if value is None or not (value.lstrip("-").isdecimal() and str(values[0]).lstrip("-").isdecimal()):
                return False
            return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
        case _:
            return False


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return toleration.get("key") == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")
