"""Control pods on the same GPU product as the canary's: times per token of unlike GPUs say nothing of a drafter.

    canary's pod on a node of product P ─► preferred affinity of the control pods ─► a node of product P, while one has room

Guarantees: constant terms, of the resource and the stable revision alone. Neither the state of the cluster nor the next canary
changes the template of a control's Deployment, so that none of its pods is made anew. The user's affinity is kept. Pods of stable
revision and canary have no such term, because the canary's pods stay when it is promoted.

Not guaranteed: the same product, where no node of it has room, where users have written terms that weigh more, or where pods
of the canary are on several products. The scheduler heeds a preference both ways, so it does not matter which pod comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aerie.resources import names

LABELS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "node.kubernetes.io/instance-type",
)
"""Labels that tell a node's product, the most exact first."""
_WEIGHTS = (100, 50, 25, 12)
"""Of LABELS: each weighs more than all that are less exact."""
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def beside_canary(template: Mapping[str, Any], name: str, stable: str) -> dict[str, Any]:
    """The template of the control pods of the resource `name`, made of that of its stable revision."""
    spec = template["spec"]
    affinity = spec.get("affinity") or {}
    to_pods = affinity.get("podAffinity") or {}
    preferred = [*(to_pods.get(_PREFERRED) or []), *_terms(name, stable)]
    return {**template, "spec": {**spec, "affinity": {**affinity, "podAffinity": {**to_pods, _PREFERRED: preferred}}}}


def _terms(name: str, stable: str) -> list[dict[str, Any]]:
    # While a canary has control pods, all pods of another revision are its own.
    selector = {
        "matchLabels": {names.NAME: name, names.CONTROL: "false"},
        "matchExpressions": [{"key": names.REVISION, "operator": "NotIn", "values": [stable]}],
    }
    return [
        {"weight": weight, "podAffinityTerm": {"labelSelector": selector, "topologyKey": label}}
        for label, weight in zip(LABELS, _WEIGHTS, strict=True)
    ]
