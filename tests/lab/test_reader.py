"""Objects that tests read without kubectl are those that kubectl prints."""

from __future__ import annotations

import json

import pytest

from aerie_lab.errors import KubeError
from aerie_lab.testing.namespace import Namespace


def config_map(name: str, **labels: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}, "data": {"a": "1"}}


@pytest.mark.parametrize("kind", ["configmap", "configmaps", "cm", "ConfigMap"])
def test_an_object_is_what_kubectl_prints(namespace: Namespace, kind: str) -> None:
    namespace.apply(config_map("settings"))
    assert namespace.get(kind, "settings") == json.loads(namespace.kubectl("get", kind, "settings", "-o", "json"))
    assert namespace.get("node", "node-1")["kind"] == "Node", "an object outside namespaces"


def test_lists_are_what_kubectl_prints(namespace: Namespace) -> None:
    namespace.apply(config_map("one", color="red"), config_map("two"))
    namespace.kubectl("create", "job", "idle", "--image=registry.k8s.io/pause", "--dry-run=none")
    for kinds in ("configmaps", "cm,jobs.batch", "deploy", "httproutes,pdb"):
        for selector in ("", "color=red", "color notin (red)"):
            arguments = ("get", kinds, "-l", selector, "-o", "json") if selector else ("get", kinds, "-o", "json")
            read, printed = namespace.list_all(kinds, selector), json.loads(namespace.kubectl(*arguments))["items"]
            assert [own_part(item) for item in read] == [own_part(item) for item in printed]


def own_part(item: dict[str, object]) -> dict[str, object]:
    """Return an object without what a controller changes between two reads."""
    metadata = item["metadata"]
    assert isinstance(metadata, dict)
    changes = ("resourceVersion", "generation", "finalizers", "annotations")
    return {**item, "status": None, "metadata": {name: value for name, value in metadata.items() if name not in changes}}


def test_a_reader_goes_on_after_a_restart_of_the_server(namespace: Namespace) -> None:
    assert namespace.exists("serviceaccount", "default")
    namespace.faults.restart("kube-apiserver")
    assert namespace.exists("serviceaccount", "default"), "the server has closed the first connection"


def test_what_does_not_exist_is_named(namespace: Namespace) -> None:
    assert not namespace.exists("configmap", "absent")
    with pytest.raises(KubeError, match=r'^404 NotFound: configmaps "absent" not found$'):
        namespace.get("configmap", "absent")
    with pytest.raises(KubeError, match=r"^404 NotFound: the server has no resource cabbage$"):
        namespace.list_all("pods,cabbage")
