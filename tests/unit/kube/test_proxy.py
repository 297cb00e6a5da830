"""Verb, resource and name of a request to the API server."""

from __future__ import annotations

import pytest

from aerie_lab.testing.proxy import ApiCall

SPECDEP = "/apis/aerie.dev/v1alpha1/namespaces/a/speculativedeployments/chat"


@pytest.mark.parametrize(
    ("method", "path", "call"),
    [
        ("GET", "/api/v1/namespaces/a/pods", ApiCall("list", "pods", "a", "")),
        ("GET", "/api/v1/pods", ApiCall("list", "pods", "", "")),
        ("GET", "/api/v1/namespaces/a", ApiCall("get", "namespaces", "", "a")),
        ("GET", "/api/v1/namespaces/a/pods/b/log", ApiCall("get", "pods/log", "a", "b")),
        ("POST", "/apis/events.k8s.io/v1/namespaces/a/events", ApiCall("create", "events", "a", "")),
        ("PATCH", f"{SPECDEP}/status", ApiCall("patch", "speculativedeployments/status", "a", "chat")),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/a/leases/b", ApiCall("update", "leases", "a", "b")),
        ("DELETE", "/apis/apps/v1/namespaces/a/deployments/b", ApiCall("delete", "deployments", "a", "b")),
        ("GET", "/apis/apps/v1", ApiCall("get", "", "", "")),
        ("GET", "/api", ApiCall("get", "", "", "")),
    ],
)
def test_requests_are_parsed_to_api_calls(method: str, path: str, call: ApiCall) -> None:
    assert ApiCall.from_request(method, path) == call
    assert call.is_write == (method != "GET")


def test_a_watch_request_is_a_watch_call() -> None:
    assert ApiCall.from_request("GET", "/apis/apps/v1/deployments", watch=True) == ApiCall("watch", "deployments", "", "")
