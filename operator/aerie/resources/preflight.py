"""The preflight Job: looks at configs and weight headers where the engine would, before a GPU is asked for.

It runs `aerie preflight-job` of the operator's own image, without a GPU, with the volumes that the engine would have, and tells
its verdict in its termination message. One Job per revision; it stays as long as the revision is wanted, as the record of its
verdict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.resources import names, pod

REPORT = "/dev/termination-log"
_NO_SIDECAR = {"sidecar.istio.io/inject": "false"}
_NO_PROXY = {"linkerd.io/inject": "disabled"}
"""What keeps meshes from adding a container that never ends to the Job's pod. Istio reads the label, or once the annotation."""
RESOURCE = "resource.json"
TEMPLATE = "template.json"
_FOLDER = "/etc/aerie"


def name(resource_name: str, revision: str) -> str:
    """Name of the Job and of its ConfigMap."""
    return f"{resource_name}-{revision}-preflight"


def labels(resource_name: str, revision: str) -> dict[str, str]:
    """Labels of the Job and its pod. The pod has no label that a Service or a budget of engines selects by."""
    return {names.PREFLIGHT: resource_name, names.REVISION: revision, names.MANAGED_BY: names.FIELD_MANAGER}


def record(resource: SpeculativeDeployment, revision: str, template: Mapping[str, Any]) -> dict[str, Any]:
    """A ConfigMap with what the revision is: the resource as the Job reads it, and its pods, for when the spec is another one."""
    spec = resource.spec.to_dict()
    document = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": resource.metadata.name, "namespace": resource.metadata.namespace},
        # What no pod depends on may change without a word here.
        "spec": {key: spec[key] for key in ("model", "engine", "drafter", "speculation") if key in spec},
    }
    own = names.common(resource.metadata.name) | {names.REVISION: revision}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name(resource.metadata.name, revision), "labels": own},
        "data": {
            RESOURCE: json.dumps(document, sort_keys=True),
            TEMPLATE: json.dumps(template, sort_keys=True),
        },
    }


def job(resource: SpeculativeDeployment, revision: str, image: str) -> dict[str, Any]:
    """The Job; `image` is the operator's."""
    own = resource.metadata.name
    arguments = ["preflight-job", f"--file={_FOLDER}/resource.json", f"--report={REPORT}"]
    volumes: list[dict[str, Any]] = [{"name": "resource", "configMap": {"name": name(own, revision)}}]
    mounts: list[dict[str, Any]] = [{"name": "resource", "mountPath": _FOLDER, "readOnly": True}]
    for option, volume, mount in pod.source_volumes(resource):
        arguments.append(f"--{option}={mount['mountPath']}")
        volumes.append(volume)
        mounts.append(mount)
    container: dict[str, Any] = {
        "name": "preflight",
        "image": image,
        "args": arguments,
        "env": pod.token(resource),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        "terminationMessagePath": REPORT,
        "volumeMounts": mounts,
    }
    given = resource.spec.engine.pod_template
    # Where the engine's volumes can be mounted, and who may pull its images, is what the user said of the engine.
    where = {key: given.spec[key] for key in ("nodeSelector", "tolerations", "imagePullSecrets") if given and key in given.spec}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name(own, revision), "labels": names.common(own) | {names.REVISION: revision}},
        "spec": {
            "backoffLimit": 4,
            "activeDeadlineSeconds": 1800,
            # Status 1 is a verdict, not a failure that another try could mend.
            "podFailurePolicy": {
                "rules": [{"action": "FailJob", "onExitCodes": {"containerName": "preflight", "operator": "In", "values": [1]}}]
            },
            "template": {
                "metadata": {"labels": {**labels(own, revision), **_NO_SIDECAR}, "annotations": {**_NO_SIDECAR, **_NO_PROXY}},
                "spec": {
                    **where,
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }
