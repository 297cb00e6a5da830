"""Deployment and Service of a pod that gets copies of users' requests: what evaluator and recorder have in common.

Guarantees: one pod, which is replaced only after its end. It has the operator's image pull secrets and those of the engine's pod,
and the engine's node selector and tolerations. It has no rights in the cluster and no sidecar. Its own label alone selects it, so
no Service of engines does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aerie.manifests import naming
from aerie.manifests.preflight_environment import SCHEDULING_FIELDS
from aerie.manifests.preflight_job import DISABLE_SIDECAR_INJECTION, PreflightJobConfig, build_image_pull_secrets

SECURITY_CONTEXT = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
"""Security context of the pod, as Pod Security's profile `restricted` requires it."""


def build_receiver_deployment(
    name: str,
    resource_name: str,
    label: str,
    engine_pod: Mapping[str, Any],
    pod_spec: Mapping[str, Any],
    config: PreflightJobConfig,
) -> dict[str, Any]:
    """Return the Deployment. `label`: the pod's label, which has the resource's name as value. `engine_pod`: pod or template of
    an engine. `pod_spec`: containers and volumes, and other fields of the pod's spec."""
    engine_spec = engine_pod["spec"]
    spec = {
        **{field: engine_spec[field] for field in SCHEDULING_FIELDS if field in engine_spec},
        **build_image_pull_secrets(engine_pod, config.pull_secrets),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": SECURITY_CONTEXT,
        **pod_spec,
    }
    labels = {label: resource_name, naming.MANAGED_BY_LABEL: naming.FIELD_MANAGER} | DISABLE_SIDECAR_INJECTION
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": naming.common_labels(resource_name)},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {label: resource_name}},
            "strategy": {"type": "Recreate"},
            "revisionHistoryLimit": 0,
            "template": {"metadata": {"labels": labels, "annotations": dict(DISABLE_SIDECAR_INJECTION)}, "spec": spec},
        },
    }


def build_receiver_service(name: str, resource_name: str, label: str) -> dict[str, Any]:
    """Return the Service to which a route mirrors requests."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": naming.common_labels(resource_name)},
        "spec": {
            "type": "ClusterIP",
            "selector": {label: resource_name},
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }
