"""What a request to the API server is called."""

from __future__ import annotations

import pytest

from aerie_lab.testing.proxy import Call

SPECDEP = "/apis/aerie.dev/v1alpha1/namespaces/a/speculativedeployments/chat"


@pytest.mark.parametrize(
    ("method", "path", "call"),
    [
        ("GET", "/api/v1/namespaces/a/pods", Call("list", "pods", "a", "")),
        ("GET", "/api/v1/pods", Call("list", "pods", "", "")),
        ("GET", "/api/v1/namespaces/a", Call("get", "namespaces", "", "a")),
        ("GET", "/api/v1/namespaces/a/pods/b/log", Call("get", "pods/log", "a", "b")),
        ("POST", "/apis/events.k8s.io/v1/namespaces/a/events", Call("create", "events", "a", "")),
        ("PATCH", f"{SPECDEP}/status", Call("patch", "speculativedeployments/status", "a", "chat")),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/a/leases/b", Call("update", "leases", "a", "b")),
        ("DELETE", "/apis/apps/v1/namespaces/a/deployments/b", Call("delete", "deployments", "a", "b")),
        ("GET", "/apis/apps/v1", Call("get", "", "", "")),
        ("GET", "/api", Call("get", "", "", "")),
    ],
)
def test_a_request_is_a_call(method: str, path: str, call: Call) -> None:
    assert Call.of(method, path) == call
    assert call.writes == (method != "GET")


def test_a_watch_is_told_from_a_list() -> None:
    assert Call.of("GET", "/apis/apps/v1/deployments", watch=True) == Call("watch", "deployments", "", "")
