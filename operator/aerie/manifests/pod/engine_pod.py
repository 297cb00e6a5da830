"""The engine's pod: vLLM with target and drafter, probes for a long model load, and a graceful shutdown.

    preStop sleep ─► SIGTERM ─► --shutdown-timeout ─► SIGKILL
    endpoints drop    running answers finish           terminationGracePeriodSeconds after the first

Guarantees: the pod follows from the resource and the speculation setting alone. podTemplate is merged over it last, but the
labels by which Aerie finds its pods take precedence (deployment.py). Not guaranteed: that the cluster accepts the pod; its
answer is shown to the user.

Facts of vLLM: `--shutdown-timeout` (0.18 and newer) lets running requests end after SIGTERM and rejects new ones. /health
answers 200 while draining, so readiness does not help and endpoints have to be removed before (measured with 0.32). vLLM closes
a connection that was idle for VLLM_HTTP_TIMEOUT_KEEP_ALIVE seconds, 5 by default (vllm/envs.py). A gateway that keeps it longer
may send a request into a connection that is just closing; the client then gets a 503.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.source import HuggingFaceSource, ImageSource, ModelSource, VolumeClaimSource
from aerie.engine import command_line
from aerie.manifests import naming
from aerie.manifests.pod.pod_template_policy import check_merged_pod_spec
from aerie.manifests.pod.strategic_merge import apply_strategic_merge

DEFAULT_GRACE_PERIOD_SECONDS = 120
"""Seconds between a pod's deletion and its kill, where podTemplate sets none: a long answer takes minutes."""
PRE_STOP_SECONDS = 10
"""Seconds in which the removal of the endpoint reaches every proxy and gateway."""
SHUTDOWN_MARGIN_SECONDS = 5
"""Seconds left for the engine to end after its last answer."""
STARTUP_TIMEOUT_SECONDS = 2 * 60 * 60
"""Seconds that a start may take before Kubernetes restarts the container. Usually Aerie's own rollout.progressDeadline ends a
failed start. It is not this number, because changing it would then change the pods."""
KEEP_ALIVE_SECONDS = 3900
"""Seconds for which an engine keeps an idle connection: longer than the gateway before it. Envoy's default is an hour
(common_http_protocol_options.idle_timeout of a cluster)."""
HEALTH_CHECK = {"path": "/health", "port": naming.ENGINE_PORT_NAME}
"""Request of all three probes."""

_TARGET_PATH = "/models/target"
_DRAFTER_PATH = "/models/drafter"


def build_pod_template(resource: SpeculativeDeployment, speculative_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the pod template of the engine, without the selector labels of its Deployment.

    `speculative_config` is vLLM's `--speculative-config` for the resource's drafter and setting (`drafter_location` is its
    `model`), or None for an engine without a drafter. Raises ArgumentError when the user's arguments include one of Aerie's.
    Raises PodTemplateError when podTemplate removes something that the engine needs.
    """
    user_template = resource.spec.engine.pod_template
    base = {"metadata": {"labels": {}, "annotations": {}}, "spec": _build_pod_spec(resource, speculative_config)}
    if user_template is None:
        return base
    labels = {
        key: value
        for key, value in (user_template.metadata.labels if user_template.metadata else {}).items()
        if "aerie.dev/" not in key
    }
    annotations = dict(user_template.metadata.annotations) if user_template.metadata else {}
    spec = apply_strategic_merge(base["spec"], user_template.spec)
    check_merged_pod_spec(base["spec"], spec)
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def target_location(resource: SpeculativeDeployment) -> str:
    """Return the engine's `--model`: a folder of the pod, or a repository."""
    return _model_location(resource.spec.model.source, _TARGET_PATH)


def drafter_location(resource: SpeculativeDeployment) -> str | None:
    """Return `model` of the speculative config: a folder of the pod, or a repository. None without a drafter."""
    return _model_location(resource.spec.drafter.source, _DRAFTER_PATH) if resource.spec.drafter else None


def shutdown_timeout_seconds(resource: SpeculativeDeployment) -> int:
    """Return the seconds for running answers after SIGTERM: the rest of the grace period."""
    return max(1, _grace_period_seconds(resource) - PRE_STOP_SECONDS - SHUTDOWN_MARGIN_SECONDS)


def _grace_period_seconds(resource: SpeculativeDeployment) -> int:
    user_template = resource.spec.engine.pod_template
    seconds = user_template.spec.get("terminationGracePeriodSeconds") if user_template else None
    return seconds if isinstance(seconds, int) else DEFAULT_GRACE_PERIOD_SECONDS


def _build_pod_spec(resource: SpeculativeDeployment, speculative_config: Mapping[str, Any] | None) -> dict[str, Any]:
    volumes, mounts = _build_volumes(resource, with_drafter=speculative_config is not None)
    engine = resource.spec.engine
    container = {
        "name": naming.ENGINE_CONTAINER,
        "image": engine.image,
        "args": _build_arguments(resource, speculative_config),
        "env": _build_env(resource),
        "ports": [{"name": naming.ENGINE_PORT_NAME, "containerPort": naming.ENGINE_PORT}],
        "startupProbe": _build_probe(period_seconds=10, failure_threshold=STARTUP_TIMEOUT_SECONDS // 10),
        "readinessProbe": _build_probe(period_seconds=5, failure_threshold=3),
        # A dead engine answers 503 and exits; this probe catches one that hangs.
        "livenessProbe": _build_probe(period_seconds=10, failure_threshold=12),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    if engine.resources is not None:
        container["resources"] = engine.resources.to_dict()
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {naming.NAME_LABEL: resource.metadata.name}},
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": _grace_period_seconds(resource),
        "topologySpreadConstraints": [spread],
        "containers": [container],
        "volumes": volumes,
    }


def _build_arguments(resource: SpeculativeDeployment, speculative_config: Mapping[str, Any] | None) -> list[str]:
    source = resource.spec.model.source.variant
    server = command_line.ServerArguments(
        model=target_location(resource),
        revision=source.revision if isinstance(source, HuggingFaceSource) else None,
        served_name=resource.served_name,
        port=naming.ENGINE_PORT,
        shutdown_timeout_seconds=shutdown_timeout_seconds(resource),
    )
    return command_line.build_serve_arguments(server, resource.spec.engine.args, speculative_config)


def _build_env(resource: SpeculativeDeployment) -> list[dict[str, Any]]:
    engine = resource.spec.engine
    defaults: list[dict[str, Any]] = [
        {"name": "HF_HOME", "value": naming.HF_HOME_PATH},
        {"name": "VLLM_CACHE_ROOT", "value": f"{naming.CACHE_PATH}/vllm"},
        {"name": "VLLM_NO_USAGE_STATS", "value": "1"},
        {"name": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "value": str(KEEP_ALIVE_SECONDS)},
    ]
    defaults += _build_token_env(resource)
    user_variables = [variable.to_dict() for variable in engine.env]
    user_names = {variable["name"] for variable in user_variables}
    return [variable for variable in defaults if variable["name"] not in user_names] + user_variables


def _build_token_env(resource: SpeculativeDeployment) -> list[dict[str, Any]]:
    """Return the variable with the token of the Hub, where the resource names its Secret."""
    secret = resource.spec.engine.token_secret_ref
    if secret is None:
        return []
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}]


def build_source_volumes(resource: SpeculativeDeployment) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield ("target" or "drafter", volume, mount) for each source that is not a repository."""
    sources = [("target", resource.spec.model.source, _TARGET_PATH)]
    if resource.spec.drafter is not None:
        sources.append(("drafter", resource.spec.drafter.source, _DRAFTER_PATH))
    for name, source, mount_path in sources:
        volume, sub_path = _build_source_volume(source)
        if volume is not None:
            mount = {"name": name, "mountPath": mount_path, "readOnly": True, **({"subPath": sub_path} if sub_path else {})}
            yield name, {"name": name, **volume}, mount


def _build_volumes(resource: SpeculativeDeployment, *, with_drafter: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    cache = resource.spec.engine.cache
    if cache is not None and cache.claim_name is not None:
        cache_volume: dict[str, Any] = {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    else:
        cache_volume = {"emptyDir": {"sizeLimit": cache.size_limit} if cache is not None and cache.size_limit else {}}
    # Tensor-parallel workers and the API process share memory in /dev/shm; a container's default is 64 MiB.
    volumes = [{"name": "cache", **cache_volume}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "cache", "mountPath": naming.CACHE_PATH}, {"name": "shm", "mountPath": "/dev/shm"}]
    for name, volume, mount in build_source_volumes(resource):
        if name == "target" or with_drafter:
            volumes.append(volume)
            mounts.append(mount)
    return volumes, mounts


def _build_source_volume(source: ModelSource) -> tuple[dict[str, Any] | None, str]:
    """Return the volume with the source's files and the folder in it; (None, "") for a repository of the Hub."""
    match source.variant:
        case VolumeClaimSource(claim_name=claim, path=path):
            return {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}, path.strip("/")
        case ImageSource(reference=reference, path=path):
            return {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}, path.strip("/")
        case _:
            return None, ""


def _model_location(source: ModelSource, mount_path: str) -> str:
    variant = source.variant
    return variant.repo if isinstance(variant, HuggingFaceSource) else mount_path


def _build_probe(period_seconds: int, failure_threshold: int) -> dict[str, Any]:
    # An engine under full load answers late; the probe does not test response time.
    return {
        "httpGet": dict(HEALTH_CHECK),
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failure_threshold,
    }
