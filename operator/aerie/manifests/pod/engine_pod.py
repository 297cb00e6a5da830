"""The engine's pod: vLLM with target and drafter, probes fit for a long load, and an end that lets answers finish.

    preStop sleep ─► SIGTERM ─► --shutdown-timeout ─► SIGKILL
    endpoints drop    running answers finish           terminationGracePeriodSeconds after the first

Guarantees: the pod follows from the resource and the setting alone; podTemplate is merged over it last, but the labels by
which Aerie finds its pods win (workload.py). Not guaranteed: that the cluster takes the pod; its answer is shown to the user.

Facts of vLLM: `--shutdown-timeout` (0.18 on) lets running requests end after SIGTERM and refuses new ones; /health answers
200 while draining, so readiness does not help and endpoints have to be gone before (measured with 0.32). It closes a connection
that was idle for VLLM_HTTP_TIMEOUT_KEEP_ALIVE seconds, 5 by default (vllm/envs.py); a gateway that keeps it longer may send a
request into one that is just closing, which its client sees as a 503.
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
"""Seconds between a pod's deletion and its kill, where podTemplate says nothing: a long answer takes minutes."""
PRE_STOP_SECONDS = 10
"""Seconds in which the end of the endpoint reaches every proxy and gateway."""
SHUTDOWN_MARGIN_SECONDS = 5
"""Seconds left for the engine to end after its last answer."""
STARTUP_TIMEOUT_SECONDS = 2 * 60 * 60
"""Seconds that a start may take before Kubernetes begins it anew. Aerie's own rollout.progressDeadline is what usually ends a
bad start; if it were this number, changing it would change the pods."""
KEEP_ALIVE_SECONDS = 3900
"""Seconds for which an engine keeps an idle connection: longer than the gateway before it, where Envoy's default is an hour
(common_http_protocol_options.idle_timeout of a cluster)."""

_CACHE_PATH = naming.CACHE_PATH
_TARGET_PATH = "/models/target"
_DRAFTER_PATH = "/models/drafter"


def build_pod_template(resource: SpeculativeDeployment, speculative_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The pod template of the engine, without the labels of its group.

    `speculative_config` is vLLM's `--speculative-config` for the resource's drafter and setting (`drafter_location` is its
    `model`), or None for an engine without a drafter. Raises ArgumentError when the user's arguments include one of Aerie's, and
    TemplateError when podTemplate takes away what the engine needs.
    """
    given = resource.spec.engine.pod_template
    base = {"metadata": {"labels": {}, "annotations": {}}, "spec": _build_pod_spec(resource, speculative_config)}
    if given is None:
        return base
    own = {key: value for key, value in (given.metadata.labels if given.metadata else {}).items() if "aerie.dev/" not in key}
    annotations = dict(given.metadata.annotations) if given.metadata else {}
    spec = apply_strategic_merge(base["spec"], given.spec)
    check_merged_pod_spec(base["spec"], spec)
    return {"metadata": {"labels": own, "annotations": annotations}, "spec": spec}


def target_location(resource: SpeculativeDeployment) -> str:
    """What the engine is told as `--model`: a folder of the pod, or a repository."""
    return _model_location(resource.spec.model.source, _TARGET_PATH)


def drafter_location(resource: SpeculativeDeployment) -> str | None:
    """What `model` of the speculative configuration is: a folder of the pod, or a repository. None without a drafter."""
    return _model_location(resource.spec.drafter.source, _DRAFTER_PATH) if resource.spec.drafter else None


def shutdown_timeout_seconds(resource: SpeculativeDeployment) -> int:
    """Seconds for running answers after SIGTERM: what the grace period leaves."""
    return max(1, _grace_period_seconds(resource) - PRE_STOP_SECONDS - SHUTDOWN_MARGIN_SECONDS)


def _grace_period_seconds(resource: SpeculativeDeployment) -> int:
    given = resource.spec.engine.pod_template
    seconds = given.spec.get("terminationGracePeriodSeconds") if given else None
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
        # A dead engine answers 503 and ends by itself; this is for one that hangs.
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
    own: list[dict[str, Any]] = [
        {"name": "HF_HOME", "value": naming.HF_HOME_PATH},
        {"name": "VLLM_CACHE_ROOT", "value": f"{_CACHE_PATH}/vllm"},
        {"name": "VLLM_NO_USAGE_STATS", "value": "1"},
        {"name": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "value": str(KEEP_ALIVE_SECONDS)},
    ]
    own += _build_token_env(resource)
    given = [variable.to_dict() for variable in engine.env]
    taken = {variable["name"] for variable in given}
    return [variable for variable in own if variable["name"] not in taken] + given


def _build_token_env(resource: SpeculativeDeployment) -> list[dict[str, Any]]:
    """The variable with the token of the Hub, where the resource names its Secret."""
    secret = resource.spec.engine.token_secret
    if secret is None:
        return []
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}]


def build_source_volumes(resource: SpeculativeDeployment) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(target or drafter, volume, mount) for each source that is no repository."""
    sources = [("target", resource.spec.model.source, _TARGET_PATH)]
    if resource.spec.drafter is not None:
        sources.append(("drafter", resource.spec.drafter.source, _DRAFTER_PATH))
    for name, source, folder in sources:
        volume, below = _build_source_volume(source)
        if volume is not None:
            mount = {"name": name, "mountPath": folder, "readOnly": True, **({"subPath": below} if below else {})}
            yield name, {"name": name, **volume}, mount


def _build_volumes(resource: SpeculativeDeployment, *, with_drafter: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    cache = resource.spec.engine.cache
    if cache is not None and cache.claim_name is not None:
        kept: dict[str, Any] = {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    else:
        kept = {"emptyDir": {"sizeLimit": cache.size_limit} if cache is not None and cache.size_limit else {}}
    # Tensor-parallel workers and the API process share memory there, and a container has 64 MiB by itself.
    volumes = [{"name": "cache", **kept}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "cache", "mountPath": _CACHE_PATH}, {"name": "shm", "mountPath": "/dev/shm"}]
    for name, volume, mount in build_source_volumes(resource):
        if name == "target" or with_drafter:
            volumes.append(volume)
            mounts.append(mount)
    return volumes, mounts


def _build_source_volume(source: ModelSource) -> tuple[dict[str, Any] | None, str]:
    """The volume that holds the source's files and the folder in it; (None, "") for a repository of the Hub."""
    match source.variant:
        case VolumeClaimSource(claim_name=claim, path=path):
            return {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}, path.strip("/")
        case ImageSource(reference=reference, path=path):
            return {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}, path.strip("/")
        case _:
            return None, ""


def _model_location(source: ModelSource, mount_path: str) -> str:
    given = source.variant
    return given.repo if isinstance(given, HuggingFaceSource) else mount_path


def _build_probe(period_seconds: int, failure_threshold: int) -> dict[str, Any]:
    # An engine under full load answers late, and on time is not what the probe is for.
    check = {"path": "/health", "port": naming.ENGINE_PORT_NAME}
    return {"httpGet": check, "periodSeconds": period_seconds, "timeoutSeconds": 5, "failureThreshold": failure_threshold}
