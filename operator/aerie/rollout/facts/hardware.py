"""Comparison of the hardware under the pods of two arms: the time a GPU takes for a token says nothing of the drafter.

    pods of an arm ─► a sample of them ─► labels of their nodes ─► products, by the first label that all nodes have
    both arms: the same products, in the same shares ─► alike │ different, as a message │ unknown

Guarantees: pure. Of each arm at most `MAX_COMPARED_PODS` pods are compared, so that no decision requests more nodes than that.
The sample follows from the pods' names alone, like a random draw: a pod that comes or goes changes at most one member, and no
order of pods (every second one on another GPU) can hide a product. A node without a label that another node has makes no
difference: a label may reach a new node minutes after its pods.

Not guaranteed: what no label contains (clocks, cooling, the parts of a GPU where the device plugin mixes them); a product
under few of many pods, which a sample may miss. Nodes of different instance types may be reported as different although their
GPU is the same.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from aerie.api.status import TRAFFIC_SHIFT_PHASES, Status
from aerie.manifests.pod.placement import GPU_PRODUCT_LABELS
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import ClusterState, KubernetesObject, Snapshot

MAX_COMPARED_PODS = 64
"""Pods of one arm that are compared. A product on 5 % of the pods is missed once in 26 times; 32 pods would miss it once in 5."""

LabelsByNode = Mapping[str, Mapping[str, str]]
"""Labels of nodes by name; of GPU_PRODUCT_LABELS those that the node has."""


def hardware_difference_message(
    canary: Sequence[KubernetesObject], control: Sequence[KubernetesObject], labels_by_node: LabelsByNode
) -> str | None:
    """Return the different hardware of the two arms' pods as a clause; empty where it is alike, None where it is unknown.

    Of each arm only the ready pods count, or all of them while none is ready.
    """
    arms = [Counter(_node_names(_ready_pods_or_all(_sample(arm)))) for arm in (canary, control)]
    if not all(arms):
        return None
    labels_of_nodes = [labels_by_node.get(node, {}) for node in {*arms[0], *arms[1]}]
    label = next((label for label in GPU_PRODUCT_LABELS if all(label in labels for labels in labels_of_nodes)), None)
    if label is None:
        return None
    canary_products, control_products = (_count_products(arm, label, labels_by_node) for arm in arms)
    if all(
        canary_products[product] * control_products.total() == control_products[product] * canary_products.total()
        for product in {*canary_products, *control_products}
    ):
        return ""
    canary_text, control_text = _format_products(canary_products, len(canary)), _format_products(control_products, len(control))
    return f"canary pods run on {canary_text}, control pods on {control_text}"


def compared_hardware_difference(snapshot: Snapshot) -> str | None:
    """Return the `hardware_difference_message` of the compared pods."""
    return hardware_difference_message(
        *select_compared_pods(snapshot.cluster, snapshot.resource.status or Status()), snapshot.cluster.node_labels
    )


def select_compared_pods(
    cluster: ClusterState, status: Status
) -> tuple[tuple[KubernetesObject, ...], tuple[KubernetesObject, ...]]:
    """Return the pods that are compared according to the status; two empty tuples while nothing is compared.

    They are the pods of canary and control; or, after a promotion, those of the promoted and of the previous revision.
    """
    stable, canary, previous = status.stable, status.canary, status.previous
    if stable is not None and canary is not None and canary.phase != "RollingBack":
        has_control = canary.control is not None and canary.phase not in TRAFFIC_SHIFT_PHASES
        return cluster.live_pods(canary.revision), cluster.live_pods(stable.revision, control=has_control)
    if stable is not None and previous is not None and previous.phase == "Verifying":
        return cluster.live_pods(stable.revision), cluster.live_pods(previous.revision)
    return (), ()


def compared_node_names(cluster: ClusterState, status: Status) -> tuple[str, ...]:
    """Return the names of the nodes whose hardware matters."""
    return tuple(sorted({node for arm in select_compared_pods(cluster, status) for node in _node_names(_sample(arm))}))


def _sample(arm: Sequence[KubernetesObject]) -> Sequence[KubernetesObject]:
    return arm if len(arm) <= MAX_COMPARED_PODS else heapq.nsmallest(MAX_COMPARED_PODS, arm, key=_sampling_key)


def _sampling_key(pod: KubernetesObject) -> bytes:
    return hashlib.blake2b(pod["metadata"]["name"].encode(), digest_size=8).digest()


def _ready_pods_or_all(sample: Sequence[KubernetesObject]) -> Sequence[KubernetesObject]:
    """Return the pods that blocks count; all of them while there is none."""
    return [pod for pod in sample if pod_failures.is_pod_ready(pod) and not pod_failures.is_pod_terminal(pod)] or sample


def _node_names(sample: Sequence[KubernetesObject]) -> list[str]:
    return [node for pod in sample if (node := (pod.get("spec") or {}).get("nodeName"))]


def _count_products(arm: Counter[str], label: str, nodes: LabelsByNode) -> Counter[str]:
    products = Counter[str]()
    for node, count in arm.items():
        products[nodes[node][label]] += count
    return products


def _format_products(products: Counter[str], size: int) -> str:
    text = " and ".join(f"{name} ({count} pod{'s' if count > 1 else ''})" for name, count in sorted(products.items()))
    return f"{text} in a sample of {products.total()} of its {size} pods" if size > MAX_COMPARED_PODS else text
