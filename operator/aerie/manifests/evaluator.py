"""The evaluator of a shadow evaluation: its Deployment, and the Service to which a gateway mirrors requests.

It runs `aerie evaluator` of the operator's own image. It calls one engine, the isolated one, and nothing else.

From the engine's pod it inherits, as the preflight Job does, the image pull secrets, the node selector and the tolerations. It
has no service account of the engine: the pod's own pull secrets include those of its account. The engine's API key is mounted
from the Secret that the engine has it from (engine_key.py).

Guarantees: the pod fits Pod Security's profile `restricted`, and has no rights in the cluster. No Service of engines selects it,
because it has EVALUATOR_LABEL instead of NAME_LABEL. Sidecar injection is off as for preflight. Not guaranteed: that a network
policy admits it to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.rollout import PromptsSource
from aerie.manifests import naming
from aerie.manifests.engine_key import FILE_NAME, find_engine_key
from aerie.manifests.preflight_environment import SCHEDULING_FIELDS
from aerie.manifests.preflight_job import DISABLE_SIDECAR_INJECTION, PreflightJobConfig, build_image_pull_secrets

EVALUATOR_LABEL = "aerie.dev/evaluator"
EVALUATOR_PORT = 8000
_PROMPTS_PATH, _ENGINE_KEY_PATH = "/etc/aerie-prompts", "/etc/aerie-engine-key"
_RESOURCES = {"requests": {"cpu": "100m", "memory": "96Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}


def evaluator_name(resource_name: str) -> str:
    """Return the name of the Deployment and the Service."""
    return f"{resource_name}-evaluator"


def evaluator_labels(resource_name: str) -> dict[str, str]:
    """Return the labels of the evaluator's pod."""
    return {EVALUATOR_LABEL: resource_name, naming.MANAGED_BY_LABEL: naming.FIELD_MANAGER}


def build_evaluator_deployment(
    resource: SpeculativeDeployment,
    engine_pod: Mapping[str, Any],
    engine_url: str,
    window_seconds: float,
    config: PreflightJobConfig,
) -> dict[str, Any]:
    """Return the Deployment. `engine_pod`: the isolated pod, at `engine_url` (`http://address:port`), with windows of
    `window_seconds`."""
    name, prompts = resource.metadata.name, resource.spec.rollout.analysis.shadow.prompts
    arguments = ["evaluator", f"--engine={engine_url}", f"--window-seconds={window_seconds:g}", f"--port={EVALUATOR_PORT}"]
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if prompts is not None:
        arguments.append(f"--prompts={_PROMPTS_PATH}/{prompts.key}")
        volumes.append(_build_prompts_volume(prompts))
        mounts.append({"name": "prompts", "mountPath": _PROMPTS_PATH, "readOnly": True})
    engine_key = find_engine_key(engine_pod).volume_source
    if engine_key is not None:
        arguments.append(f"--engine-key-file={_ENGINE_KEY_PATH}/{FILE_NAME}")
        volumes.append({"name": "engine-key", **engine_key})
        mounts.append({"name": "engine-key", "mountPath": _ENGINE_KEY_PATH, "readOnly": True})
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
        "volumeMounts": mounts,
    }
    pod_spec: dict[str, Any] = {
        **{field: engine_pod["spec"][field] for field in SCHEDULING_FIELDS if field in engine_pod["spec"]},
        **build_image_pull_secrets(engine_pod, config.pull_secrets),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": volumes,
    }
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
