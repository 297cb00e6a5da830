"""Clusters in which the Hub is not just there: a mirror, a proxy with authorities of its own, a cache without a network.

The namespace has no Hub at hand, so what preflight gets to read, it gets by what the resource says of its engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aerie_lab.cluster import Lab
from aerie_lab.cluster.certificates import Authority
from aerie_lab.sandbox.addresses import HUB_URL
from aerie_lab.testing import Namespace
from aerie_lab.testing.plugin import new_namespace

Wait = Callable[..., dict[str, Any]]
BUNDLE = Path(__file__).resolve().parents[3] / "drafter" / "bundle"
TARGET = ("aerie/bundle-target", "4680777ff6b61ba6b16fa43d8cdebd93825ebe5c", BUNDLE / "target")
DRAFTER = ("aerie/bundle-eagle31", "55f8cf57420bcfb8f7a95c89a51fb969df6c8270", BUNDLE / "eagle31")
LIMITS = {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "1Gi"}


@pytest.fixture
def namespace(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """One without a Hub at hand."""
    with new_namespace(lab, request.node.name.removeprefix("test_"), use_hub=False) as found:
        yield found


def resource(env: dict[str, str], pods: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    def source(repository: str, commit: str, _: Path) -> dict[str, Any]:
        return {"source": {"huggingFace": {"repo": repository, "revision": commit}}}

    run = {
        "image": "aerie.dev/lab/engine:v0.33.0",
        "version": "0.33.0",
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "resources": {"limits": LIMITS},
        "podTemplate": {"spec": {"securityContext": {"runAsNonRoot": True}, "terminationGracePeriodSeconds": 30, **(pods or {})}},
        **engine,
    }
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {"model": source(*TARGET), "drafter": source(*DRAFTER), "engine": run},
    }


def passed(status: dict[str, Any]) -> dict[str, Any]:
    return next((dict(one) for one in status.get("conditions") or [] if one["type"] == "PreflightPassed"), {})


def restrict(namespace: Namespace) -> None:
    """Pod Security's strictest profile, and a quota for all that a pod can use."""
    namespace.lab.kubectl("label", "namespace", namespace.name, "pod-security.kubernetes.io/enforce=restricted")
    every = {f"{half}.{name}": "10Gi" for half in ("requests", "limits") for name in ("cpu", "memory", "ephemeral-storage")}
    namespace.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "all"}, "spec": {"hard": {"pods": "10", **every}}}
    )


def proceeds(namespace: Namespace, specdep: Wait) -> None:
    specdep(lambda status: passed(status).get("status") == "True", "preflight has passed")
    (deployment,) = namespace.list_all("deployments")
    namespace.wait_until(
        "deployment", deployment["metadata"]["name"], lambda item: item["status"].get("replicas"), "its engine's pod"
    )


@pytest.mark.usefixtures("operator")
def test_without_a_way_to_the_hub_nothing_passes(namespace: Namespace, specdep: Wait) -> None:
    namespace.apply(resource({}))
    status = specdep(lambda status: passed(status).get("reason") == "PreflightError", "it says that it has no verdict")["status"]
    assert "https://huggingface.co" in passed(status)["message"]
    assert passed(status)["status"] == "Unknown"


@pytest.mark.usefixtures("operator")
def test_what_the_hub_does_not_have_is_said_in_its_own_words_and_not_asked_for_at_once_again(
    namespace: Namespace, specdep: Wait
) -> None:
    document = resource({"HF_ENDPOINT": HUB_URL})
    document["spec"]["drafter"]["source"]["huggingFace"]["repo"] = "aerie/nowhere"
    namespace.apply(document)
    status = specdep(lambda status: passed(status).get("reason") == "PreflightFailed", "the Hub has said no")["status"]
    assert "aerie/nowhere" in passed(status)["message"]
    assert "Preflight is retried at" in passed(status)["message"]
    [job] = namespace.list_all("jobs")
    pods = namespace.list_all("pods")
    ended = [one["state"]["terminated"]["exitCode"] for pod in pods for one in pod["status"]["containerStatuses"]]
    assert ended == [3]
    assert job["status"]["failed"] == 1


@pytest.mark.usefixtures("operator")
def test_a_mirror(namespace: Namespace, specdep: Wait) -> None:
    restrict(namespace)
    namespace.apply(resource({"HF_ENDPOINT": HUB_URL}))
    proceeds(namespace, specdep)


@pytest.mark.usefixtures("operator")
def test_a_proxy_with_authorities_of_its_own(namespace: Namespace, specdep: Wait, tmp_path: Path) -> None:
    Authority(tmp_path).issue("proxy", hosts=["huggingface.co"])
    text = {name: (tmp_path / name).read_text() for name in ("ca.crt", "proxy.crt", "proxy.key")}
    files = {"name": "files", "mountPath": "/etc/proxy", "readOnly": True}
    container = {
        "name": "proxy",
        "image": "aerie.dev/lab/intercept",
        "args": ["--certificate=/etc/proxy/proxy.crt", "--key=/etc/proxy/proxy.key"],
        "readinessProbe": {"tcpSocket": {"port": 3128}, "periodSeconds": 1},
        "volumeMounts": [files],
    }
    pod = {"containers": [container], "volumes": [{"name": "files", "secret": {"secretName": "proxy"}}]}
    namespace.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "proxy"}, "stringData": text},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "corporate"}, "data": {"ca.crt": text["ca.crt"]}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "proxy"}, "spec": pod},
    )
    address = namespace.wait_until_ready("proxy")["status"]["podIP"]
    restrict(namespace)
    mounted = {"name": "corporate", "mountPath": "/etc/corporate"}
    pods = {
        "containers": [{"name": "engine", "volumeMounts": [mounted]}],
        "volumes": [{"name": "corporate", "configMap": {"name": "corporate"}}],
    }
    env = {"HTTPS_PROXY": f"http://{address}:3128", "REQUESTS_CA_BUNDLE": "/etc/corporate/ca.crt"}
    namespace.apply(resource(env, pods))
    proceeds(namespace, specdep)
    assert "CONNECT huggingface.co:443" in namespace.kubectl("logs", "proxy")


@pytest.mark.usefixtures("operator")
def test_a_cache_without_a_network(namespace: Namespace, specdep: Wait, tmp_path: Path) -> None:
    for repository, commit, files in (TARGET, DRAFTER):
        snapshot = tmp_path / "huggingface" / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / commit
        shutil.copytree(files, snapshot)
    what = {"storageClassName": namespace.name, "accessModes": ["ReadWriteMany"]}
    volume = {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(tmp_path)}, **what}
    claim = {"resources": {"requests": {"storage": "1Gi"}}, **what}
    namespace.lab.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": namespace.name}, "spec": volume})
    try:
        restrict(namespace)
        namespace.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}, "spec": claim})
        namespace.apply(resource({"HF_HUB_OFFLINE": "1"}, cache={"claimName": "models"}))
        proceeds(namespace, specdep)
    finally:
        namespace.lab.kubectl("delete", "persistentvolume", namespace.name, "--wait=false")
