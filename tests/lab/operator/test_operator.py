"""The operator on a real API server: from a resource to engines that answer, with faults in between."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from aerie.engine.metrics.exposition import parse_exposition
from aerie.rollout.facts.arm_metrics import ArmMetrics, compute_arm_metrics, debounce_metrics
from aerie_lab.testing import Namespace, wait_until

Wait = Callable[..., dict[str, Any]]
DIGEST = "sha256:" + "0" * 64


def image(name: str) -> dict[str, Any]:
    return {"source": {"image": {"reference": f"models.example/{name}@{DIGEST}"}}}


def resource(drafter: str = "eagle31", **spec: Any) -> dict[str, Any]:
    """Return a resource named chat with one simulated engine."""
    # A short drain, since a test has no time for the default one.
    container = {"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}
    engine = {
        "image": "aerie.dev/lab/engine:v0.33.0",
        "version": "0.33.0",
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
        "podTemplate": {"spec": {"terminationGracePeriodSeconds": 10, "containers": [container]}},
    }
    rollout = {"inPlace": {"mode": "Off"}, **spec.pop("rollout", {})}
    models = {"model": image("target"), "drafter": image(drafter)}
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {"replicas": 1, **models, "engine": engine, "rollout": rollout, **spec},
    }


def is_ready(status: dict[str, Any]) -> bool:
    return status.get("phase") == "Ready" and has_condition(status, "Ready")


def has_condition(status: dict[str, Any], kind: str, value: str = "True") -> bool:
    return any(condition["type"] == kind and condition["status"] == value for condition in status.get("conditions") or [])


def arm_metrics(arm: dict[str, Any]) -> ArmMetrics:
    return ArmMetrics(arm.get("acceptanceLength"), arm.get("timePerOutputToken"), arm.get("timeToFirstToken"))


def message(status: dict[str, Any], kind: str) -> str:
    return str(next(condition["message"] for condition in status["conditions"] if condition["type"] == kind))


def test_resource_serves_with_metrics_and_causes_no_more_writes(
    namespace: Namespace, inner_operator: Any, wait_for_status: Wait
) -> None:
    host = f"{namespace.name}.example"
    gateway = {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [host]}
    namespace.apply(resource(rollout={"traffic": {"mode": "Gateway", "gateway": gateway}}, metrics={"scrapeInterval": "1s"}))
    status = wait_for_status(is_ready, "it is Ready")["status"]
    assert status["stable"]["drafter"] == "models.example/eagle31"
    assert status["stable"]["setting"] == {"mode": "Static", "numSpeculativeTokens": 3}
    columns = namespace.kubectl("get", "specdep", "chat").splitlines()[1].split()
    assert columns[:4] == ["chat", "Ready", "models.example/eagle31", "3"]
    assert "acceptanceLength" not in status["stable"]
    wait_until(lambda: inner_operator.scrapes() >= 1, "the engine's metrics are read before there is traffic")

    assert namespace.lab.gateway_url is not None
    body = {"model": "chat", "messages": [{"role": "user", "content": "Where do eagles nest?"}], "max_tokens": 8}
    with httpx.Client(base_url=namespace.lab.gateway_url, headers={"Host": host}, timeout=30) as client:

        def send_request() -> dict[str, Any] | None:
            try:
                answer = client.post("/v1/chat/completions", json=body)
            except httpx.TransportError:
                return None
            response_body: dict[str, Any] | None = answer.json() if answer.status_code == 200 else None
            return response_body

        answer = wait_until(send_request, "the gateway answers")
        assert answer is not None
        assert answer["usage"]["completion_tokens"] == 8
        for _ in range(20):
            client.post("/v1/chat/completions", json={**body, "max_tokens": 64}).raise_for_status()
        metrics_text = client.get("/metrics").content

    # The window began before the first request, so it is all that the engine has counted.
    expected, scrape_count = compute_arm_metrics(parse_exposition(metrics_text).counters), inner_operator.scrapes()
    assert expected.acceptance_length is not None
    wait_until(lambda: inner_operator.scrapes() >= scrape_count + 2, "the metrics are read after the last request")
    resource_with_metrics = wait_for_status(
        lambda s: debounce_metrics(arm_metrics(s["stable"]), expected) == arm_metrics(s["stable"]),
        "the metrics are those of the engine",
    )
    length = resource_with_metrics["status"]["stable"]["acceptanceLength"]
    assert length == pytest.approx(expected.acceptance_length, rel=0.04)
    assert namespace.kubectl("get", "specdep", "chat").splitlines()[1].split()[4] == f"{length:g}"

    # The last status is written when it is Ready; after that only events may cause a write. Other controllers write to the
    # children, too (their status), so only Aerie's own writes to them are compared.
    own_write_times = "jsonpath={.items[*].metadata.managedFields[?(@.manager=='aerie')].time}"

    def own_writes() -> tuple[str, str]:
        children = namespace.kubectl("get", "deploy,svc,pdb,httproute", "--show-managed-fields", "-o", own_write_times)
        return namespace.get("specdep", "chat")["metadata"]["resourceVersion"], children

    before, scrape_count = own_writes(), inner_operator.scrapes()
    assert len(before[1].split()) >= 4
    wait_until(lambda: inner_operator.scrapes() >= scrape_count + 3, "the metrics are read a few times more")
    assert own_writes() == before
    assert inner_operator.end() == 0


def test_invalid_drafter_is_rejected_before_any_engine_pod(namespace: Namespace, operator: Any, wait_for_status: Wait) -> None:
    namespace.apply(resource("torn"))
    status = wait_for_status(lambda s: has_condition(s, "PreflightPassed", "False"), "preflight has rejected it")["status"]
    assert "model.safetensors" in message(status, "PreflightPassed")
    assert status["phase"] == "Failed"
    assert namespace.list_all("deployments") == []
    pods = {pod["metadata"]["labels"].get("aerie.dev/preflight") for pod in namespace.list_all("pods")}
    assert pods == {"chat"}
    # No engine pod existed before either: every scheduled pod has left an event.
    scheduled = namespace.kubectl(
        "get", "events", "--field-selector=reason=Scheduled", "-o", "jsonpath={.items[*].involvedObject.name}"
    )
    assert scheduled.split()
    assert all("preflight" in name for name in scheduled.split())
    assert operator.process.poll() is None

    namespace.apply(resource("eagle31"))
    wait_for_status(is_ready, "a good drafter serves")


def test_accepted_checks_let_a_rejected_spec_serve(namespace: Namespace, operator: Any, wait_for_status: Wait) -> None:
    def preflight(status: dict[str, Any]) -> dict[str, Any]:
        return next(
            (dict(condition) for condition in status.get("conditions") or [] if condition["type"] == "PreflightPassed"), {}
        )

    document = resource()
    document["spec"]["engine"]["args"] = ["--tensor-parallel-size=2"]
    namespace.apply(document)
    status = wait_for_status(lambda s: preflight(s).get("status") == "False", "two ranks on one GPU are rejected")["status"]
    assert "C29" in preflight(status)["message"]
    assert namespace.list_all("deployments") == []

    document["spec"]["rollout"] = {"preflight": {"acceptedChecks": ["C21"]}}
    namespace.apply(document)
    generation = namespace.get("specdep", "chat")["metadata"]["generation"]
    status = wait_for_status(lambda s: s.get("observedGeneration") == generation, "the spec is observed")["status"]
    assert preflight(status)["status"] == "False"  # another finding than the accepted one

    document["spec"]["rollout"] = {"preflight": {"acceptedChecks": ["C29"]}}
    namespace.apply(document)
    condition = preflight(wait_for_status(is_ready, "what is accepted serves")["status"])
    assert (condition["status"], condition["reason"]) == ("True", "PreflightAccepted")
    assert "acceptedChecks: C29" in condition["message"]
    assert operator.process.poll() is None


@pytest.mark.parametrize(("mode", "status", "reason"), [("Warn", "True", "PreflightWarned"), ("Off", "Unknown", "Skipped")])
@pytest.mark.usefixtures("operator")
def test_preflight_modes_warn_and_off_let_a_rejected_spec_serve(
    namespace: Namespace, wait_for_status: Wait, mode: str, status: str, reason: str
) -> None:
    document = resource(rollout={"preflight": {"mode": mode}})
    document["spec"]["engine"]["args"] = ["--tensor-parallel-size=2"]
    namespace.apply(document)
    conditions = wait_for_status(is_ready, "the simulated engine, for which one GPU does, serves")["status"]["conditions"]
    [condition] = [entry for entry in conditions if entry["type"] == "PreflightPassed"]
    assert (condition["status"], condition["reason"]) == (status, reason)
    assert re.search(rf"spec\.rollout\.preflight\.mode(:| is) {mode}", condition["message"])
    assert ("C29" in condition["message"]) == (mode == "Warn")
    assert bool(namespace.list_all("jobs")) == (mode == "Warn")


def test_change_serves_before_old_pods_are_deleted_despite_a_kill(
    namespace: Namespace, unstarted_operator: Any, wait_for_status: Wait
) -> None:
    # Traffic is tested elsewhere; here the canary is promoted manually.
    rollout = {"canary": {"control": "Stable", "stepWeights": [], "scaleDownDelay": "0s"}}
    unstarted_operator.start()
    namespace.apply(resource("eagle3", rollout=rollout))
    old = wait_for_status(is_ready, "it is Ready")["status"]["stable"]["revision"]
    namespace.apply(resource("eagle31", rollout=rollout))
    status = wait_for_status(lambda s: s.get("canary"), "there is a canary, which warms up for minutes")["status"]
    new = status["canary"]["revision"]
    assert (status["stable"]["revision"], status["stable"]["readyReplicas"]) == (old, 1)
    assert unstarted_operator.end(signal.SIGKILL) == -signal.SIGKILL
    namespace.kubectl("annotate", "specdep", "chat", f"aerie.dev/promote={new}")
    unstarted_operator.start()
    status = wait_for_status(lambda s: is_ready(s) and s["stable"]["revision"] != old, "the change is rolled out")["status"]
    assert status["stable"]["revision"] == new
    assert status["stable"]["drafter"] == "models.example/eagle31"
    assert [(record["result"], record["revision"]) for record in status["rolloutHistory"]] == [
        ("Promoted", new),
        ("Promoted", old),
    ]
    wait_until(lambda: len(namespace.list_all("deployments")) == 1, "the old Deployment is deleted")
    (deployment,) = namespace.list_all("deployments")
    assert deployment["metadata"]["labels"]["aerie.dev/revision"] == new


def test_children_are_restored_and_deleted_with_the_resource(namespace: Namespace, operator: Any, wait_for_status: Wait) -> None:
    namespace.apply(resource())
    wait_for_status(is_ready, "it is Ready")
    namespace.kubectl("delete", "service", "chat")
    wait_until(lambda: namespace.exists("service", "chat"), "the Service is back")
    edit = '[{"op": "replace", "path": "/spec/ports/0/port", "value": 81}]'
    namespace.kubectl("patch", "service", "chat", "--type=json", "-p", edit)

    def ports() -> list[int]:
        return [port["port"] for port in namespace.get("service", "chat")["spec"]["ports"]]

    wait_until(lambda: ports() == [80, 8000], "the Service's ports are as they were")
    (deployment,) = namespace.list_all("deployments")
    name = deployment["metadata"]["name"]
    namespace.kubectl("scale", "deployment", name, "--replicas=3")
    wait_until(lambda: namespace.get("deployment", name)["spec"]["replicas"] == 1, "the Deployment is as it was")
    assert operator.end() == 0
    namespace.kubectl("delete", "specdep", "chat")
    wait_until(lambda: not namespace.list_all("deployments") and not namespace.list_all("pods"), "the children are deleted")


def test_name_conflict_is_reported_and_left_alone(namespace: Namespace, operator: Any, wait_for_status: Wait) -> None:
    namespace.kubectl("create", "service", "clusterip", "chat", "--tcp=80:80")
    uid = namespace.get("service", "chat")["metadata"]["uid"]
    namespace.apply(resource())
    status = wait_for_status(lambda s: has_condition(s, "Degraded"), "the conflict is reported")["status"]
    assert message(status, "Degraded").startswith("Service chat belongs to another owner")
    assert namespace.get("service", "chat")["metadata"]["uid"] == uid
    assert operator.end() == 0
