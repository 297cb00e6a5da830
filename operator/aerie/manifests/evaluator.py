"""The evaluator of a shadow evaluation: its Deployment, and the Service to which a gateway mirrors requests.

It runs `aerie evaluator` of the operator's own image. It calls the engines that it compares, or the isolated one, and nothing
else. The operator fetches the counts of two engines through the Service, by a token from a Secret.

From the engine's pod it inherits, as the preflight Job does, the image pull secrets, the node selector and the tolerations. It
has no service account of the engine: the pod's own pull secrets include those of its account. The engine's API key is mounted
from the Secret that the engine has it from (engine_key.py).

Guarantees: the pod fits Pod Security's profile `restricted`, and has no rights in the cluster. No Service of engines selects it,
because it has EVALUATOR_LABEL instead of NAME_LABEL. Sidecar injection is off as for preflight. Not guaranteed: that a network
policy admits it to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.rollout import PromptsSource
from aerie.engine.arguments import parse_flags
from aerie.manifests import naming
from aerie.manifests.copy_receiver import build_receiver_deployment, build_receiver_service
from aerie.manifests.engine_key import FILE_NAME, find_engine_key
from aerie.manifests.preflight_job import PreflightJobConfig

EVALUATOR_LABEL = "aerie.dev/evaluator"
EVALUATOR_PORT = 8000
PAIRS_PATH = "/aerie/pairs"
"""Path of the counts of two engines."""
LOWEST_PRIORITY = 1_000_000
"""Priority of the requests in engines that have priorities: higher is later."""
_PROMPTS_PATH, _TOKEN_PATH, _ENGINE_KEY_PATH = "/etc/aerie-prompts", "/etc/aerie-token", "/etc/aerie-engine-key"
_RESOURCES = {"requests": {"cpu": "100m", "memory": "96Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}


def evaluator_name(resource_name: str) -> str:
    """Return the name of the Deployment and the Service."""
    return f"{resource_name}-evaluator"


def build_evaluator_deployment(
    resource: SpeculativeDeployment,
    engine_pod: Mapping[str, Any],
    engine_url: str,
    window_seconds: float,
    config: PreflightJobConfig,
) -> dict[str, Any]:
    """Return the Deployment. `engine_pod`: the isolated pod, at `engine_url` (`http://address:port`), with windows of
    `window_seconds`."""
    arguments = (f"--engine={engine_url}", f"--window-seconds={window_seconds:g}")
    return _build_deployment(resource, engine_pod, arguments, {}, config)


def build_paired_evaluator_deployment(
    resource: SpeculativeDeployment,
    engine_pod: Mapping[str, Any],
    canary_urls: Sequence[str],
    control_urls: Sequence[str],
    config: PreflightJobConfig,
) -> dict[str, Any]:
    """Return the Deployment that compares engines, by their `http://address:port`. `engine_pod`: a pod of the canary; the pods
    of both arms have the same API key."""
    arguments = [
        *(f"--canary={url}" for url in canary_urls),
        *(f"--control={url}" for url in control_urls),
        f"--token-file={_TOKEN_PATH}/{naming.EVALUATOR_TOKEN_KEY}",
    ]
    values = {flag.name: flag.values for flag in parse_flags(resource.spec.engine.args)}
    if values.get("--scheduling-policy") == ("priority",):
        arguments.append(f"--priority={LOWEST_PRIORITY}")
    if values.get("--generation-config") == ("vllm",):
        arguments.append("--neutral-defaults")
    token = {"secretName": naming.evaluator_token_secret_name(resource.metadata.name)}
    return _build_deployment(resource, engine_pod, arguments, {"token": (_TOKEN_PATH, {"secret": token})}, config)


def _build_deployment(
    resource: SpeculativeDeployment,
    engine_pod: Mapping[str, Any],
    source_arguments: Sequence[str],
    volumes: Mapping[str, tuple[str, Mapping[str, Any]]],
    config: PreflightJobConfig,
) -> dict[str, Any]:
    """Return the Deployment. `volumes`: mount path and source of each volume besides prompts and API key, by name."""
    name, prompts = resource.metadata.name, resource.spec.rollout.analysis.shadow.prompts
    arguments = ["evaluator", *source_arguments, f"--port={EVALUATOR_PORT}"]
    if prompts is not None:
        arguments.append(f"--prompts={_PROMPTS_PATH}/{prompts.key}")
        volumes = {**volumes, "prompts": (_PROMPTS_PATH, _build_prompts_source(prompts))}
    engine_key = find_engine_key(engine_pod).volume_source
    if engine_key is not None:
        arguments.append(f"--engine-key-file={_ENGINE_KEY_PATH}/{FILE_NAME}")
        volumes = {**volumes, "engine-key": (_ENGINE_KEY_PATH, engine_key)}
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
        "volumeMounts": [{"name": volume, "mountPath": path, "readOnly": True} for volume, (path, _) in volumes.items()],
    }
    pod_spec = {
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": [{"name": volume, **source} for volume, (_, source) in volumes.items()],
    }
    return build_receiver_deployment(evaluator_name(name), name, EVALUATOR_LABEL, engine_pod, pod_spec, config)


def build_evaluator_service(resource: SpeculativeDeployment) -> dict[str, Any]:
    """Return the Service to which the route mirrors requests, and from which the operator fetches counts."""
    name = resource.metadata.name
    return build_receiver_service(evaluator_name(name), name, EVALUATOR_LABEL)


def _build_prompts_source(prompts: PromptsSource) -> dict[str, Any]:
    return {"configMap": {"name": prompts.config_map, "items": [{"key": prompts.key, "path": prompts.key}]}}
