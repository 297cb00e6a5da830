"""The admission policy: writers of a SpeculativeDeployment gain no permission. Tried as real users, with default values."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aerie_lab.cluster import Lab
from aerie_lab.errors import LabError
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.plugin import new_namespace

Release = Callable[..., contextlib.AbstractContextManager[None]]
EDITOR, ROUTER, WRITER = "editor", "router", "writer"
"""Users with the cluster's role edit; with that and HTTPRoutes; with the chart's own role for SpeculativeDeployments alone."""
GATEWAY = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "shared", "namespace": "infra"}], "hostnames": ["a.example"]}}
CAPTURE = {
    "consent": {"confirmed": True, "basis": "terms of service, section 4"},
    "storage": {"persistentVolumeClaim": {"claimName": "theirs"}},
}


def resource(**spec: Any) -> dict[str, Any]:
    commit = "0e9e39f249a16976918f6564b8830bc894c89659"
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": {"huggingFace": {"repo": "a/b", "revision": commit}}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0"},
            **spec,
        },
    }


def binding(user: str, role: str, kind: str = "ClusterRole") -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"{user}-{role}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }


@pytest.fixture(scope="module")
def team(lab: Lab, chart: Path, release: Release) -> Iterator[Namespace]:
    """A namespace with its users; the policy is active, and no operator runs."""
    routes = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "routes"},
        "rules": [{"apiGroups": ["gateway.networking.k8s.io"], "resources": ["httproutes"], "verbs": ["create"]}],
    }
    with (
        new_namespace(lab, "aerie-system") as system_namespace,
        new_namespace(lab, "team") as namespace,
        release(system_namespace.name, chart, "--set", "replicas=0"),
    ):
        namespace.apply(routes, binding(EDITOR, "edit"), binding(ROUTER, "edit"), binding(ROUTER, "routes", "Role"))
        namespace.apply(binding(WRITER, "aerie-edit"), binding(WRITER, "aerie-view"))
        wait_until(
            lambda: "Deployments nor pods" in get_rejection(namespace, WRITER, resource(), "--dry-run=server"),
            "the policy is active",
        )
        yield namespace


@pytest.fixture(autouse=True)
def delete_resources(team: Namespace) -> None:
    team.kubectl("delete", "specdep", "--all")


def apply(team: Namespace, user: str, document: dict[str, Any], *arguments: str) -> None:
    team.kubectl("apply", f"--as={user}", "-f", "-", *arguments, stdin=json.dumps(document))


def get_rejection(team: Namespace, user: str, document: dict[str, Any], *arguments: str) -> str:
    try:
        apply(team, user, document, *arguments)
    except LabError as error:
        return str(error)
    return ""


def patch(team: Namespace, user: str, *arguments: str, **spec: Any) -> None:
    team.kubectl("patch", "specdep", "chat", f"--as={user}", "--type=merge", "-p", json.dumps({"spec": spec}), *arguments)


def test_editor_cannot_request_a_route(team: Namespace) -> None:
    rejection = get_rejection(team, EDITOR, resource(rollout={"traffic": GATEWAY}))
    assert "user editor may not create httproutes.gateway.networking.k8s.io" in rejection
    assert "write mode: Service" in rejection
    apply(team, EDITOR, resource())
    with pytest.raises(LabError, match="may not create httproutes"):
        patch(team, EDITOR, rollout={"traffic": GATEWAY})
    patch(team, ROUTER, rollout={"traffic": GATEWAY})


def test_editor_cannot_change_an_existing_route(team: Namespace) -> None:
    apply(team, ROUTER, resource(rollout={"traffic": GATEWAY}))
    with pytest.raises(LabError, match="may not create httproutes"):
        patch(team, EDITOR, rollout={"traffic": {"gateway": {"hostnames": ["theirs.example"]}}})
    patch(team, EDITOR, replicas=3, engine={"args": ["--max-model-len=8192"]}, rollout={"paused": True})
    patch(team, EDITOR, rollout={"traffic": {"mode": "Service", "gateway": None}})
    with pytest.raises(LabError, match="may not create httproutes"):
        patch(team, EDITOR, rollout={"traffic": GATEWAY})


def test_chart_role_alone_cannot_change_pods(team: Namespace) -> None:
    assert "user writer may create neither Deployments nor pods" in get_rejection(team, WRITER, resource())
    apply(team, ROUTER, resource(rollout={"traffic": GATEWAY}))
    for spec in (
        {"engine": {"podTemplate": {"spec": {"serviceAccountName": "admin"}}}},
        {"engine": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "theirs", "key": "a"}}}]}},
        {"model": {"source": {"huggingFace": None, "persistentVolumeClaim": {"claimName": "theirs"}}}},
        {"drafter": {"source": {"persistentVolumeClaim": {"claimName": "theirs"}}}},
        {"capture": CAPTURE},
    ):
        with pytest.raises(LabError, match="may create neither Deployments nor pods"):
            patch(team, WRITER, **spec)
    patch(team, ROUTER, capture=CAPTURE)
    with pytest.raises(LabError, match="may create neither Deployments nor pods"):
        patch(team, WRITER, capture={"sampling": {"rate": 1}})
    patch(team, WRITER, capture=None)  # whoever may write the resource may stop a capture
    patch(team, WRITER, replicas=2, speculation={"numSpeculativeTokens": 2}, rollout={"canary": {"replicas": 2}})
    team.kubectl("scale", "specdep", "chat", f"--as={WRITER}", "--replicas=4")
    team.kubectl("annotate", "specdep", "chat", f"--as={WRITER}", "aerie.dev/promote=abc")
    team.kubectl("delete", "specdep", "chat", f"--as={WRITER}")


def test_status_is_exempt_from_the_policy(team: Namespace) -> None:
    rules = [{"apiGroups": ["aerie.dev"], "resources": ["speculativedeployments/status"], "verbs": ["patch"]}]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "status"}, "rules": rules}
    team.apply(role, binding(WRITER, "status", "Role"))
    apply(team, ROUTER, resource(rollout={"traffic": GATEWAY}))
    patched = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": {"phase": "Ready"}}))
    team.kubectl("patch", "specdep", "chat", f"--as={WRITER}", *patched)
    assert team.get("specdep", "chat")["status"]["phase"] == "Ready"
