"""Canaries on a real API server, under traffic through a real gateway: worse ones are rolled back, better ones promoted, and
rolled back by a manual action."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import httpx

from aerie.rollout.canary.messages import ROLLBACK_ANNOTATION
from aerie.rollout.canary.state_machine import MANUAL_ROLLBACK_MESSAGE
from aerie_lab.engine.load_generation.background import BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import TrafficTarget
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.prometheus import PROMETHEUS_MANIFESTS

Wait = Callable[..., dict[str, Any]]
RATE = 16.0
TIMEOUT_SECONDS = 900
"""Maximum for one canary. A minute is usual; on an overloaded machine blocks take longer."""


def resource(host: str, drafter: str) -> dict[str, Any]:
    """Return a resource with two simulated engines behind the lab's gateway, and fast rollouts."""

    def image(name: str) -> dict[str, Any]:
        return {"source": {"image": {"reference": f"models.example/{name}@sha256:{'0' * 64}"}}}

    container = {"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 2}}}}
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "replicas": 2,
            "model": image("target"),
            "drafter": image(drafter),
            "engine": {
                "image": "aerie.dev/lab/engine:v0.33.0",
                "version": "0.33.0",
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
                "podTemplate": {"spec": {"containers": [container]}},
            },
            # Long enough for slow machines: the drafters are compared here, not the times.
            "speculation": {
                "numSpeculativeTokens": 3,
                "tuning": {"slo": {"timePerOutputToken": "10s", "timeToFirstToken": "30s"}},
            },
            "rollout": {
                "inPlace": {"mode": "Off"},
                "canary": {"stepWeights": [50], "stepDuration": "1s", "scaleDownDelay": "1h"},
                "analysis": {
                    "warmupDuration": "1s",
                    "blockDuration": "4s",
                    "minDuration": "10s",
                    "maxDuration": "1h",
                    "margin": 0.05,
                    "failureMargin": 0.1,
                    "shadow": {"source": "None"},
                },
                "traffic": {
                    "mode": "Gateway",
                    "gateway": {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [host]},
                },
            },
            "metrics": {"scrapeInterval": "2s"},
        },
    }


def tokens_per_step(status: dict[str, Any]) -> dict[str, Any]:
    """Return the comparison of the tokens per step."""
    comparisons = (status.get("analysis") or {}).get("comparisons") or []
    return next((comparison for comparison in comparisons if comparison["metric"] == "TokensPerStep"), {"sampleCount": 0})


def restarts_by_pod(namespace: Namespace, revision: str) -> dict[str, list[int]]:
    """Return the restarts of the containers of a revision's pods that are not being deleted, by uid."""
    pods = namespace.list_all("pods", f"aerie.dev/revision={revision},aerie.dev/control=false")
    return {
        pod["metadata"]["uid"]: [status["restartCount"] for status in pod["status"].get("containerStatuses") or []]
        for pod in pods
        if not pod["metadata"].get("deletionTimestamp") and pod["status"].get("phase") == "Running"
    }


def test_worse_canary_rolls_back_and_better_promotes_under_traffic(
    namespace: Namespace, inner_operator: Any, wait_for_status: Wait
) -> None:
    host = f"{namespace.name}.example"
    namespace.apply(resource(host, "eagle3"))
    first = wait_for_status(lambda s: s.get("phase") == "Ready", "it is Ready")["status"]["stable"]["revision"]
    url = namespace.lab.gateway_url or ""
    wait_until(lambda: gateway_answers(url, host), "the gateway answers")
    with BackgroundTraffic(TrafficTarget(url, "chat", host, timeout_seconds=120), RATE) as traffic:
        served = restarts_by_pod(namespace, first)
        # Its metrics come from a Prometheus, those of the better one below from the pods themselves.
        worse = resource(host, "worse")
        worse["spec"]["metrics"]["source"] = {"prometheus": {"address": deploy_prometheus(namespace)}}
        namespace.apply(worse)
        status = wait_for_status(lambda s: s["phase"] == "RolledBack", "the worse drafter is rolled back", TIMEOUT_SECONDS)[
            "status"
        ]
        assert status["stable"]["revision"] == first
        outcome = status["rolloutHistory"][0]
        assert outcome["result"] == "RolledBack"
        length = tokens_per_step({"analysis": outcome})
        assert length["estimate"] < length["upper"] <= 0
        assert [outcome["drafter"], outcome["replacedDrafter"]] == ["models.example/worse", "models.example/eagle3"]
        wait_until(lambda: len(namespace.list_all("deployments")) == 1, "its pods are deleted")
        assert restarts_by_pod(namespace, first) == served, "the stable pods serve throughout"

        better_document = resource(host, "better")
        better_document["spec"]["rollout"]["analysis"]["minDuration"] = (
            "40s"  # time to observe it in progress, and to kill its operator
        )
        namespace.apply(better_document)
        split = {"stable": 50, "canary": 25, "control": 25}
        status = wait_for_status(
            lambda s: tokens_per_step(s)["sampleCount"] >= 3 and analysis_weights(s) == split,
            "three blocks are counted",
            TIMEOUT_SECONDS,
        )["status"]
        better, began, blocks = (
            status["canary"]["revision"],
            status["analysis"]["startTime"],
            tokens_per_step(status)["sampleCount"],
        )
        analyzed = restarts_by_pod(namespace, better)
        assert analyzed
        assert inner_operator.end(signal.SIGKILL) == -signal.SIGKILL
        inner_operator.start()
        status = wait_for_status(lambda s: s["stable"]["revision"] == better, "the better drafter is promoted", TIMEOUT_SECONDS)[
            "status"
        ]
        assert (status["analysis"]["startTime"], status["analysis"]["verdict"]) == (began, "Promote")
        outcome = status["rolloutHistory"][0]
        assert outcome["result"] == "Promoted"
        length = tokens_per_step({"analysis": outcome})
        assert length["sampleCount"] > blocks, "it continued from the killed operator's blocks"
        assert -0.05 <= length["lower"] < length["estimate"]
        promoted = restarts_by_pod(namespace, better)
        assert analyzed.keys() <= promoted.keys()
        assert promoted == {uid: [0] for uid in promoted}

        # Two of the old pods, as many as canary and control, are retained without requests.
        previous = wait_for_status(lambda s: s["phase"] == "Monitoring", "pods are retained")["status"]["previous"]
        assert (previous["revision"], previous["replicas"], previous["weight"]) == (first, 2, 0)
        assert restarts_by_pod(namespace, first) == served
        wait_until(lambda: endpoint_uids(namespace) == set(promoted), "all requests are for the promoted pods")
        annotation = f"{ROLLBACK_ANNOTATION}={better}"
        namespace.kubectl("annotate", "--overwrite", "specdep", "chat", annotation)
        status = wait_for_status(lambda s: s["stable"]["revision"] == first, "it is rolled back")["status"]
        outcome = status["rolloutHistory"][0]
        assert (outcome["result"], outcome["message"]) == (
            "RolledBack",
            f"Rolled back after promotion. {MANUAL_ROLLBACK_MESSAGE}",
        )
        wait_for_status(lambda s: s["phase"] == "RolledBack", "it is removed")
        wait_until(lambda: len(namespace.list_all("deployments")) == 1, "its pods are deleted")
        assert restarts_by_pod(namespace, first) == served, "the stable pods were never deleted"
        wait_until(lambda: endpoint_uids(namespace) == set(served), "all requests are for the stable pods")
    assert len(traffic.report.outcomes) > 100
    assert not traffic.report.errors
    assert inner_operator.end() == 0


def endpoint_uids(namespace: Namespace) -> set[str]:
    """Return the uids of the pods behind the resource's Services."""
    return {
        endpoint["targetRef"]["uid"]
        for service in ("chat", "chat-stable")
        for item in namespace.list_all("endpointslices", f"kubernetes.io/service-name={service}")
        for endpoint in item.get("endpoints") or []
        if endpoint["conditions"].get("ready")
    }


def idle_resource(name: str, drafter: str) -> dict[str, Any]:
    """Return a resource without client requests, whose warm-up is long enough for the operator's own."""
    document = resource("", drafter)
    rollout = document["spec"]["rollout"] | {"traffic": {"mode": "Service"}}
    rollout["analysis"] |= {"warmupDuration": "20s", "blockDuration": "10s", "minDuration": "30m"}
    return document | {"metadata": {"name": name}, "spec": document["spec"] | {"replicas": 1, "rollout": rollout}}


def test_invalid_metrics_or_changed_answers_roll_back(namespace: Namespace, inner_operator: Any, wait_for_status: Wait) -> None:
    host = f"{namespace.name}.example"
    document = resource(host, "eagle3")
    spec = document["spec"]
    spec["replicas"] = 1
    namespace.apply(document)
    namespace.apply(idle_resource("letters", "eagle3"))

    def idle_status(phase: str) -> dict[str, Any]:
        condition: Callable[[dict[str, Any]], bool] = lambda item: (item.get("status") or {}).get("phase") == phase  # noqa: E731
        status: dict[str, Any] = namespace.wait_until(
            "specdep", "letters", condition, f"letters is {phase}", timeout_seconds=TIMEOUT_SECONDS
        )["status"]
        return status

    stable = idle_status("Ready")["stable"]["revision"]
    namespace.apply(idle_resource("letters", "lossy"))
    first = wait_for_status(lambda s: s.get("phase") == "Ready", "it is Ready")["status"]["stable"]["revision"]
    url = namespace.lab.gateway_url or ""
    wait_until(lambda: gateway_answers(url, host), "the gateway answers")
    spec["engine"] |= {"image": "aerie.dev/test/mute:v0.33.0", "version": "0.33.0"}
    with BackgroundTraffic(TrafficTarget(url, "chat", host, timeout_seconds=120), RATE) as traffic:
        namespace.apply(document)
        status = wait_for_status(lambda s: s["phase"] == "RolledBack", "it is rolled back", TIMEOUT_SECONDS)["status"]
    assert status["stable"]["revision"] == first
    assert [record["result"] for record in status["rolloutHistory"]] == ["RolledBack", "Promoted"]
    assert "are invalid: " in status["rolloutHistory"][0]["message"]
    assert "vllm:" in status["rolloutHistory"][0]["message"]
    assert "comparisons" not in status["rolloutHistory"][0]
    assert not traffic.report.errors
    status = idle_status("RolledBack")
    assert status["stable"]["revision"] == stable
    outcome = status["rolloutHistory"][0]
    comparison = next(entry for entry in outcome["comparisons"] if entry["metric"] == "OutputEquivalence")
    assert comparison["sampleCount"] == 24
    assert outcome["message"].startswith(comparison["message"])
    assert inner_operator.end() == 0


def deploy_prometheus(namespace: Namespace) -> str:
    """Deploy a Prometheus that scrapes the namespace's engines; return its address."""
    namespace.apply(PROMETHEUS_MANIFESTS)
    namespace.wait_until_ready("prometheus", timeout_seconds=240)
    return f"http://{namespace.get('service', 'prometheus')['spec']['clusterIP']}"


def analysis_weights(status: dict[str, Any]) -> dict[str, int]:
    """Return the traffic of each arm in percent, while canary and control are compared."""
    canary = status.get("canary") or {}
    if status["phase"] != "Analyzing" or "control" not in canary:
        return {}
    return {"stable": status["stable"]["weight"], "canary": canary["weight"], "control": canary["control"]["weight"]}


def gateway_answers(url: str, host: str) -> bool:
    """Return whether a request through the gateway succeeds."""
    body = {"model": "chat", "prompt": "Where do eagles nest?", "max_tokens": 4}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, headers={"Host": host}, timeout=30).status_code == 200
    except httpx.TransportError:
        return False
