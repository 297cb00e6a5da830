"""Canaries on a real API server, under traffic through a real gateway: what is better stays, and what is worse goes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import httpx

from aerie_lab.engine.background import Background
from aerie_lab.engine.traffic import Target
from aerie_lab.testing import Namespace, until

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
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
                "podTemplate": {"spec": {"containers": [quick]}},
            },
            # So long that a slow machine does not fail them: what is compared here is the drafters.
            "speculation": {"tokens": 3, "tuning": {"slo": {"timePerOutputToken": "10s", "timeToFirstToken": "30s"}}},
            "rollout": {
                "canary": {"ramp": [50], "rampHold": "1s"},
                "analysis": {"warmup": "1s", "block": "2s", "soak": "10s", "deadline": "1h", "margin": 0.05},
                "traffic": {
                    "mode": "Gateway",
                    "gateway": {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [host]},
                },
            },
            "metrics": {"interval": "1s"},
        },
    }


def lengths(status: dict[str, Any]) -> dict[str, Any]:
    """What is known of the acceptance lengths."""
    known = (status.get("analysis") or {}).get("comparisons") or []
    return next((one for one in known if one["metric"] == "AcceptanceLength"), {"blocks": 0})


def engines(namespace: Namespace, revision: str) -> dict[str, list[int]]:
    """The pods of a revision that stay, by uid, with the restarts of their containers."""
    pods = namespace.list_all("pods", f"aerie.dev/revision={revision},aerie.dev/control=false")
    return {
        pod["metadata"]["uid"]: [one["restartCount"] for one in pod["status"].get("containerStatuses") or []]
        for pod in pods
        if not pod["metadata"].get("deletionTimestamp") and pod["status"].get("phase") == "Running"
    }


def test_a_better_drafter_is_promoted_and_a_worse_one_rolled_back_under_traffic(
    namespace: Namespace, inside: Any, specdep: Wait
) -> None:
    host = f"{namespace.name}.example"
    namespace.apply(resource(host, "eagle3"))
    first = specdep(lambda s: s.get("phase") == "Ready", "it is Ready")["status"]["stable"]["revision"]
    url = namespace.lab.gateway_url or ""
    until(lambda: answers(url, host), "the gateway answers")
    with Background(Target(url, "chat", host, timeout=120), RATE) as traffic:
        namespace.apply(resource(host, "better"))
        split = {"stable": 50, "canary": 25, "control": 25}
        status = specdep(lambda s: lengths(s)["blocks"] >= 3 and weights(s) == split, "three blocks are counted", PATIENCE)[
            "status"
        ]
        better, began, blocks = status["canary"]["revision"], status["analysis"]["startedAt"], lengths(status)["blocks"]
        judged = engines(namespace, better)
        assert judged
        assert inside.end(signal.SIGKILL) == -signal.SIGKILL
        inside.start()
        status = specdep(lambda s: s["stable"]["revision"] == better, "the better drafter is promoted", PATIENCE)["status"]
        assert (status["analysis"]["startedAt"], status["analysis"]["verdict"]) == (began, "Promote")
        told = status["history"][0]
        assert told["result"] == "Promoted"
        assert "certainly above" in told["reason"]
        known = lengths({"analysis": told})
        assert known["blocks"] > blocks, "it went on where the killed operator had come to"
        assert -0.05 <= known["lower"] < known["estimate"]
        promoted = engines(namespace, better)
        assert judged.keys() <= promoted.keys()
        assert promoted == {uid: [0] for uid in promoted}
        until(lambda: not engines(namespace, first), "the old pods are gone")

        namespace.apply(resource(host, "worse"))
        status = specdep(lambda s: s["phase"] == "RolledBack", "the worse drafter is rolled back", PATIENCE)["status"]
        assert status["stable"]["revision"] == better
        told = status["history"][0]
        assert told["result"] == "RolledBack"
        assert "certainly at most" in told["reason"]
        known = lengths({"analysis": told})
        assert known["estimate"] < known["upper"] <= 0
        assert [told["drafter"], told["against"]] == ["models.example/worse", "models.example/better"]
        until(lambda: len(namespace.list_all("deployments")) == 1, "its pods are gone")
    assert engines(namespace, better) == promoted, "the promoted pods serve throughout"
    assert len(traffic.report.outcomes) > 100
    assert not traffic.report.errors
    assert inside.end() == 0


def test_a_canary_of_which_nothing_can_be_counted_is_never_promoted(namespace: Namespace, inside: Any, specdep: Wait) -> None:
    host = f"{namespace.name}.example"
    document = resource(host, "eagle3")
    spec = document["spec"]
    spec["replicas"] = 1
    namespace.apply(document)
    first = specdep(lambda s: s.get("phase") == "Ready", "it is Ready")["status"]["stable"]["revision"]
    url = namespace.lab.gateway_url or ""
    until(lambda: answers(url, host), "the gateway answers")
    spec["engine"]["image"] = "aerie.dev/test/mute:v0.33.0"
    with Background(Target(url, "chat", host, timeout=120), RATE) as traffic:
        namespace.apply(document)
        status = specdep(lambda s: s["phase"] == "RolledBack", "it is rolled back", PATIENCE)["status"]
    assert status["stable"]["revision"] == first
    assert [one["result"] for one in status["history"]] == ["RolledBack", "Promoted"]
    assert "cannot be believed: the metrics page has no vllm:" in status["history"][0]["reason"]
    assert "comparisons" not in status["history"][0]
    assert not traffic.report.errors
    assert inside.end() == 0


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
