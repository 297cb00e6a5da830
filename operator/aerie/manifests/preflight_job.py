"""The preflight Job: looks at configs and weight headers where the engine would, before a GPU is asked for.

It runs `aerie preflight-job` of the operator's own image, without a GPU, with the volumes that the engine would have, and tells
its verdict in its termination message. One Job per revision; it stays as long as the revision is wanted. The ConfigMap of the
same name keeps the verdict too, so that it outlives the Job's pods, which anybody may clean up.

Guarantees: the pod fits Pod Security's profile `restricted` wherever the engine's volumes do, with every volume that a source
can have; it sets requests and limits for all that a quota can ask for; the usual meshes are asked to inject nothing. It reads
the Hub by the engine's way (surroundings.py). Its images are pulled with the secrets that the operator was given and those of
the engine's podTemplate, or where there are none with those of the engine's service account. The Job itself waits for a place,
an image or a permission for as long as these are missing (`DEADLINE` only ends what was left behind, such as an injected
container that never ends); how long the container may run is the operator's to say (rollout/revision/preflight_result.py). Not guaranteed: that
the cluster takes the pod; why it does not is shown to the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.engine import ResourceRequirements
from aerie.manifests import naming, preflight_environment
from aerie.manifests.pod import engine_pod

TERMINATION_LOG_PATH = "/dev/termination-log"
RESOURCE_KEY = "resource.json"
POD_TEMPLATE_KEY = "template.json"
RESULT_KEY = "verdict.json"
PREFLIGHT_CONTAINER = "preflight"
ACTIVE_DEADLINE_SECONDS = 6 * 60 * 60
"""Seconds after which Kubernetes ends the Job, whatever it waits for."""
DEFAULT_PREFLIGHT_RESOURCES = ResourceRequirements(
    requests={"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "64Mi"},
    limits={"cpu": "1", "memory": "512Mi", "ephemeral-storage": "256Mi"},
)
_CONFIG_MOUNT_PATH = "/etc/aerie"
_DISABLE_SIDECAR_INJECTION = {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"}
"""As labels and as annotations, because injectors have moved from the ones to the others."""


@dataclass(frozen=True)
class PreflightJobConfig:
    """What every preflight Job of this operator runs with, whatever the resource."""

    image: str
    """The operator's own."""
    pull_secrets: tuple[str, ...] = ()
    """Names of the Secrets, in the resource's namespace, by which the image is pulled; those that are not there do no harm."""
    resources: ResourceRequirements = DEFAULT_PREFLIGHT_RESOURCES
    env: tuple[Mapping[str, Any], ...] = ()
    """Variables of the container, such as the proxy of a cluster. Those of the engine go before."""


def preflight_job_name(resource_name: str, revision: str) -> str:
    """Name of the Job and of its ConfigMap."""
    return f"{resource_name}-{revision}-preflight"


def preflight_job_labels(resource_name: str, revision: str) -> dict[str, str]:
    """Labels of the Job and its pod. The pod has no label that a Service or a budget of engines selects by."""
    return {naming.PREFLIGHT_LABEL: resource_name, naming.REVISION_LABEL: revision, naming.MANAGED_BY_LABEL: naming.FIELD_MANAGER}


def build_preflight_config_map(
    resource: SpeculativeDeployment,
    revision: str,
    pod_template: Mapping[str, Any],
    result: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A ConfigMap with what the revision is: the resource as the Job reads it, its pods, for when the spec is another one, and
    the verdict."""
    spec = resource.spec.to_dict()
    document = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": resource.metadata.name, "namespace": resource.metadata.namespace},
        # What no pod depends on may change without a word here.
        "spec": {key: spec[key] for key in ("model", "engine", "drafter", "speculation") if key in spec},
    }
    own = naming.common_labels(resource.metadata.name) | {naming.REVISION_LABEL: revision}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": preflight_job_name(resource.metadata.name, revision), "labels": own},
        "data": {
            RESOURCE_KEY: json.dumps(document, sort_keys=True),
            POD_TEMPLATE_KEY: json.dumps(pod_template, sort_keys=True),
            **({RESULT_KEY: json.dumps(result, sort_keys=True)} if result else {}),
        },
    }


def build_preflight_job(
    resource: SpeculativeDeployment, revision: str, pod_template: Mapping[str, Any], config: PreflightJobConfig
) -> dict[str, Any]:
    """The Job. `template`: the pods of the revision's engine."""
    own = resource.metadata.name
    arguments = ["preflight-job", f"--file={_CONFIG_MOUNT_PATH}/resource.json", f"--report={TERMINATION_LOG_PATH}"]
    variables = preflight_environment.select_env(pod_template, config.env)
    volumes: list[dict[str, Any]] = [{"name": "aerie-resource", "configMap": {"name": preflight_job_name(own, revision)}}]
    mounts: list[dict[str, Any]] = [{"name": "aerie-resource", "mountPath": _CONFIG_MOUNT_PATH, "readOnly": True}]
    for option, volume, mount in engine_pod.build_source_volumes(resource):
        arguments.append(f"--{option}={mount['mountPath']}")
        volumes.append(volume)
        mounts.append(mount)
    for volume, mount in preflight_environment.select_volumes(pod_template, variables):
        if mount["mountPath"] not in {one["mountPath"] for one in mounts}:
            mounts.append(mount)
        if volume["name"] not in {one["name"] for one in volumes}:
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
    taken_over, groups = preflight_environment.select_pod_fields(pod_template)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": preflight_job_name(own, revision),
            "labels": naming.common_labels(own) | {naming.REVISION_LABEL: revision},
        },
        "spec": {
            "backoffLimit": 4,
            "activeDeadlineSeconds": ACTIVE_DEADLINE_SECONDS,
            "podFailurePolicy": {
                "rules": [
                    # A verdict (1), or a Hub that has said no (3): failures that no other try would mend soon.
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": PREFLIGHT_CONTAINER, "operator": "In", "values": [1, 3]},
                    },
                    # A drained or preempted pod says nothing about the files.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {
                "metadata": {
                    "labels": preflight_job_labels(own, revision) | _DISABLE_SIDECAR_INJECTION,
                    "annotations": dict(_DISABLE_SIDECAR_INJECTION),
                },
                "spec": {
                    **taken_over,
                    **_image_pull_secrets(pod_template, config),
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": {**groups, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }


def _image_pull_secrets(pod_template: Mapping[str, Any], config: PreflightJobConfig) -> dict[str, Any]:
    """Who may pull its images: the operator's Secrets, and what the user said of the engine's."""
    secrets = {name: {"name": name} for name in config.pull_secrets}
    for secret in pod_template["spec"].get("imagePullSecrets") or []:
        secrets.setdefault(str(secret.get("name")), secret)
    # With any of these, the API server adds none of the service account's.
    return {"imagePullSecrets": list(secrets.values())} if secrets else {}
