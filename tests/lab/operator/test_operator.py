"""The operator on a real API server: from a resource to engines that answer, and whatever may happen on the way."""

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
    """A resource named chat with one simulated engine."""
    # A loaded machine has to be waited for, and a test has not the time for a drain.
    quick = {"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}
    engine = {
        "image": "aerie.dev/lab/engine:v0.33.0",
        "version": "0.33.0",
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
        "podTemplate": {"spec": {"terminationGracePeriodSeconds": 10, "containers": [quick]}},
    }
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {"replicas": 1, "model": image("target"), "drafter": image(drafter), "engine": engine, **spec},
    }


def is_ready(status: dict[str, Any]) -> bool:
    return status.get("phase") == "Ready" and holds(status, "Ready")


def holds(status: dict[str, Any], kind: str, value: str = "True") -> bool:
    return any(one["type"] == kind and one["status"] == value for one in status.get("conditions") or [])


def shown(arm: dict[str, Any]) -> ArmMetrics:
    return ArmMetrics(arm.get("acceptanceLength"), arm.get("timePerOutputToken"), arm.get("timeToFirstToken"))


def message(status: dict[str, Any], kind: str) -> str:
    return str(next(one["message"] for one in status["conditions"] if one["type"] == kind))


def test_from_a_resource_to_an_answer_with_its_figures_and_nothing_is_written_any_more(
    namespace: Namespace, inside: Any, specdep: Wait
) -> None:
    host = f"{namespace.name}.example"
    gateway = {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [host]}
    namespace.apply(resource(rollout={"traffic": {"mode": "Gateway", "gateway": gateway}}, metrics={"scrapeInterval": "1s"}))
    status = specdep(is_ready, "it is Ready")["status"]
    assert status["stable"]["drafter"] == "models.example/eagle31"
    assert status["stable"]["setting"] == {"mode": "Static", "numSpeculativeTokens": 3}
    columns = namespace.kubectl("get", "specdep", "chat").splitlines()[1].split()
    assert columns[:4] == ["chat", "Ready", "models.example/eagle31", "3"]
    assert "acceptanceLength" not in status["stable"]
    wait_until(lambda: inside.scrapes() >= 1, "the engine's metrics are read before there is traffic")

    assert namespace.lab.gateway_url is not None
    ask = {"model": "chat", "messages": [{"role": "user", "content": "Where do eagles nest?"}], "max_tokens": 8}
    with httpx.Client(base_url=namespace.lab.gateway_url, headers={"Host": host}, timeout=30) as client:

        def answered() -> dict[str, Any] | None:
            try:
                answer = client.post("/v1/chat/completions", json=ask)
            except httpx.TransportError:
                return None
            found: dict[str, Any] | None = answer.json() if answer.status_code == 200 else None
            return found

        answer = wait_until(answered, "the gateway answers")
        assert answer is not None
        assert answer["usage"]["completion_tokens"] == 8
        for _ in range(20):
            client.post("/v1/chat/completions", json={**ask, "max_tokens": 64}).raise_for_status()
        page = client.get("/metrics").content

    # The window began before the first request, so it is all that the engine has counted.
    found, read = compute_arm_metrics(parse_exposition(page).counters), inside.scrapes()
    assert found.acceptance_length is not None
    wait_until(lambda: inside.scrapes() >= read + 2, "the metrics are read after the last request")
    told = specdep(
        lambda s: debounce_metrics(shown(s["stable"]), found) == shown(s["stable"]), "the figures are what the engine counts"
    )
    length = told["status"]["stable"]["acceptanceLength"]
    assert length == pytest.approx(found.acceptance_length, rel=0.04)
    assert namespace.kubectl("get", "specdep", "chat").splitlines()[1].split()[4] == f"{length:g}"

    # The last status is written when it is Ready; after that only the world may cause a write. Others write on the children
    # (their own controllers, their status), so of those it is Aerie's own writes that are looked at.
    ours = "jsonpath={.items[*].metadata.managedFields[?(@.manager=='aerie')].time}"

    def written() -> tuple[str, str]:
        children = namespace.kubectl("get", "deploy,svc,pdb,httproute", "--show-managed-fields", "-o", ours)
        return namespace.get("specdep", "chat")["metadata"]["resourceVersion"], children

    before, read = written(), inside.scrapes()
    assert len(before[1].split()) >= 4
    wait_until(lambda: inside.scrapes() >= read + 3, "the metrics are read a few times more")
    assert written() == before
    assert inside.end() == 0


def test_a_bad_drafter_is_refused_before_any_engine_pod(namespace: Namespace, operator: Any, specdep: Wait) -> None:
    namespace.apply(resource("torn"))
    status = specdep(lambda s: holds(s, "PreflightPassed", "False"), "preflight has refused it")["status"]
    assert "model.safetensors" in message(status, "PreflightPassed")
    assert status["phase"] == "Failed"
    assert namespace.list_all("deployments") == []
    pods = {pod["metadata"]["labels"].get("aerie.dev/preflight") for pod in namespace.list_all("pods")}
    assert pods == {"chat"}
    # Nor has there ever been one: every pod that was scheduled has left an event.
    scheduled = namespace.kubectl(
        "get", "events", "--field-selector=reason=Scheduled", "-o", "jsonpath={.items[*].involvedObject.name}"
    )
    assert scheduled.split()
    assert all("preflight" in name for name in scheduled.split())
    assert operator.process.poll() is None

    namespace.apply(resource("eagle31"))
    specdep(is_ready, "a good drafter serves")


def test_a_spec_says_what_becomes_of_what_preflight_refuses(namespace: Namespace, operator: Any, specdep: Wait) -> None:
    def preflight(status: dict[str, Any]) -> dict[str, Any]:
        return next((dict(one) for one in status.get("conditions") or [] if one["type"] == "PreflightPassed"), {})

    document = resource()
    document["spec"]["engine"]["args"] = ["--tensor-parallel-size=2"]
    namespace.apply(document)
    status = specdep(lambda s: preflight(s).get("status") == "False", "two ranks on one GPU are refused")["status"]
    assert "C29" in preflight(status)["message"]
    assert namespace.list_all("deployments") == []

    document["spec"]["rollout"] = {"preflight": {"acceptedChecks": ["C21"]}}
    namespace.apply(document)
    generation = namespace.get("specdep", "chat")["metadata"]["generation"]
    status = specdep(lambda s: s.get("observedGeneration") == generation, "the spec is taken up")["status"]
    assert preflight(status)["status"] == "False"  # another finding than that which is accepted

    document["spec"]["rollout"] = {"preflight": {"acceptedChecks": ["C29"]}}
    namespace.apply(document)
    condition = preflight(specdep(is_ready, "what is accepted serves")["status"])
    assert (condition["status"], condition["reason"]) == ("True", "PreflightAccepted")
    assert "acceptedChecks: C29" in condition["message"]
    assert operator.process.poll() is None


@pytest.mark.parametrize(("mode", "status", "reason"), [("Warn", "True", "PreflightWarned"), ("Off", "Unknown", "Skipped")])
@pytest.mark.usefixtures("operator")
def test_what_is_refused_goes_on_where_preflight_only_warns_or_is_off(
    namespace: Namespace, specdep: Wait, mode: str, status: str, reason: str
) -> None:
    document = resource(rollout={"preflight": {"mode": mode}})
    document["spec"]["engine"]["args"] = ["--tensor-parallel-size=2"]
    namespace.apply(document)
    conditions = specdep(is_ready, "the simulated engine, for which one GPU does, serves")["status"]["conditions"]
    [condition] = [one for one in conditions if one["type"] == "PreflightPassed"]
    assert (condition["status"], condition["reason"]) == (status, reason)
    assert re.search(rf"spec\.rollout\.preflight\.mode(:| is) {mode}", condition["message"])
    assert ("C29" in condition["message"]) == (mode == "Warn")
    assert bool(namespace.list_all("jobs")) == (mode == "Warn")


def test_a_change_serves_before_the_old_pods_go_and_a_kill_in_between_changes_nothing(
    namespace: Namespace, stopped: Any, specdep: Wait
) -> None:
    # Traffic is another test's; here a person says at once that the canary is good.
    rollout = {"canary": {"control": "Stable", "stepWeights": [], "scaleDownDelay": "0s"}}
    stopped.start()
    namespace.apply(resource("eagle3", rollout=rollout))
    old = specdep(is_ready, "it is Ready")["status"]["stable"]["revision"]
    namespace.apply(resource("eagle31", rollout=rollout))
    status = specdep(lambda s: s.get("canary"), "there is a canary, which warms up for minutes")["status"]
    new = status["canary"]["revision"]
    assert (status["stable"]["revision"], status["stable"]["readyReplicas"]) == (old, 1)
    assert stopped.end(signal.SIGKILL) == -signal.SIGKILL
    namespace.kubectl("annotate", "specdep", "chat", f"aerie.dev/promote={new}")
    stopped.start()
    status = specdep(lambda s: is_ready(s) and s["stable"]["revision"] != old, "the change is rolled out")["status"]
    assert status["stable"]["revision"] == new
    assert status["stable"]["drafter"] == "models.example/eagle31"
    assert [(one["result"], one["revision"]) for one in status["rolloutHistory"]] == [("Promoted", new), ("Promoted", old)]
    wait_until(lambda: len(namespace.list_all("deployments")) == 1, "the old Deployment is gone")
    (deployment,) = namespace.list_all("deployments")
    assert deployment["metadata"]["labels"]["aerie.dev/revision"] == new


def test_children_are_put_back_and_go_with_the_resource_while_no_operator_runs(
    namespace: Namespace, operator: Any, specdep: Wait
) -> None:
    namespace.apply(resource())
    specdep(is_ready, "it is Ready")
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
    wait_until(lambda: not namespace.list_all("deployments") and not namespace.list_all("pods"), "the children are gone")


def test_a_name_that_somebody_has_is_left_to_them_and_named(namespace: Namespace, operator: Any, specdep: Wait) -> None:
    namespace.kubectl("create", "service", "clusterip", "chat", "--tcp=80:80")
    uid = namespace.get("service", "chat")["metadata"]["uid"]
    namespace.apply(resource())
    status = specdep(lambda s: holds(s, "Degraded"), "the conflict is told")["status"]
    assert message(status, "Degraded").startswith("Service chat belongs to another owner")
    assert namespace.get("service", "chat")["metadata"]["uid"] == uid
    assert operator.end() == 0
