"""The cluster behaves like any other: kubectl, helm, versions, RBAC, certificates."""

from __future__ import annotations

import httpx
import pytest

from aerie_lab.cluster import Lab
from aerie_lab.testing import Namespace


def test_version_and_nodes(lab: Lab) -> None:
    assert '"gitVersion": "v1.36.' in lab.kubectl("get", "--raw", "/version")
    nodes = lab.kubectl(
        "get", "nodes", "-o", r"jsonpath={range .items[*]}{.metadata.name} {.status.allocatable.nvidia\.com/gpu};{end}"
    )
    assert nodes == "node-1 8;node-2 8;"


def test_a_client_is_verified_and_needs_a_certificate(lab: Lab) -> None:
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{lab.api_url}/version")


def test_a_deployment_is_created_updated_and_deleted(namespace: Namespace) -> None:
    namespace.kubectl("create", "deployment", "echo", "--image=aerie.dev/lab/echo:1", "--replicas=2")
    namespace.wait_for_rollout("echo")
    before = {p["metadata"]["name"] for p in namespace.list_all("pods")}
    namespace.kubectl("rollout", "restart", "deployment/echo")
    namespace.wait_for_rollout("echo")
    namespace.kubectl("scale", "deployment/echo", "--replicas=3")
    namespace.wait_for_rollout("echo")
    after = {p["metadata"]["name"] for p in namespace.list_all("pods") if "deletionTimestamp" not in p["metadata"]}
    assert len(after) == 3
    assert not before & after
    namespace.kubectl("delete", "deployment", "echo", "--wait")
