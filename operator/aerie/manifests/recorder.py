"""The recorder of a capture: its Deployment, and the Service to which a gateway mirrors requests.

It runs `aerie recorder` of the operator's own image, with the redaction hook as a second container where the resource has one.
From the engines' pods it inherits, as the evaluator does, the image pull secrets, the node selector and the tolerations. The
credentials of an object store are variables of the recorder alone, from the Secret that the resource names.

Guarantees: a function of the spec alone, so a rollout restarts no recorder. The pod fits Pod Security's profile `restricted` and
has no rights in the cluster. No Service of engines selects it, because it has RECORDER_LABEL instead of NAME_LABEL. The hook's
container mounts no storage. Not guaranteed: that a network policy keeps others away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.capture import RECORDER_PORT, CaptureSpec, ObjectStore, RedactionHook
from aerie.manifests.copy_receiver import SECURITY_CONTEXT, build_receiver_deployment, build_receiver_service
from aerie.manifests.preflight_job import PreflightJobConfig

RECORDER_LABEL = "aerie.dev/recorder"
_STORAGE_PATH = "/var/lib/aerie-capture"
_GROUP = 65532
"""Group of the operator's image, which owns what the recorder writes."""
_SPOOL_SIZE = "128Mi"
"""Size of the volume of files that wait for their upload: above MAX_SPOOLED_BYTES of the recorder, because a pod beyond it is
evicted."""
_RESOURCES = {"requests": {"cpu": "50m", "memory": "96Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}
_HOOK_SECURITY_CONTEXT = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_CONTAINER_SECURITY_CONTEXT = {**_HOOK_SECURITY_CONTEXT, "readOnlyRootFilesystem": True}


def recorder_name(resource_name: str) -> str:
    """Return the name of the Deployment and the Service."""
    return f"{resource_name}-recorder"


def build_recorder_deployment(
    resource: SpeculativeDeployment, capture: CaptureSpec, config: PreflightJobConfig
) -> dict[str, Any]:
    """Return the Deployment."""
    name, hook = resource.metadata.name, capture.redaction.hook
    template = resource.spec.engine.pod_template
    engine_pod: dict[str, Any] = {"spec": template.spec if template is not None else {}}
    containers = [_build_container(resource, capture, config)]
    if hook is not None:
        containers.append(_build_hook_container(hook))
    pod_spec = {
        "terminationGracePeriodSeconds": 30,
        "securityContext": SECURITY_CONTEXT | {"fsGroup": _GROUP},
        "containers": containers,
        "volumes": [{"name": "storage", **_build_volume_source(capture)}],
    }
    return build_receiver_deployment(recorder_name(name), name, RECORDER_LABEL, engine_pod, pod_spec, config)


def build_recorder_service(resource: SpeculativeDeployment) -> dict[str, Any]:
    """Return the Service to which the route mirrors requests."""
    name = resource.metadata.name
    return build_receiver_service(recorder_name(name), name, RECORDER_LABEL)


def _build_container(resource: SpeculativeDeployment, capture: CaptureSpec, config: PreflightJobConfig) -> dict[str, Any]:
    store, hook, claim = capture.storage.object_store, capture.redaction.hook, capture.storage.persistent_volume_claim
    path = claim.path.strip("/") if claim is not None else ""
    arguments = [
        "recorder",
        # Below the mount, not as its subPath: the recorder creates the folder as its own, the kubelet would as root's.
        f"--folder={'/'.join(part for part in (_STORAGE_PATH, path, resource.metadata.name) if part)}",
        f"--rate={capture.sampling.rate:g}",
        f"--max-per-minute={capture.sampling.max_per_minute}",
        f"--retention-seconds={int(capture.retention.duration.total_seconds())}",
        f"--max-bytes={capture.retention.max_bytes}",
        f"--port={RECORDER_PORT}",
    ]
    if capture.redaction.patterns:
        arguments.append(f"--redact={json.dumps([pattern.to_dict() for pattern in capture.redaction.patterns])}")
    if hook is not None:
        arguments.append(f"--hook-url=http://127.0.0.1:{hook.port}{hook.path}")
        arguments.append(f"--hook-timeout-seconds={hook.timeout.total_seconds():g}")
    if store is not None:
        arguments += _build_bucket_arguments(resource, store)
    return {
        "name": "recorder",
        "image": config.image,
        # Kubernetes replaces $(NAME) in arguments, and $$ by $.
        "args": [argument.replace("$", "$$") for argument in arguments],
        **({"env": _build_credentials(store)} if store is not None else {}),
        "ports": [{"name": "http", "containerPort": RECORDER_PORT}],
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 5},
        "resources": _RESOURCES,
        "securityContext": _CONTAINER_SECURITY_CONTEXT,
        "volumeMounts": [{"name": "storage", "mountPath": _STORAGE_PATH}],
    }


def _build_hook_container(hook: RedactionHook) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "hook",
        "image": hook.image,
        "args": hook.args,
        "env": [variable.to_dict() for variable in hook.env],
        "resources": hook.resources.to_dict() if hook.resources is not None else {},
        "securityContext": _HOOK_SECURITY_CONTEXT,
    }
    return {name: value for name, value in container.items() if value}


def _build_volume_source(capture: CaptureSpec) -> dict[str, Any]:
    claim = capture.storage.persistent_volume_claim
    if claim is not None:
        return {"persistentVolumeClaim": {"claimName": claim.claim_name}}
    return {"emptyDir": {"sizeLimit": _SPOOL_SIZE}}


def _build_bucket_arguments(resource: SpeculativeDeployment, store: ObjectStore) -> list[str]:
    parts = (store.prefix, resource.metadata.namespace, resource.metadata.name)
    arguments = [
        f"--bucket={store.bucket}",
        f"--prefix={'/'.join(part for part in parts if part)}",
        f"--region={store.region}",
    ]
    return arguments if store.endpoint is None else [*arguments, f"--endpoint={store.endpoint}"]


def _build_credentials(store: ObjectStore) -> list[Mapping[str, Any]]:
    return [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": store.credentials_secret_ref.name, "key": key}}}
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    ]
