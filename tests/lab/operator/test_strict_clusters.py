"""Restricted clusters on a real API server: restricted namespaces, quotas, injected containers, disruption budgets."""

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
    """Return the condition of that type."""
    return next((dict(condition) for condition in status.get("conditions") or [] if condition["type"] == kind), {})


def preflight(status: dict[str, Any]) -> tuple[str, str]:
    passed = condition(status, "PreflightPassed")
    return passed.get("status", ""), passed.get("reason", "")


def quota(name: str, **hard: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": hard}}


def resource() -> dict[str, Any]:
    """Return a resource whose pods fit into the restricted namespaces, with a real preflight."""

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
def test_preflight_passes_in_a_restricted_namespace_with_quotas(namespace: Namespace, wait_for_status: Wait) -> None:
    namespace.lab.kubectl("label", "namespace", namespace.name, "pod-security.kubernetes.io/enforce=restricted")
    every = {f"{half}.{name}": "10Gi" for half in ("requests", "limits") for name in ("cpu", "memory", "ephemeral-storage")}
    namespace.apply(quota("all", pods="10", **every))
    namespace.apply(resource())
    wait_for_status(lambda status: preflight(status) == ("True", "Passed"), "preflight has passed")
    (deployment,) = namespace.list_all("deployments")
    namespace.wait_until(
        "deployment", deployment["metadata"]["name"], lambda item: item["status"].get("replicas"), "its engine's pod"
    )


@pytest.mark.usefixtures("operator")
def test_rejected_preflight_pod_is_reported_until_it_starts(namespace: Namespace, wait_for_status: Wait) -> None:
    namespace.apply(quota("none", pods="0"))
    wait_until(lambda: namespace.get("resourcequota", "none")["status"].get("hard"), "the quota is active")
    namespace.apply(resource())
    status = wait_for_status(lambda status: preflight(status) == ("Unknown", "FailedCreate"), "the missing pod is reported")[
        "status"
    ]
    (job,) = namespace.list_all("jobs")
    name = job["metadata"]["name"]
    message = condition(status, "PreflightPassed")["message"]
    assert message.startswith(f"Job {name} has no pod; Kubernetes retries: ")
    assert f'"{name}-..." is forbidden: exceeded quota: none' in message, "the same message with each attempt"
    namespace.kubectl("delete", "resourcequota", "none")
    wait_for_status(lambda status: preflight(status) == ("True", "Passed"), "it continues automatically")
    assert namespace.list_all("jobs")[0]["metadata"]["uid"] == job["metadata"]["uid"], "the same Job"


@contextlib.contextmanager
def injected_container(lab: Lab, namespace: Namespace, container: dict[str, Any]) -> Iterator[None]:
    """Inject one more container into every preflight pod of the namespace."""
    fields = ", ".join(f"{key}: {json.dumps(value)}" for key, value in container.items())
    container_expression = f"Object.spec.containers{{{fields}}}"
    metadata: dict[str, Any] = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": f"inject-{namespace.name}"}}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    policy = {
        **metadata,
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
                        "expression": f'[JSONPatch{{op: "add", path: "/spec/containers/-", value: {container_expression}}}]',
                    },
                }
            ],
        },
    }
    selector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}}}
    binding = {
        **metadata,
        "kind": "MutatingAdmissionPolicyBinding",
        "spec": {"policyName": metadata["metadata"]["name"], "matchResources": selector},
    }
    probe_pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "trial", "namespace": namespace.name, "labels": {"aerie.dev/preflight": "trial"}},
        "spec": {"containers": [{"name": "one", "image": "aerie.dev/lab/shell"}]},
    }

    def is_injected() -> bool:
        pod = json.loads(namespace.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(probe_pod)))
        return len(pod["spec"]["containers"]) == 2

    lab.apply(policy, binding)
    try:
        wait_until(is_injected, "containers are injected")
        yield
    finally:
        for kind in ("mutatingadmissionpolicybinding", "mutatingadmissionpolicy"):
            lab.kubectl("delete", kind, str(metadata["metadata"]["name"]))


@pytest.mark.usefixtures("operator")
def test_injected_container_does_not_delay_the_result(lab: Lab, namespace: Namespace, wait_for_status: Wait) -> None:
    mesh = {"name": "mesh", "image": "aerie.dev/lab/shell:1", "args": ["-c", "exec sleep 3600"]}
    with injected_container(lab, namespace, mesh):
        namespace.apply(resource())
        wait_for_status(lambda status: preflight(status) == ("True", "Passed"), "its result counts")
        (job,) = namespace.list_all("jobs")
        assert not job["status"].get("conditions"), "the Job has not ended"
        (pod,) = namespace.list_all("pods", "aerie.dev/preflight=chat")
        assert len(pod["spec"]["containers"]) == 2
        record = namespace.get("configmap", job["metadata"]["name"])["data"]["result.json"]
        assert json.loads(record)["passed"] is True
        namespace.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=1", "--wait=false")


def evict_pod(namespace: Namespace, pod: str) -> None:
    """Evict a pod like a drain; raise LabError if a budget forbids it."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace.name}}
    where = f"/api/v1/namespaces/{namespace.name}/pods/{pod}/eviction"
    namespace.kubectl("create", "--raw", where, "-f", "-", stdin=json.dumps(body))


def pods(namespace: Namespace, revision: str, control: str = "false") -> list[str]:
    all_pods = namespace.list_all("pods", f"aerie.dev/revision={revision},aerie.dev/control={control}")
    return [pod["metadata"]["name"] for pod in all_pods if not pod["metadata"].get("deletionTimestamp")]


def test_stable_pod_can_be_drained_while_canary_has_no_node(
    namespace: Namespace, launcher: Any, processless_resource: Callable[..., dict[str, Any]], wait_for_status: Wait
) -> None:
    launcher.start(namespace.name)
    namespace.apply(processless_resource(OLD, replicas=3))
    stable = wait_for_status(lambda status: status.get("phase") == "Ready", "it serves")["status"]["stable"]["revision"]
    namespace.apply(processless_resource(NEW, gates=["lab.example/hold"], replicas=3))
    canary = wait_for_status(lambda status: (status.get("canary") or {}).get("phase") == "Starting", "a canary begins")["status"][
        "canary"
    ]
    wait_until(lambda: pods(namespace, canary["revision"]), "its pod is there, without a node")
    name = f"chat-{stable}"
    budget = namespace.wait_until("pdb", name, lambda item: item["status"].get("disruptionsAllowed") == 1, "one may be evicted")
    assert budget["status"]["expectedPods"] == 3, "neither the canary nor its control pod"
    (first, *_) = pods(namespace, stable)
    evict_pod(namespace, first)
    assert first not in pods(namespace, stable)

    # The canary's own pod does not serve, and may be evicted at any time; so may the control pod.
    (waiting,) = pods(namespace, canary["revision"])
    evict_pod(namespace, waiting)
    evict_pod(namespace, pods(namespace, stable, "true")[0])


def test_disabled_budget_makes_room_for_the_users_own(
    namespace: Namespace, launcher: Any, processless_resource: Callable[..., dict[str, Any]], wait_for_status: Wait
) -> None:
    launcher.start(namespace.name)
    spec = {
        "replicas": 2,
        "rollout": {"disruption": {"maxUnavailable": "100%"}, "canary": {"stepWeights": [], "scaleDownDelay": "0s"}},
    }
    namespace.apply(processless_resource(OLD, **spec))
    stable = wait_for_status(lambda status: status.get("phase") == "Ready", "it serves")["status"]["stable"]["revision"]
    namespace.wait_until(
        "pdb", f"chat-{stable}", lambda item: item["status"].get("disruptionsAllowed") == 2, "all may be evicted"
    )
    budget_spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"aerie.dev/name": "chat"}}}
    namespace.apply({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "mine"}, "spec": budget_spec})
    namespace.wait_until("pdb", "mine", lambda item: item["status"].get("disruptionsAllowed") == 1, "it counts")
    with pytest.raises(LabError, match="more than one PodDisruptionBudget"):
        evict_pod(namespace, pods(namespace, stable)[0])
    spec["rollout"] = {"disruption": {"budget": "None"}, "canary": {"stepWeights": [], "scaleDownDelay": "0s"}}
    namespace.apply(processless_resource(OLD, **spec))
    namespace.wait_until_deleted("pdb", f"chat-{stable}")
    evict_pod(namespace, pods(namespace, stable)[0])
