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

from aerie.manifests import naming

GPU_PRODUCT_LABELS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "node.kubernetes.io/instance-type",
)
"""Labels that tell a node's product, the most exact first."""
_AFFINITY_WEIGHTS = (100, 50, 25, 12)
"""Of LABELS: each weighs more than all that are less exact."""
_PREFERRED_AFFINITY = "preferredDuringSchedulingIgnoredDuringExecution"


def prefer_canary_gpu_product(pod_template: Mapping[str, Any], resource_name: str, stable_revision: str) -> dict[str, Any]:
    """The template of the control pods of the resource `name`, made of that of its stable revision."""
    spec = pod_template["spec"]
    affinity = spec.get("affinity") or {}
    to_pods = affinity.get("podAffinity") or {}
    preferred = [*(to_pods.get(_PREFERRED_AFFINITY) or []), *_build_affinity_terms(resource_name, stable_revision)]
    return {
        **pod_template,
        "spec": {**spec, "affinity": {**affinity, "podAffinity": {**to_pods, _PREFERRED_AFFINITY: preferred}}},
    }


def _build_affinity_terms(resource_name: str, stable_revision: str) -> list[dict[str, Any]]:
    # While a canary has control pods, all pods of another revision are its own.
    selector = {
        "matchLabels": {naming.NAME_LABEL: resource_name, naming.CONTROL_LABEL: "false"},
        "matchExpressions": [{"key": naming.REVISION_LABEL, "operator": "NotIn", "values": [stable_revision]}],
    }
    return [
        {"weight": weight, "podAffinityTerm": {"labelSelector": selector, "topologyKey": label}}
        for label, weight in zip(GPU_PRODUCT_LABELS, _AFFINITY_WEIGHTS, strict=True)
    ]
