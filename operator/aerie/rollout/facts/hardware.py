"""Whether the pods of two arms run on the same hardware: what a GPU takes for a token says nothing of the drafter.

    pods of an arm ─► a sample of them ─► labels of their nodes ─► products, by the first label that all nodes have
    both arms: the same products, in the same shares ─► alike │ unlike, as a sentence │ not known

Guarantees: pure. Of each arm at most `MOST` pods are compared, so that no decision asks for more nodes than that. Which ones
follows from their names alone, as if drawn by lot: a pod that comes or goes changes at most one of them, and no order of pods
(every second one on another GPU) can hide a product. A node without the label of another one makes nothing unlike: a label may
reach a new node minutes after its pods.

Not guaranteed: what no label says (clocks, cooling, the parts of a GPU where the device plugin mixes them); a product that few
of many pods run on, which a sample may miss. By an instance type, nodes may be told apart that have the same GPU.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from aerie.api.status import TRAFFIC_SHIFT_PHASES, Status
from aerie.manifests.pod.placement import GPU_PRODUCT_LABELS
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot

MAX_COMPARED_PODS = 64
"""Pods of one arm that are compared. A product on 5 % of the pods is missed once in 26 times; 32 pods would miss it once in 5."""

LabelsByNode = Mapping[str, Mapping[str, str]]
"""Labels of nodes by name; of LABELS those that the node has."""


def hardware_difference_message(
    canary: Sequence[KubernetesObject], control: Sequence[KubernetesObject], labels_by_node: LabelsByNode
) -> str | None:
    """On what unlike hardware the pods run, of each arm those that serve, or all while none does: as a clause; empty where it is
    alike, None where that is not known."""
    arms = [Counter(_node_names(_ready_pods_or_all(_sample(arm)))) for arm in (canary, control)]
    if not all(arms):
        return None
    known = [labels_by_node.get(node, {}) for node in {*arms[0], *arms[1]}]
    label = next((label for label in GPU_PRODUCT_LABELS if all(label in labels for labels in known)), None)
    if label is None:
        return None
    mine, theirs = (_count_products(arm, label, labels_by_node) for arm in arms)
    if all(mine[product] * theirs.total() == theirs[product] * mine.total() for product in {*mine, *theirs}):
        return ""
    return f"the canary's pods run on {_format_products(mine, len(canary))}, the control's on {_format_products(theirs, len(control))}"


def compared_hardware_difference(snapshot: Snapshot) -> str | None:
    """`unlike`, of the pods that are compared."""
    return hardware_difference_message(
        *select_compared_pods(snapshot, snapshot.resource.status or Status()), snapshot.node_labels
    )


def select_compared_pods(snapshot: Snapshot, status: Status) -> tuple[tuple[KubernetesObject, ...], tuple[KubernetesObject, ...]]:
    """The pods that are compared, as the status has it: of canary and control, or after a promotion of the promoted revision and
    the one before. None of them while nothing is compared."""
    stable, canary, previous = status.stable, status.canary, status.previous
    if stable is not None and canary is not None and canary.phase != "RollingBack":
        controlled = canary.control is not None and canary.phase not in TRAFFIC_SHIFT_PHASES
        return snapshot.live_pods(canary.revision), snapshot.live_pods(stable.revision, control=controlled)
    if stable is not None and previous is not None and previous.phase == "Rechecking":
        return snapshot.live_pods(stable.revision), snapshot.live_pods(previous.revision)
    return (), ()


def compared_node_names(snapshot: Snapshot, status: Status) -> tuple[str, ...]:
    """Names of the nodes whose hardware matters."""
    return tuple(sorted({node for arm in select_compared_pods(snapshot, status) for node in _node_names(_sample(arm))}))


def _sample(arm: Sequence[KubernetesObject]) -> Sequence[KubernetesObject]:
    return arm if len(arm) <= MAX_COMPARED_PODS else heapq.nsmallest(MAX_COMPARED_PODS, arm, key=_sampling_key)


def _sampling_key(pod: KubernetesObject) -> bytes:
    return hashlib.blake2b(pod["metadata"]["name"].encode(), digest_size=8).digest()


def _ready_pods_or_all(sample: Sequence[KubernetesObject]) -> Sequence[KubernetesObject]:
    """Those that blocks count; all while there is none."""
    return [pod for pod in sample if pod_failures.is_pod_ready(pod) and not pod_failures.is_pod_terminal(pod)] or sample


def _node_names(sample: Sequence[KubernetesObject]) -> list[str]:
    return [node for pod in sample if (node := (pod.get("spec") or {}).get("nodeName"))]


def _count_products(arm: Counter[str], label: str, nodes: LabelsByNode) -> Counter[str]:
    found = Counter[str]()
    for node, count in arm.items():
        found[nodes[node][label]] += count
    return found


def _format_products(products: Counter[str], size: int) -> str:
    each = " and ".join(f"{name} ({count} pod{'s' if count > 1 else ''})" for name, count in sorted(products.items()))
    return f"{each}, by a sample of {products.total()} of its {size} pods" if size > MAX_COMPARED_PODS else each
