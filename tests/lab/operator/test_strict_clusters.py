"""Clusters as they are: restricted namespaces, quotas, injected containers, budgets of drains. On a real API server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aerie_lab.cluster import Lab
from aerie_lab.errors import LabError
from aerie_lab.testing import Namespace, wait_until

Wait = Callable[..., dict[str, Any]]
LIMITS = {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "1Gi"}
OLD, NEW = "eagle3", "eagle31"


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    """The condition of that type."""
    return next((dict(one) for one in status.get("conditions") or [] if one["type"] == kind), {})


def preflight(status: dict[str, Any]) -> tuple[str, str]:
    found = condition(status, "PreflightPassed")
    return found.get("status", ""), found.get("reason", "")


def quota(name: str, **hard: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": hard}}


def resource() -> dict[str, Any]:
    """A resource whose own pods fit where these tests put them, and which is looked at in earnest."""

    def image(name: str) -> dict[str, Any]:
        return {"source": {"image": {"reference": f"models.example/{name}@sha256:{'0' * 64}"}}}

    engine = {
        "image": "aerie.dev/lab/engine:v0.33.0",
        "version": "0.33.0",
        "resources": {"limits": LIMITS},
        "podTemplate": {"spec": {"securityContext": {"runAsNonRoot": True}, "terminationGracePeriodSeconds": 30}},
    }
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {"model": image("target"), "drafter": image(NEW), "engine": engine},
    }


@pytest.mark.usefixtures("operator")
def test_preflight_passes_in_a_restricted_namespace_with_quotas(namespace: Namespace, specdep: Wait) -> None:
    namespace.lab.kubectl("label", "namespace", namespace.name, "pod-security.kubernetes.io/enforce=restricted")
    every = {f"{half}.{name}": "10Gi" for half in ("requests", "limits") for name in ("cpu", "memory", "ephemeral-storage")}
    namespace.apply(quota("all", pods="10", **every))
    namespace.apply(resource())
    specdep(lambda status: preflight(status) == ("True", "Passed"), "preflight has passed")
    (deployment,) = namespace.list_all("deployments")
    namespace.wait_until(
        "deployment", deployment["metadata"]["name"], lambda item: item["status"].get("replicas"), "its engine's pod"
    )


@pytest.mark.usefixtures("operator")
def test_a_preflight_pod_that_is_refused_is_told_in_the_clusters_words_and_goes_on_when_it_is_not(
    namespace: Namespace, specdep: Wait
) -> None:
    namespace.apply(quota("none", pods="0"))
    wait_until(lambda: namespace.get("resourcequota", "none")["status"].get("hard"), "the quota is in force")
    namespace.apply(resource())
    status = specdep(lambda status: preflight(status) == ("Unknown", "FailedCreate"), "it says that there is no pod")["status"]
    (job,) = namespace.list_all("jobs")
    name = job["metadata"]["name"]
    said = condition(status, "PreflightPassed")["message"]
    assert said.startswith(f"Job {name} has no pod; Kubernetes retries: ")
    assert f'"{name}-..." is forbidden: exceeded quota: none' in said, "the same sentence with each attempt"
    namespace.kubectl("delete", "resourcequota", "none")
    specdep(lambda status: preflight(status) == ("True", "Passed"), "it goes on by itself")
    assert namespace.list_all("jobs")[0]["metadata"]["uid"] == job["metadata"]["uid"], "the same Job"


@contextlib.contextmanager
def injected(lab: Lab, namespace: Namespace, container: dict[str, Any]) -> Iterator[None]:
    """Every preflight pod of the namespace gets one more container, whatever its labels ask for."""
    fields = ", ".join(f"{key}: {json.dumps(value)}" for key, value in container.items())
    added = f"Object.spec.containers{{{fields}}}"
    about: dict[str, Any] = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": f"inject-{namespace.name}"}}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    policy = {
        **about,
        "kind": "MutatingAdmissionPolicy",
        "spec": {
            "matchConstraints": {
                "resourceRules": [rule],
                "objectSelector": {"matchExpressions": [{"key": "aerie.dev/preflight", "operator": "Exists"}]},
            },
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "mutations": [
                {
                    "patchType": "JSONPatch",
                    "jsonPatch": {
                        "expression": f'[JSONPatch{{op: "add", path: "/spec/containers/-", value: {added}}}]',
                    },
                }
            ],
        },
    }
    selector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}}}
    binding = {
        **about,
        "kind": "MutatingAdmissionPolicyBinding",
        "spec": {"policyName": about["metadata"]["name"], "matchResources": selector},
    }
    trial = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "trial", "namespace": namespace.name, "labels": {"aerie.dev/preflight": "trial"}},
        "spec": {"containers": [{"name": "one", "image": "aerie.dev/lab/shell"}]},
    }

    def in_force() -> bool:
        shown = json.loads(namespace.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(trial)))
        return len(shown["spec"]["containers"]) == 2

    lab.apply(policy, binding)
    try:
        wait_until(in_force, "containers are injected")
        yield
    finally:
        for kind in ("mutatingadmissionpolicybinding", "mutatingadmissionpolicy"):
            lab.kubectl("delete", kind, str(about["metadata"]["name"]))


@pytest.mark.usefixtures("operator")
def test_a_container_that_is_injected_and_never_ends_keeps_no_verdict_back(lab: Lab, namespace: Namespace, specdep: Wait) -> None:
    mesh = {"name": "mesh", "image": "aerie.dev/lab/shell:1", "args": ["-c", "exec sleep 3600"]}
    with injected(lab, namespace, mesh):
        namespace.apply(resource())
        specdep(lambda status: preflight(status) == ("True", "Passed"), "its verdict counts")
        (job,) = namespace.list_all("jobs")
        assert not job["status"].get("conditions"), "the Job has not ended"
        (pod,) = namespace.list_all("pods", "aerie.dev/preflight=chat")
        assert len(pod["spec"]["containers"]) == 2
        record = namespace.get("configmap", job["metadata"]["name"])["data"]["result.json"]
        assert json.loads(record)["passed"] is True
        namespace.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=1", "--wait=false")


def evict(namespace: Namespace, pod: str) -> None:
    """As a drain does. Raises LabError where a budget forbids it."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace.name}}
    where = f"/api/v1/namespaces/{namespace.name}/pods/{pod}/eviction"
    namespace.kubectl("create", "--raw", where, "-f", "-", stdin=json.dumps(body))


def pods(namespace: Namespace, revision: str, control: str = "false") -> list[str]:
    found = namespace.list_all("pods", f"aerie.dev/revision={revision},aerie.dev/control={control}")
    return [pod["metadata"]["name"] for pod in found if not pod["metadata"].get("deletionTimestamp")]


def test_a_stable_pod_can_be_drained_while_the_canary_has_no_node(
    namespace: Namespace, nursery: Any, light: Callable[..., dict[str, Any]], specdep: Wait
) -> None:
    nursery.start(namespace.name)
    namespace.apply(light(OLD, replicas=3))
    stable = specdep(lambda status: status.get("phase") == "Ready", "it serves")["status"]["stable"]["revision"]
    namespace.apply(light(NEW, gates=["lab.example/hold"], replicas=3))
    canary = specdep(lambda status: (status.get("canary") or {}).get("phase") == "Starting", "a canary begins")["status"][
        "canary"
    ]
    wait_until(lambda: pods(namespace, canary["revision"]), "its pod is there, without a node")
    name = f"chat-{stable}"
    budget = namespace.wait_until("pdb", name, lambda item: item["status"].get("disruptionsAllowed") == 1, "one may go")
    assert budget["status"]["expectedPods"] == 3, "neither the canary nor its control pod"
    (first, *_) = pods(namespace, stable)
    evict(namespace, first)
    assert first not in pods(namespace, stable)

    # The canary's own pod does not serve, and may go at any time; so may the control pod.
    (waiting,) = pods(namespace, canary["revision"])
    evict(namespace, waiting)
    evict(namespace, pods(namespace, stable, "true")[0])


def test_a_budget_of_the_users_own_has_room(
    namespace: Namespace, nursery: Any, light: Callable[..., dict[str, Any]], specdep: Wait
) -> None:
    nursery.start(namespace.name)
    spec = {
        "replicas": 2,
        "rollout": {"disruption": {"maxUnavailable": "100%"}, "canary": {"stepWeights": [], "scaleDownDelay": "0s"}},
    }
    namespace.apply(light(OLD, **spec))
    stable = specdep(lambda status: status.get("phase") == "Ready", "it serves")["status"]["stable"]["revision"]
    namespace.wait_until("pdb", f"chat-{stable}", lambda item: item["status"].get("disruptionsAllowed") == 2, "all may go")
    mine = {"maxUnavailable": 1, "selector": {"matchLabels": {"aerie.dev/name": "chat"}}}
    namespace.apply({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "mine"}, "spec": mine})
    namespace.wait_until("pdb", "mine", lambda item: item["status"].get("disruptionsAllowed") == 1, "it counts")
    with pytest.raises(LabError, match="more than one PodDisruptionBudget"):
        evict(namespace, pods(namespace, stable)[0])
    spec["rollout"] = {"disruption": {"budget": "None"}, "canary": {"stepWeights": [], "scaleDownDelay": "0s"}}
    namespace.apply(light(OLD, **spec))
    namespace.wait_until_deleted("pdb", f"chat-{stable}")
    evict(namespace, pods(namespace, stable)[0])
