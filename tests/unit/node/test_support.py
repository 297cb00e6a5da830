"""Fields of a pod that the lab does not support."""

from __future__ import annotations

from typing import Any

import pytest

from aerie_lab.node.support import (
    PROCESSLESS_LOAD_SECONDS_ANNOTATION,
    find_unsupported_fields,
    is_processless,
    read_processless_load_seconds,
)

C = "spec.containers[c]"
CONTAINER = {"name": "c", "image": "i", "resources": {"limits": {"cpu": "1"}}, "imagePullPolicy": "Always", "tty": True}


@pytest.mark.parametrize(
    ("spec", "container", "unsupported"),
    [
        ({}, {}, []),
        ({"hostNetwork": True}, {}, ["spec.hostNetwork"]),
        ({"hostNetwork": False, "hostPID": None}, {}, []),
        ({"nodeSelector": {"a": "b"}, "securityContext": {"fsGroup": 1}, "dnsPolicy": "ClusterFirst"}, {}, []),
        ({}, {"securityContext": {"runAsUser": 1, "capabilities": {}, "readOnlyRootFilesystem": True}}, []),
        ({}, {"securityContext": {"windowsOptions": {"hostProcess": True}}}, [f"{C}.securityContext.windowsOptions"]),
        ({}, {"lifecycle": {"postStart": {"exec": {}}, "preStop": {"sleep": {}}}}, [f"{C}.lifecycle.postStart"]),
        ({}, {"livenessProbe": {"grpc": {"port": 1}}}, [f"{C}.livenessProbe.grpc"]),
        ({}, {"ports": [{"containerPort": 80}, {"containerPort": 81, "hostPort": 81}]}, [f"{C}.ports[81].hostPort"]),
        ({}, {"volumeDevices": [{"name": "v"}]}, [f"{C}.volumeDevices"]),
        ({"volumes": [{"name": "v", "emptyDir": {}}, {"name": "w", "nfs": {"server": "s"}}]}, {}, ["spec.volumes[w].nfs"]),
        ({"initContainers": [{"name": "s", "restartPolicy": "Always"}]}, {}, ["spec.initContainers[s].restartPolicy"]),
    ],
)  # fmt: skip
def test_unsupported_fields_are_found(spec: dict[str, Any], container: dict[str, Any], unsupported: list[str]) -> None:
    assert find_unsupported_fields({"spec": {"containers": [CONTAINER | container], **spec}}) == unsupported


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [(None, False), ({}, False), ({"lab.aerie.dev/processless": "false"}, False), ({"lab.aerie.dev/processless": "true"}, True)],
)
def test_processless_follows_the_annotation(annotations: dict[str, str] | None, expected: bool) -> None:
    assert is_processless({"metadata": {"annotations": annotations}}) is expected


def test_load_seconds_are_read_from_the_annotation() -> None:
    assert read_processless_load_seconds({"metadata": {}}) == 0
    assert read_processless_load_seconds({"metadata": {"annotations": {PROCESSLESS_LOAD_SECONDS_ANNOTATION: "2.5"}}}) == 2.5


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "1e9"])
def test_invalid_load_seconds_are_rejected(text: str) -> None:
    with pytest.raises(
        ValueError, match=f"the annotation {PROCESSLESS_LOAD_SECONDS_ANNOTATION} is '{text}', and has to be a number of seconds"
    ):
        read_processless_load_seconds({"metadata": {"annotations": {PROCESSLESS_LOAD_SECONDS_ANNOTATION: text}}})
