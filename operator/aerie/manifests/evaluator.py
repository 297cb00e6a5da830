"""The evaluator of a shadow evaluation: its Deployment, and the Service to which a gateway mirrors requests.

It runs `aerie evaluator` of the operator's own image. It calls one engine, the isolated one, and nothing else.

Guarantees: the pod fits Pod Security's profile `restricted`, and has no rights in the cluster. No Service of engines selects it,
because it has EVALUATOR_LABEL instead of NAME_LABEL. Sidecar injection is off as for preflight. Not guaranteed: that a network
policy admits it to the engine.
"""

from __future__ import annotations

from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.rollout import PromptsSource
from aerie.manifests import naming
from aerie.manifests.preflight_job import DISABLE_SIDECAR_INJECTION, PreflightJobConfig

EVALUATOR_LABEL = "aerie.dev/evaluator"
EVALUATOR_PORT = 8000
_PROMPTS_PATH = "/etc/aerie-prompts"
_RESOURCES = {"requests": {"cpu": "100m", "memory": "96Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}


def evaluator_name(resource_name: str) -> str:
    """Return the name of the Deployment and the Service."""
    return f"{resource_name}-evaluator"


def evaluator_labels(resource_name: str) -> dict[str, str]:
    """Return the labels of the evaluator's pod."""
    return {EVALUATOR_LABEL: resource_name, naming.MANAGED_BY_LABEL: naming.FIELD_MANAGER}


def build_evaluator_deployment(
    resource: SpeculativeDeployment, engine_url: str, window_seconds: float, config: PreflightJobConfig
) -> dict[str, Any]:
    """Return the Deployment. `engine_url`: `http://address:port` of the isolated pod, whose windows last `window_seconds`."""
    name, prompts = resource.metadata.name, resource.spec.rollout.analysis.shadow.prompts
    arguments = ["evaluator", f"--engine={engine_url}", f"--window-seconds={window_seconds:g}", f"--port={EVALUATOR_PORT}"]
    if prompts is not None:
        arguments.append(f"--prompts={_PROMPTS_PATH}/{prompts.key}")
    container = {
        "name": "evaluator",
        "image": config.image,
        "args": arguments,
        "ports": [{"name": "http", "containerPort": EVALUATOR_PORT}],
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 2},
        "resources": _RESOURCES,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "prompts", "mountPath": _PROMPTS_PATH, "readOnly": True}] if prompts else [],
    }
    pod_spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [_build_prompts_volume(prompts)] if prompts else [],
    }
    if config.pull_secrets:
        pod_spec["imagePullSecrets"] = [{"name": secret} for secret in config.pull_secrets]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": evaluator_name(name), "labels": naming.common_labels(name)},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {EVALUATOR_LABEL: name}},
            "strategy": {"type": "Recreate"},
            "revisionHistoryLimit": 0,
            "template": {
                "metadata": {
                    "labels": evaluator_labels(name) | DISABLE_SIDECAR_INJECTION,
                    "annotations": dict(DISABLE_SIDECAR_INJECTION),
                },
                "spec": pod_spec,
            },
        },
    }


def build_evaluator_service(resource: SpeculativeDeployment) -> dict[str, Any]:
    """Return the Service to which the route mirrors requests."""
    name = resource.metadata.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": evaluator_name(name), "labels": naming.common_labels(name)},
        "spec": {
            "type": "ClusterIP",
            "selector": {EVALUATOR_LABEL: name},
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def _build_prompts_volume(prompts: PromptsSource) -> dict[str, Any]:
    return {
        "name": "prompts",
        "configMap": {"name": prompts.config_map, "items": [{"key": prompts.key, "path": prompts.key}]},
    }
