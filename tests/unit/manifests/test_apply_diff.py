"""What counts as drift: a field that Aerie set and that differs, or one that it no longer applies; nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from aerie.manifests.apply_diff import APPLIED_DIGEST_ANNOTATION, needs_apply, with_digest

DESIRED: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "chat", "labels": {"aerie.dev/name": "chat"}},
    "spec": {
        "replicas": 2,
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "engine",
                        "args": ["a", "b"],
                        "env": [{"name": "A", "value": "1"}],
                        "resources": {"limits": {"cpu": "1000m", "nvidia.com/gpu": "1"}},
                    }
                ],
                "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1024Mi"}}],
                "tolerations": [{"key": "gpu"}],
            }
        },
    },
}


def build_live_object() -> Any:
    """Return the object of the API server: with defaults, normalized quantities, an injected container, foreign annotations."""
    live_object: Any = copy.deepcopy(with_digest(DESIRED))
    live_object["metadata"] |= {"uid": "1", "resourceVersion": "5"}
    live_object["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "1"
    pod = live_object["spec"]["template"]["spec"]
    pod["containers"][0] |= {"imagePullPolicy": "IfNotPresent"}
    pod["containers"][0]["resources"]["limits"] = {"cpu": "1", "nvidia.com/gpu": 1}
    pod["containers"].insert(0, {"name": "istio-proxy"})
    pod["volumes"][0]["emptyDir"]["sizeLimit"] = "1Gi"
    pod["dnsPolicy"] = "ClusterFirst"
    return live_object


def test_additions_of_others_need_no_apply() -> None:
    assert not needs_apply(build_live_object(), with_digest(DESIRED))


def test_missing_object_needs_apply() -> None:
    assert needs_apply(None, with_digest(DESIRED))


def edit_live_object(path: list[Any], value: Any) -> Any:
    live_object = build_live_object()
    parent = live_object
    for part in path[:-1]:
        parent = parent[part]
    parent[path[-1]] = value
    return live_object


POD = ["spec", "template", "spec"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "replicas"], 3),
        (["metadata", "labels"], {}),
        (["metadata", "annotations"], {}),
        ([*POD, "containers", 1, "args"], ["a", "b", "--c"]),
        ([*POD, "containers", 1, "env"], [{"name": "A", "value": "2"}]),
        ([*POD, "containers", 1, "resources", "limits", "nvidia.com/gpu"], 2),
        ([*POD, "containers"], [{"name": "istio-proxy"}]),
        ([*POD, "volumes", 0, "emptyDir", "sizeLimit"], "2Gi"),
        ([*POD, "tolerations"], []),
    ],
)
def test_edited_field_needs_apply(path: list[Any], value: Any) -> None:
    assert needs_apply(edit_live_object(path, value), with_digest(DESIRED))


def test_removed_field_needs_apply() -> None:
    without = copy.deepcopy(DESIRED)
    del without["spec"]["template"]["spec"]["tolerations"]
    assert needs_apply(build_live_object(), with_digest(without))
    assert (
        with_digest(without)["metadata"]["annotations"][APPLIED_DIGEST_ANNOTATION]
        != with_digest(DESIRED)["metadata"]["annotations"][APPLIED_DIGEST_ANNOTATION]
    )
