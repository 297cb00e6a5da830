"""Scheduling preference that puts control pods on the canary's GPU product.

Times per token of different GPU products cannot be compared.

    canary's pod on a node of product P ─► preferred affinity of the control pods ─► a node of product P, while one has room

Guarantees: the terms depend on the resource and the stable revision alone. Neither the state of the cluster nor the next canary
changes the template of a control Deployment, so none of its pods is recreated. The user's affinity is kept. Pods of the stable
revision and of the canary have no such term, because the canary's pods stay when it is promoted.

Not guaranteed: the same product, where no node of it has room, where the user's terms weigh more, or where pods of the canary
run on several products. The scheduler applies a preference in both directions, so the order of the pods does not matter, except
where the canary's own node selector leaves it no choice and a control pod was placed before: then times are not compared.
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
"""Node labels that identify a GPU product, the most exact first."""
_AFFINITY_WEIGHTS = (100, 50, 25, 12)
"""Weights of GPU_PRODUCT_LABELS: each is larger than the sum of all less exact ones."""
_PREFERRED_AFFINITY = "preferredDuringSchedulingIgnoredDuringExecution"


def prefer_canary_gpu_product(pod_template: Mapping[str, Any], resource_name: str, stable_revision: str) -> dict[str, Any]:
    """Return the template of the resource's control pods, made from the template of its stable revision."""
    spec = pod_template["spec"]
    affinity = spec.get("affinity") or {}
    pod_affinity = affinity.get("podAffinity") or {}
    preferred = [*(pod_affinity.get(_PREFERRED_AFFINITY) or []), *_build_affinity_terms(resource_name, stable_revision)]
    return {
        **pod_template,
        "spec": {**spec, "affinity": {**affinity, "podAffinity": {**pod_affinity, _PREFERRED_AFFINITY: preferred}}},
    }


def _build_affinity_terms(resource_name: str, stable_revision: str) -> list[dict[str, Any]]:
    # While a canary has control pods, all pods of other revisions belong to the canary.
    selector = {
        "matchLabels": {naming.NAME_LABEL: resource_name, naming.CONTROL_LABEL: "false"},
        "matchExpressions": [{"key": naming.REVISION_LABEL, "operator": "NotIn", "values": [stable_revision]}],
    }
    return [
        {"weight": weight, "podAffinityTerm": {"labelSelector": selector, "topologyKey": label}}
        for label, weight in zip(GPU_PRODUCT_LABELS, _AFFINITY_WEIGHTS, strict=True)
    ]
