"""The preflight Job: inspects configs and weight headers where the engine would run, before a GPU is requested.

It runs `aerie preflight-job` of the operator's own image, without a GPU, with the volumes that the engine would have. Its
termination message holds the preflight result. Each revision has one Job, which stays as long as the revision is desired. The
ConfigMap of the same name keeps the result too, so that it outlives the Job's pods, which anybody may clean up.

For a change that may be rolled out in place, the Job also reads the drafter of the running engines (`RunningDrafter`). The result
has a field for that, and preflight passes without it.

Guarantees: the pod fits Pod Security's profile `restricted` wherever the engine's volumes do, with every volume that a source
can have. It sets requests and limits for everything that a quota can require. Istio and Linkerd are configured to inject
nothing. It reads the Hub the way the engine does (preflight_environment.py). Its images are pulled with the secrets of the
operator's options and of the engine's podTemplate; without any, with those of the engine's service account. The Job waits for a
node, an image or a permission for as long as these are missing. `ACTIVE_DEADLINE_SECONDS` only ends what remains, such as an
injected container that never ends. The operator limits the container's running time (rollout/revision/preflight_result.py). Not
guaranteed: that the cluster accepts the pod; the reason for a rejection is shown to the user.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.engine import ResourceRequirements
from aerie.manifests import naming, preflight_environment
from aerie.manifests.pod import engine_pod

TERMINATION_LOG_PATH = "/dev/termination-log"
RESOURCE_KEY = "resource.json"
POD_TEMPLATE_KEY = "template.json"
RESULT_KEY = "result.json"
PREFLIGHT_CONTAINER = "preflight"
ACTIVE_DEADLINE_SECONDS = 6 * 60 * 60
"""Seconds after which Kubernetes ends the Job, whatever it waits for."""
DEFAULT_PREFLIGHT_RESOURCES = ResourceRequirements(
    requests={"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "64Mi"},
    limits={"cpu": "1", "memory": "512Mi", "ephemeral-storage": "256Mi"},
)
_CONFIG_MOUNT_PATH = "/etc/aerie"
_RUNNING_CONFIG_PATH, _RUNNING_DRAFTER_PATH = "/etc/aerie-running", "/models/running-drafter"
DISABLE_SIDECAR_INJECTION = {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"}
"""Set as labels and as annotations, because injectors have moved from annotations to labels."""


@dataclass(frozen=True)
class PreflightJobConfig:
    """Settings of every preflight Job of this operator, whatever the resource."""

    image: str
    """The operator's own image."""
    pull_secrets: tuple[str, ...] = ()
    """Names of the image pull Secrets, in the resource's namespace; missing ones do no harm."""
    resources: ResourceRequirements = DEFAULT_PREFLIGHT_RESOURCES
    env: tuple[Mapping[str, Any], ...] = ()
    """Variables of the container, such as the proxy of a cluster. The engine's variables take precedence."""


@dataclass(frozen=True)
class RunningDrafter:
    """The drafter of the running engines, which the desired one would replace in place."""

    revision: str
    """Revision of the engines, whose record names the drafter."""
    resource: SpeculativeDeployment
    """The resource as recorded of this revision."""
    promoted: str = ""
    """owner/name@commit of the drafter of the Hub that was promoted in place, and is in the pods' cache too."""


def preflight_job_name(resource_name: str, revision: str) -> str:
    """Return the name of the Job and of its ConfigMap."""
    return f"{resource_name}-{revision}-preflight"


def preflight_job_labels(resource_name: str, revision: str) -> dict[str, str]:
    """Return the labels of the Job and its pod. No Service or budget of engines selects the pod by them."""
    return {naming.PREFLIGHT_LABEL: resource_name, naming.REVISION_LABEL: revision, naming.MANAGED_BY_LABEL: naming.FIELD_MANAGER}


def build_preflight_config_map(
    resource: SpeculativeDeployment,
    revision: str,
    pod_template: Mapping[str, Any],
    result: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the ConfigMap that records the revision: the resource as the Job reads it, the pod template, for the time when the
    spec has changed, and the preflight result."""
    spec = resource.spec.to_dict()
    document = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": resource.metadata.name, "namespace": resource.metadata.namespace},
        # Only fields that a pod depends on: the others may change without a change here.
        "spec": {key: spec[key] for key in ("model", "engine", "drafter", "speculation") if key in spec},
    }
    labels = naming.common_labels(resource.metadata.name) | {naming.REVISION_LABEL: revision}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": preflight_job_name(resource.metadata.name, revision), "labels": labels},
        "data": {
            RESOURCE_KEY: json.dumps(document, sort_keys=True),
            POD_TEMPLATE_KEY: json.dumps(pod_template, sort_keys=True),
            **({RESULT_KEY: json.dumps(result, sort_keys=True)} if result else {}),
        },
    }


def build_preflight_job(
    resource: SpeculativeDeployment,
    revision: str,
    pod_template: Mapping[str, Any],
    config: PreflightJobConfig,
    running: RunningDrafter | None = None,
) -> dict[str, Any]:
    """Return the Job. `pod_template`: the template of the revision's engine pods. `running`: the drafter to compare with."""
    name = resource.metadata.name
    container, volumes = _build_container(resource, revision, pod_template, config, running)
    pod_fields, group_fields = preflight_environment.select_pod_fields(pod_template)
    pod_spec = {
        **pod_fields,
        **build_image_pull_secrets(pod_template, config.pull_secrets),
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {**group_fields, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": volumes,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": preflight_job_name(name, revision),
            "labels": naming.common_labels(name) | {naming.REVISION_LABEL: revision},
        },
        "spec": {
            "backoffLimit": 4,
            "activeDeadlineSeconds": ACTIVE_DEADLINE_SECONDS,
            "podFailurePolicy": {
                "rules": [
                    # A failed preflight (1) or a rejection by the Hub (3): no other try would succeed soon.
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": PREFLIGHT_CONTAINER, "operator": "In", "values": [1, 3]},
                    },
                    # A drained or preempted pod reports nothing about the files.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {
                "metadata": {
                    "labels": preflight_job_labels(name, revision) | DISABLE_SIDECAR_INJECTION,
                    "annotations": dict(DISABLE_SIDECAR_INJECTION),
                },
                "spec": pod_spec,
            },
        },
    }


def _build_container(
    resource: SpeculativeDeployment,
    revision: str,
    pod_template: Mapping[str, Any],
    config: PreflightJobConfig,
    running: RunningDrafter | None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the Job's container, and the volumes of its pod."""
    config_map = preflight_job_name(resource.metadata.name, revision)
    arguments = ["preflight-job", f"--file={_CONFIG_MOUNT_PATH}/resource.json", f"--report={TERMINATION_LOG_PATH}"]
    variables = preflight_environment.select_env(pod_template, config.env)
    volumes: list[dict[str, Any]] = [{"name": "aerie-resource", "configMap": {"name": config_map}}]
    mounts: list[dict[str, Any]] = [{"name": "aerie-resource", "mountPath": _CONFIG_MOUNT_PATH, "readOnly": True}]
    for option, volume, mount in engine_pod.build_source_volumes(resource):
        arguments.append(f"--{option}={mount['mountPath']}")
        volumes.append(volume)
        mounts.append(mount)
    if running is not None:
        running_arguments, running_volumes, running_mounts = _build_running_drafter(running)
        arguments += running_arguments
        volumes += [volume for volume in running_volumes if volume["name"] not in {entry["name"] for entry in volumes}]
        mounts += running_mounts
    for volume, mount in preflight_environment.select_volumes(pod_template, variables):
        if mount["mountPath"] not in {entry["mountPath"] for entry in mounts}:
            mounts.append(mount)
        if volume["name"] not in {entry["name"] for entry in volumes}:
            volumes.append(volume)
    container: dict[str, Any] = {
        "name": PREFLIGHT_CONTAINER,
        "image": config.image,
        "args": arguments,
        "env": variables,
        "envFrom": preflight_environment.select_env_from(pod_template),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "resources": config.resources.to_dict(),
        "terminationMessagePath": TERMINATION_LOG_PATH,
        "volumeMounts": mounts,
    }
    return container, volumes


def _build_running_drafter(running: RunningDrafter) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return arguments, volumes and mounts: of the record of the running engines, and of their drafter. The volume of a claim has
    the name of the desired drafter's, whose claim is the same if it has one."""
    record = {"name": preflight_job_name(running.resource.metadata.name, running.revision), "optional": True}
    volumes = [{"name": "aerie-running", "configMap": {**record, "items": [{"key": RESOURCE_KEY, "path": RESOURCE_KEY}]}}]
    arguments = [f"--running-file={_RUNNING_CONFIG_PATH}/{RESOURCE_KEY}", f"--running-revision={running.revision}"]
    if running.promoted:
        arguments.append(f"--promoted-drafter={running.promoted}")
    mounts = [{"name": "aerie-running", "mountPath": _RUNNING_CONFIG_PATH, "readOnly": True}]
    for option, volume, mount in engine_pod.build_source_volumes(running.resource):
        if option == "drafter":
            arguments.append(f"--running-drafter={_RUNNING_DRAFTER_PATH}")
            volumes.append(volume)
            mounts.append({**mount, "mountPath": _RUNNING_DRAFTER_PATH})
    return arguments, volumes, mounts


def build_image_pull_secrets(pod_template: Mapping[str, Any], pull_secrets: Iterable[str]) -> dict[str, Any]:
    """Return the field of a pod with the operator's image: the operator's pull secrets, and those of the engine's pod."""
    secrets = {name: {"name": name} for name in pull_secrets}
    for secret in pod_template["spec"].get("imagePullSecrets") or []:
        secrets.setdefault(str(secret.get("name")), secret)
    # With any of these, the API server adds no secrets of the service account.
    return {"imagePullSecrets": list(secrets.values())} if secrets else {}
