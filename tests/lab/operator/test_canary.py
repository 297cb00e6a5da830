"""Canaries on a real API server, under traffic through a real gateway: what is worse goes, what is better stays, and goes too
when a person says so."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import httpx

from aerie.rollout.canary.messages import ROLLBACK_ANNOTATION
from aerie.rollout.canary.state_machine import MANUAL_ROLLBACK_MESSAGE
from aerie_lab.engine.background import BackgroundTraffic
from aerie_lab.engine.traffic import TrafficTarget
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.prometheus import PROMETHEUS_MANIFESTS

Wait = Callable[..., dict[str, Any]]
RATE = 16.0
PATIENCE = 900
"""Seconds for one canary. A minute is usual; on a machine that has no time, blocks take longer."""


def resource(host: str, drafter: str) -> dict[str, Any]:
    """Two simulated engines behind the lab's gateway, and rollouts in a hurry."""

    def image(name: str) -> dict[str, Any]:
        return {"source": {"image": {"reference": f"models.example/{name}@sha256:{'0' * 64}"}}}

    quick = {"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 2}}}}
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
                "podTemplate": {"spec": {"containers": [quick]}},
            },
            # So long that a slow machine does not fail them: what is compared here is the drafters.
            "speculation": {
                "numSpeculativeTokens": 3,
                "tuning": {"slo": {"timePerOutputToken": "10s", "timeToFirstToken": "30s"}},
            },
            "rollout": {
                "canary": {"stepWeights": [50], "stepDuration": "1s", "scaleDownDelay": "1h"},
                "analysis": {
                    "warmupDuration": "1s",
                    "blockDuration": "2s",
                    "minDuration": "10s",
                    "maxDuration": "1h",
                    "margin": 0.05,
                    "failureMargin": 0.1,
                },
                "traffic": {
                    "mode": "Gateway",
                    "gateway": {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [host]},
                },
            },
            "metrics": {"scrapeInterval": "1s"},
        },
    }


def lengths(status: dict[str, Any]) -> dict[str, Any]:
    """What is known of the tokens per step."""
    known = (status.get("analysis") or {}).get("comparisons") or []
    return next((one for one in known if one["metric"] == "TokensPerStep"), {"sampleCount": 0})


def engines(namespace: Namespace, revision: str) -> dict[str, list[int]]:
    """The pods of a revision that stay, by uid, with the restarts of their containers."""
    pods = namespace.list_all("pods", f"aerie.dev/revision={revision},aerie.dev/control=false")
    return {
        pod["metadata"]["uid"]: [one["restartCount"] for one in pod["status"].get("containerStatuses") or []]
        for pod in pods
        if not pod["metadata"].get("deletionTimestamp") and pod["status"].get("phase") == "Running"
    }


def test_a_worse_drafter_is_rolled_back_and_a_better_one_promoted_and_taken_back_under_traffic(
    namespace: Namespace, inside: Any, specdep: Wait
) -> None:
    host = f"{namespace.name}.example"
    namespace.apply(resource(host, "eagle3"))
    first = specdep(lambda s: s.get("phase") == "Ready", "it is Ready")["status"]["stable"]["revision"]
    url = namespace.lab.gateway_url or ""
    wait_until(lambda: answers(url, host), "the gateway answers")
    with BackgroundTraffic(TrafficTarget(url, "chat", host, timeout_seconds=120), RATE) as traffic:
        served = engines(namespace, first)
        # Its figures come from a Prometheus, those of the better one below from the pods' own pages.
        worse = resource(host, "worse")
        worse["spec"]["metrics"]["source"] = {"prometheus": {"address": prometheus(namespace)}}
        namespace.apply(worse)
        status = specdep(lambda s: s["phase"] == "RolledBack", "the worse drafter is rolled back", PATIENCE)["status"]
        assert status["stable"]["revision"] == first
        told = status["rolloutHistory"][0]
        assert told["result"] == "RolledBack"
        known = lengths({"analysis": told})
        assert known["estimate"] < known["upper"] <= 0
        assert [told["drafter"], told["replacedDrafter"]] == ["models.example/worse", "models.example/eagle3"]
        wait_until(lambda: len(namespace.list_all("deployments")) == 1, "its pods are gone")
        assert engines(namespace, first) == served, "the stable pods serve throughout"

        trained = resource(host, "better")
        trained["spec"]["rollout"]["analysis"]["minDuration"] = "40s"  # time to see it under way, and to kill its operator
        namespace.apply(trained)
        split = {"stable": 50, "canary": 25, "control": 25}
        status = specdep(lambda s: lengths(s)["sampleCount"] >= 3 and weights(s) == split, "three blocks are counted", PATIENCE)[
            "status"
        ]
        better, began, blocks = status["canary"]["revision"], status["analysis"]["startTime"], lengths(status)["sampleCount"]
        judged = engines(namespace, better)
        assert judged
        assert inside.end(signal.SIGKILL) == -signal.SIGKILL
        inside.start()
        status = specdep(lambda s: s["stable"]["revision"] == better, "the better drafter is promoted", PATIENCE)["status"]
        assert (status["analysis"]["startTime"], status["analysis"]["verdict"]) == (began, "Promote")
        told = status["rolloutHistory"][0]
        assert told["result"] == "Promoted"
        known = lengths({"analysis": told})
        assert known["sampleCount"] > blocks, "it went on where the killed operator had come to"
        assert -0.05 <= known["lower"] < known["estimate"]
        promoted = engines(namespace, better)
        assert judged.keys() <= promoted.keys()
        assert promoted == {uid: [0] for uid in promoted}

        # Two of the old pods, as many as canary and control were, stay as they are; nothing leads to them.
        kept = specdep(lambda s: s["phase"] == "Monitoring", "pods are kept")["status"]["previous"]
        assert (kept["revision"], kept["replicas"], kept["weight"]) == (first, 2, 0)
        assert engines(namespace, first) == served
        wait_until(lambda: addressed(namespace) == set(promoted), "all requests are for the promoted pods")
        word = f"{ROLLBACK_ANNOTATION}={better}"
        namespace.kubectl("annotate", "--overwrite", "specdep", "chat", word)
        status = specdep(lambda s: s["stable"]["revision"] == first, "it is taken back")["status"]
        told = status["rolloutHistory"][0]
        assert (told["result"], told["message"]) == (
            "RolledBack",
            f"Rolled back after promotion. {MANUAL_ROLLBACK_MESSAGE}",
        )
        specdep(lambda s: s["phase"] == "RolledBack", "it is gone")
        wait_until(lambda: len(namespace.list_all("deployments")) == 1, "its pods are gone")
        assert engines(namespace, first) == served, "what serves again was never gone"
        wait_until(lambda: addressed(namespace) == set(served), "all requests are for what serves again")
    assert len(traffic.report.outcomes) > 100
    assert not traffic.report.errors
    assert inside.end() == 0


def addressed(namespace: Namespace) -> set[str]:
    """The pods, by uid, to which the Services of the resource lead."""
    return {
        endpoint["targetRef"]["uid"]
        for service in ("chat", "chat-stable")
        for item in namespace.list_all("endpointslices", f"kubernetes.io/service-name={service}")
        for endpoint in item.get("endpoints") or []
        if endpoint["conditions"].get("ready")
    }


def unasked(name: str, drafter: str) -> dict[str, Any]:
    """A resource that no client sends a request to, whose warm-up is long enough for the operator's own."""
    document = resource("", drafter)
    rollout = document["spec"]["rollout"] | {"traffic": {"mode": "Service"}}
    rollout["analysis"] |= {"warmupDuration": "20s", "blockDuration": "10s", "minDuration": "30m"}
    return document | {"metadata": {"name": name}, "spec": document["spec"] | {"replicas": 1, "rollout": rollout}}


def test_canaries_of_which_nothing_can_be_counted_are_rolled_back_for_their_pages_or_their_answers(
    namespace: Namespace, inside: Any, specdep: Wait
) -> None:
    host = f"{namespace.name}.example"
    document = resource(host, "eagle3")
    spec = document["spec"]
    spec["replicas"] = 1
    namespace.apply(document)
    namespace.apply(unasked("letters", "eagle3"))

    def letters(phase: str) -> dict[str, Any]:
        look: Callable[[dict[str, Any]], bool] = lambda item: (item.get("status") or {}).get("phase") == phase  # noqa: E731
        found: dict[str, Any] = namespace.wait_until("specdep", "letters", look, f"letters is {phase}", timeout_seconds=PATIENCE)[
            "status"
        ]
        return found

    served = letters("Ready")["stable"]["revision"]
    namespace.apply(unasked("letters", "lossy"))
    first = specdep(lambda s: s.get("phase") == "Ready", "it is Ready")["status"]["stable"]["revision"]
    url = namespace.lab.gateway_url or ""
    wait_until(lambda: answers(url, host), "the gateway answers")
    spec["engine"] |= {"image": "aerie.dev/test/mute:v0.33.0", "version": "0.33.0"}
    with BackgroundTraffic(TrafficTarget(url, "chat", host, timeout_seconds=120), RATE) as traffic:
        namespace.apply(document)
        status = specdep(lambda s: s["phase"] == "RolledBack", "it is rolled back", PATIENCE)["status"]
    assert status["stable"]["revision"] == first
    assert [one["result"] for one in status["rolloutHistory"]] == ["RolledBack", "Promoted"]
    assert "are invalid: " in status["rolloutHistory"][0]["message"]
    assert "vllm:" in status["rolloutHistory"][0]["message"]
    assert "comparisons" not in status["rolloutHistory"][0]
    assert not traffic.report.errors
    status = letters("RolledBack")
    assert status["stable"]["revision"] == served
    told = status["rolloutHistory"][0]
    compared = next(one for one in told["comparisons"] if one["metric"] == "OutputEquivalence")
    assert compared["sampleCount"] == 24
    assert told["message"].startswith(compared["message"])
    assert inside.end() == 0


def prometheus(namespace: Namespace) -> str:
    """The address of a Prometheus of the namespace's own, which scrapes its engines."""
    namespace.apply(PROMETHEUS_MANIFESTS)
    namespace.wait_until_ready("prometheus", timeout_seconds=240)
    return f"http://{namespace.get('service', 'prometheus')['spec']['clusterIP']}"


def weights(status: dict[str, Any]) -> dict[str, int]:
    """Percent of the traffic of each arm, while canary and control are compared."""
    canary = status.get("canary") or {}
    if status["phase"] != "Analyzing" or "control" not in canary:
        return {}
    return {"stable": status["stable"]["weight"], "canary": canary["weight"], "control": canary["control"]["weight"]}


def answers(url: str, host: str) -> bool:
    """Whether a request gets through."""
    body = {"model": "chat", "prompt": "Where do eagles nest?", "max_tokens": 4}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, headers={"Host": host}, timeout=30).status_code == 200
    except httpx.TransportError:
        return False
