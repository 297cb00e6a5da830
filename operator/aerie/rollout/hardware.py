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

from aerie.api.status import Status
from aerie.resources.placement import LABELS
from aerie.rollout import pods
from aerie.rollout.machine import GROWING
from aerie.rollout.observed import Object, Observed

MOST = 64
"""Pods of one arm that are compared. A product on 5 % of the pods is missed once in 26 times; 32 pods would miss it once in 5."""

Nodes = Mapping[str, Mapping[str, str]]
"""Labels of nodes by name; of LABELS those that the node has."""


def unlike(canary: Sequence[Object], control: Sequence[Object], nodes: Nodes) -> str | None:
    """On what unlike hardware the pods run, of each arm those that serve, or all while none does: as a clause; empty where it is
    alike, None where that is not known."""
    arms = [Counter(_nodes_of(_serving(_sample(arm)))) for arm in (canary, control)]
    if not all(arms):
        return None
    known = [nodes.get(node, {}) for node in {*arms[0], *arms[1]}]
    label = next((label for label in LABELS if all(label in labels for labels in known)), None)
    if label is None:
        return None
    mine, theirs = (_products(arm, label, nodes) for arm in arms)
    if all(mine[product] * theirs.total() == theirs[product] * mine.total() for product in {*mine, *theirs}):
        return ""
    return f"the canary's pods run on {_said(mine, len(canary))}, the control's on {_said(theirs, len(control))}"


def difference(observed: Observed) -> str | None:
    """`unlike`, of the pods that are compared."""
    return unlike(*compared(observed, observed.resource.status or Status()), observed.nodes)


def compared(observed: Observed, status: Status) -> tuple[tuple[Object, ...], tuple[Object, ...]]:
    """The pods that are compared, as the status has it: of canary and control, or after a promotion of the promoted revision and
    the one before. None of them while nothing is compared."""
    stable, canary, previous = status.stable, status.canary, status.previous
    if stable is not None and canary is not None and canary.phase != "RollingBack":
        controlled = canary.control is not None and canary.phase not in GROWING
        return observed.group(canary.revision), observed.group(stable.revision, control=controlled)
    if stable is not None and previous is not None and previous.phase == "Rechecking":
        return observed.group(stable.revision), observed.group(previous.revision)
    return (), ()


def nodes_of(observed: Observed, status: Status) -> tuple[str, ...]:
    """Names of the nodes whose hardware matters."""
    return tuple(sorted({node for arm in compared(observed, status) for node in _nodes_of(_sample(arm))}))


def _sample(arm: Sequence[Object]) -> Sequence[Object]:
    return arm if len(arm) <= MOST else heapq.nsmallest(MOST, arm, key=_lot)


def _lot(pod: Object) -> bytes:
    return hashlib.blake2b(pod["metadata"]["name"].encode(), digest_size=8).digest()


def _serving(sample: Sequence[Object]) -> Sequence[Object]:
    """Those that blocks count; all while there is none."""
    return [pod for pod in sample if pods.ready(pod) and not pods.dead(pod)] or sample


def _nodes_of(sample: Sequence[Object]) -> list[str]:
    return [node for pod in sample if (node := (pod.get("spec") or {}).get("nodeName"))]


def _products(arm: Counter[str], label: str, nodes: Nodes) -> Counter[str]:
    found = Counter[str]()
    for node, count in arm.items():
        found[nodes[node][label]] += count
    return found


def _said(products: Counter[str], size: int) -> str:
    each = " and ".join(f"{name} ({count} pod{'s' if count > 1 else ''})" for name, count in sorted(products.items()))
    return f"{each}, by a sample of {products.total()} of its {size} pods" if size > MOST else each
