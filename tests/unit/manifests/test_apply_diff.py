"""What counts as drift: a field that Aerie set and that differs, or one that it no longer wants; nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from aerie.manifests.apply_diff import APPLIED_DIGEST_ANNOTATION, needs_apply, with_digest

WANTED: dict[str, Any] = {
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


def live() -> Any:
    """As the API server returns it: with defaults, quantities in its own way, an injected container, foreign annotations."""
    found: Any = copy.deepcopy(with_digest(WANTED))
    found["metadata"] |= {"uid": "1", "resourceVersion": "5"}
    found["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "1"
    pod = found["spec"]["template"]["spec"]
    pod["containers"][0] |= {"imagePullPolicy": "IfNotPresent"}
    pod["containers"][0]["resources"]["limits"] = {"cpu": "1", "nvidia.com/gpu": 1}
    pod["containers"].insert(0, {"name": "istio-proxy"})
    pod["volumes"][0]["emptyDir"]["sizeLimit"] = "1Gi"
    pod["dnsPolicy"] = "ClusterFirst"
    return found


def test_additions_of_others_need_no_apply() -> None:
    assert not needs_apply(live(), with_digest(WANTED))


def test_missing_object_needs_apply() -> None:
    assert needs_apply(None, with_digest(WANTED))


def edit(path: list[Any], value: Any) -> Any:
    found = live()
    below = found
    for part in path[:-1]:
        below = below[part]
    below[path[-1]] = value
    return found


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
    assert needs_apply(edit(path, value), with_digest(WANTED))


def test_removed_field_needs_apply() -> None:
    without = copy.deepcopy(WANTED)
    del without["spec"]["template"]["spec"]["tolerations"]
    assert needs_apply(live(), with_digest(without))
    assert (
        with_digest(without)["metadata"]["annotations"][APPLIED_DIGEST_ANNOTATION]
        != with_digest(WANTED)["metadata"]["annotations"][APPLIED_DIGEST_ANNOTATION]
    )
