"""Canaries with harm that no comparison of answered requests shows: they are rolled back, and the message names the harm.

    crashing    its engines exit repeatedly, and serve well in between
    abandoned   clients leave before the first token: requests that were never answered have no latency
    slower      twice the time per output token, within an objective that is five times the stable time

All of them draft better than the stable revision, so that only the harm is a reason for a rollback.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aerie_lab.engine.load_generation.background import BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import TrafficTarget
from aerie_lab.engine.load_generation.workload import LengthDistribution, TrafficClass
from aerie_lab.engine.performance_model.acceptance import CLASS_ACCEPTANCE
from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.resources import resource
from tests.lab.operator.test_canary import gateway_answers

pytestmark = pytest.mark.timeout(1200)
Object = dict[str, Any]
Wait = Callable[..., Object]
TIMEOUT_SECONDS = 900.0
"""Maximum for one wait. A minute or two is usual."""
TRAFFIC_CLASSES = (TrafficClass("chat", CLASS_ACCEPTANCE["chat"], LengthDistribution(30, 0.3), LengthDistribution(30, 0.3)),)
"""Short requests: they take at most a second on healthy engines."""
RATES, BETTER = [0.6, 0.36, 0.216], [0.8, 0.64, 0.512]
"""Acceptance rates of the stable revision, and of each canary."""
STEP_TIME = {"base_seconds": 0.04, "seconds_per_token": 1e-4}
"""Step time so long that a busy machine hardly changes it: 19 ms per token of the stable revision."""


def simulator_options(rates: list[float], **step: float) -> str:
    """Return the options of a simulated engine with these acceptance rates and a changed step time."""
    options = {"startup_seconds": 0.5, "step_time": {"formula": STEP_TIME | step}, "acceptance": {"chat": {"rates": rates}}}
    return json.dumps(options | {"apply_drafter_effect": False})


def tokens_per_step(rates: list[float]) -> float:
    """Return the tokens per step."""
    return 1 + sum(rates)


def chat(host: str, simulator: str, *, pods: int = 1, soak: str = "40s") -> Object:
    """Return a resource behind the lab's gateway with twice as many pods as canary and control have each. Its canary is rolled
    back as inconclusive after ten minutes, since times become significant later on a busy machine."""
    gateway = {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [host]}
    document = resource(
        "chat",
        simulator=simulator,
        replicas=2 * pods,
        canary={"replicas": pods},
        analysis={"minDuration": soak, "maxDuration": "10m", "onInconclusive": "Rollback"},
        traffic={"mode": "Gateway", "gateway": gateway},
        preflight={"mode": "Off"},
    )
    # A killed engine serves again as soon as possible.
    (container,) = document["spec"]["engine"]["podTemplate"]["spec"]["containers"]
    container |= {
        "startupProbe": {"periodSeconds": 1, "failureThreshold": 600},
        "readinessProbe": {"periodSeconds": 1},
        "lifecycle": {"preStop": {"sleep": {"seconds": 4}}},
    }
    return document


def canary_outcome(wait_for_status: Wait, stable: str) -> Object:
    """Wait for the canary's end; return its outcome."""

    def is_ended(status: Object) -> bool:
        return bool(status["rolloutHistory"][0]["revision"] != stable)

    outcome: Object = wait_for_status(is_ended, "the canary has ended", TIMEOUT_SECONDS)["status"]["rolloutHistory"][0]
    return outcome


def start_first_revision(namespace: Namespace, wait_for_status: Wait, document: Object) -> tuple[str, str]:
    """Apply the first revision and wait until it serves; return the revision and the gateway's address."""
    namespace.apply(document)
    stable = wait_for_status(lambda s: s.get("phase") == "Ready", "it is Ready")["status"]["stable"]["revision"]
    url = namespace.lab.gateway_url or ""
    wait_until(lambda: gateway_answers(url, f"{namespace.name}.example"), "the gateway answers")
    return str(stable), url


def canary_pods(namespace: Namespace, stable: str) -> dict[str, Object]:
    """Return the canary's pods by name."""
    pods = namespace.list_all("pods", f"aerie.dev/name=chat,aerie.dev/revision!={stable},aerie.dev/control=false")
    return {pod["metadata"]["name"]: pod for pod in pods if not pod["metadata"].get("deletionTimestamp")}


def has_run_after_restart(pod: Object, seconds: float) -> bool:
    """Return whether its engine's process was restarted and has run for this time."""
    (status,) = pod["status"].get("containerStatuses") or [{}]
    started_at = (status.get("state", {}).get("running") or {}).get("startedAt")
    if not status.get("restartCount") or started_at is None:
        return False
    return datetime.now(UTC) - datetime.fromisoformat(str(started_at)) > timedelta(seconds=seconds)


@pytest.mark.nightly  # tests/unit/rollout/canary has all three harms, and the slower engine stays here
@pytest.mark.usefixtures("inner_operator")
def test_repeated_engine_exits_roll_back_canary(namespace: Namespace, wait_for_status: Wait) -> None:
    """Each of three engines exits every 24 seconds, eight seconds after the other: most of them serve at any time, so that it is
    no crash loop."""
    host = f"{namespace.name}.example"
    stable, url = start_first_revision(namespace, wait_for_status, chat(host, simulator_options(RATES), pods=3))
    with (
        BackgroundTraffic(TrafficTarget(url, "chat", host, timeout_seconds=60), 12.0, TRAFFIC_CLASSES),
        contextlib.ExitStack() as faults,
    ):
        namespace.apply(chat(host, simulator_options(BETTER), pods=3, soak="75s"))
        wait_for_status(lambda s: s["phase"] == "Analyzing", "it is analyzed", TIMEOUT_SECONDS)

        def runs_again(name: str) -> bool:
            pod = canary_pods(namespace, stable).get(name)
            return pod is None or has_run_after_restart(pod, 6)

        for name in sorted(canary_pods(namespace, stable)):
            faults.enter_context(namespace.faults.crash(name, 24, namespace=namespace.name))
            wait_until(
                functools.partial(runs_again, name), f"{name} has been killed and runs again", timeout_seconds=TIMEOUT_SECONDS
            )
        outcome = canary_outcome(wait_for_status, stable)
    assert outcome["result"] == "RolledBack", outcome["message"]
    assert any(text in outcome["message"].lower() for text in ("processes", "crash")), outcome["message"]


@pytest.mark.nightly  # as above
@pytest.mark.usefixtures("inner_operator")
def test_abandoned_requests_roll_back_canary(namespace: Namespace, wait_for_status: Wait) -> None:
    host = f"{namespace.name}.example"
    document, canary = (
        chat(host, simulator_options(RATES)),
        chat(host, simulator_options(BETTER, seconds_per_prompt_token=0.1)),
    )  # three seconds for a prompt
    for item in (document, canary):
        item["spec"]["speculation"]["tuning"]["slo"] = {"timePerOutputToken": "10s", "timeToFirstToken": "1s"}
    stable, url = start_first_revision(namespace, wait_for_status, document)
    with BackgroundTraffic(TrafficTarget(url, "chat", host, timeout_seconds=2), 6.0, TRAFFIC_CLASSES) as traffic:
        namespace.apply(canary)
        outcome = canary_outcome(wait_for_status, stable)
    assert traffic.report.errors["timeout"] > 10
    assert outcome["result"] == "RolledBack", outcome["message"]
    assert namespace.get("specdep", "chat")["status"]["analysis"]["verdict"] == "Rollback", outcome["message"]
    assert any(text in outcome["message"].lower() for text in ("first token", "given up", "abandoned")), outcome["message"]


@pytest.mark.usefixtures("inner_operator")
def test_half_speed_rolls_back_canary_within_the_objective(namespace: Namespace, wait_for_status: Wait) -> None:
    host = f"{namespace.name}.example"
    slower = 2 * tokens_per_step(BETTER) / tokens_per_step(RATES)
    document = chat(host, simulator_options(RATES))
    canary = chat(host, simulator_options(BETTER, **{part: slower * value for part, value in STEP_TIME.items()}))
    for item in (document, canary):
        item["spec"]["speculation"]["tuning"]["slo"] = {"timePerOutputToken": "100ms", "timeToFirstToken": "2s"}
    stable, url = start_first_revision(namespace, wait_for_status, document)
    with BackgroundTraffic(TrafficTarget(url, "chat", host, timeout_seconds=60), 8.0, TRAFFIC_CLASSES) as traffic:
        namespace.apply(canary)
        outcome = canary_outcome(wait_for_status, stable)
    assert sum(traffic.report.errors.values()) <= 0.01 * len(traffic.report.outcomes), "only the time is worse"
    assert outcome["result"] == "RolledBack", outcome["message"]
    assert "time per output token" in outcome["message"].lower()
