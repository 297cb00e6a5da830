"""Clusters without direct access to the Hub: another endpoint, a proxy with own authorities, a cache without a network.

The namespace has no access to a Hub, so preflight reads only what the resource's engine configuration provides.
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
DRAFTER = ("aerie/bundle-eagle31", "8e9a84344ee5a0f8a7a5f2d5a995ae77ec548e0c", BUNDLE / "eagle31")
LIMITS = {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "1Gi"}


@pytest.fixture
def namespace(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """A namespace without access to a Hub."""
    with new_namespace(lab, request.node.name.removeprefix("test_"), use_hub=False) as test_namespace:
        yield test_namespace


def resource(env: dict[str, str], pods: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    def source(repository: str, commit: str, _: Path) -> dict[str, Any]:
        return {"source": {"huggingFace": {"repo": repository, "revision": commit}}}

    engine_spec = {
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
        "spec": {"model": source(*TARGET), "drafter": source(*DRAFTER), "engine": engine_spec},
    }


def preflight_condition(status: dict[str, Any]) -> dict[str, Any]:
    return next((dict(condition) for condition in status.get("conditions") or [] if condition["type"] == "PreflightPassed"), {})


def restrict(namespace: Namespace) -> None:
    """Enforce Pod Security's strictest profile, and a quota for all resources of pods."""
    namespace.lab.kubectl("label", "namespace", namespace.name, "pod-security.kubernetes.io/enforce=restricted")
    every = {f"{half}.{name}": "10Gi" for half in ("requests", "limits") for name in ("cpu", "memory", "ephemeral-storage")}
    namespace.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "all"}, "spec": {"hard": {"pods": "10", **every}}}
    )


def wait_until_engine_starts(namespace: Namespace, wait_for_status: Wait) -> None:
    wait_for_status(lambda status: preflight_condition(status).get("status") == "True", "preflight has passed")
    (deployment,) = namespace.list_all("deployments")
    namespace.wait_until(
        "deployment", deployment["metadata"]["name"], lambda item: item["status"].get("replicas"), "its engine's pod"
    )


@pytest.mark.nightly  # test_missing_repository... has a Job without a result, tests/unit its report
@pytest.mark.usefixtures("operator")
def test_preflight_without_hub_access_has_no_result(namespace: Namespace, wait_for_status: Wait) -> None:
    namespace.apply(resource({}))
    status = wait_for_status(
        lambda status: preflight_condition(status).get("reason") == "PreflightError", "the error is reported"
    )["status"]
    assert "https://huggingface.co" in preflight_condition(status)["message"]
    assert preflight_condition(status)["status"] == "Unknown"


@pytest.mark.usefixtures("operator")
def test_missing_repository_is_reported_and_not_retried_immediately(namespace: Namespace, wait_for_status: Wait) -> None:
    document = resource({"HF_ENDPOINT": HUB_URL})
    document["spec"]["drafter"]["source"]["huggingFace"]["repo"] = "aerie/nowhere"
    namespace.apply(document)
    status = wait_for_status(
        lambda status: preflight_condition(status).get("reason") == "PreflightFailed", "the rejection is reported"
    )["status"]
    assert "aerie/nowhere" in preflight_condition(status)["message"]
    assert "Preflight is retried at" in preflight_condition(status)["message"]
    [job] = namespace.list_all("jobs")
    pods = namespace.list_all("pods")
    exit_codes = [status["state"]["terminated"]["exitCode"] for pod in pods for status in pod["status"]["containerStatuses"]]
    assert exit_codes == [3]
    assert job["status"]["failed"] == 1


@pytest.mark.usefixtures("operator")
def test_preflight_passes_with_another_hub_endpoint(namespace: Namespace, wait_for_status: Wait) -> None:
    restrict(namespace)
    namespace.apply(resource({"HF_ENDPOINT": HUB_URL}))
    wait_until_engine_starts(namespace, wait_for_status)


@pytest.mark.usefixtures("operator")
def test_preflight_passes_with_a_proxy_and_own_authorities(namespace: Namespace, wait_for_status: Wait, tmp_path: Path) -> None:
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
    wait_until_engine_starts(namespace, wait_for_status)
    assert "CONNECT huggingface.co:443" in namespace.kubectl("logs", "proxy")


@pytest.mark.usefixtures("operator")
def test_preflight_passes_with_a_cache_without_network(namespace: Namespace, wait_for_status: Wait, tmp_path: Path) -> None:
    for repository, commit, files in (TARGET, DRAFTER):
        snapshot = tmp_path / "huggingface" / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / commit
        shutil.copytree(files, snapshot)
    storage = {"storageClassName": namespace.name, "accessModes": ["ReadWriteMany"]}
    volume = {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(tmp_path)}, **storage}
    claim = {"resources": {"requests": {"storage": "1Gi"}}, **storage}
    namespace.lab.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": namespace.name}, "spec": volume})
    try:
        restrict(namespace)
        namespace.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}, "spec": claim})
        namespace.apply(resource({"HF_HUB_OFFLINE": "1"}, cache={"claimName": "models"}))
        wait_until_engine_starts(namespace, wait_for_status)
    finally:
        namespace.lab.kubectl("delete", "persistentvolume", namespace.name, "--wait=false")
