"""Canaries that do harm which no comparison of answered requests alone shows: they are rolled back, and the reason names it.

    crashing   its engines end again and again, and serve well in between
    given up   clients leave before it has said a word: of what it never answered there is no latency
    slower     twice the time per output token, within an objective that is five times what it takes

All of them draft better than what serves, so that nothing but the harm speaks against them.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aerie_lab.engine.acceptance import CLASS_ACCEPTANCE
from aerie_lab.engine.background import BackgroundTraffic
from aerie_lab.engine.traffic import TrafficTarget
from aerie_lab.engine.workload import LengthDistribution, TrafficClass
from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.resources import resource
from tests.lab.operator.test_canary import answers

pytestmark = pytest.mark.timeout(1200)
Object = dict[str, Any]
Wait = Callable[..., Object]
PATIENCE = 900.0
"""Seconds for one wait. A minute or two is usual."""
KINDS = (TrafficClass("chat", CLASS_ACCEPTANCE["chat"], LengthDistribution(30, 0.3), LengthDistribution(30, 0.3)),)
"""Short requests: of a second at most, where nothing is amiss."""
RATES, BETTER = [0.6, 0.36, 0.216], [0.8, 0.64, 0.512]
"""Of what serves, and of each canary."""
STEP = {"base_seconds": 0.04, "seconds_per_token": 1e-4}
"""Steps so long that what a busy machine adds to each hardly matters: 19 ms for a token of what serves."""


def engine(rates: list[float], **step: float) -> str:
    """A simulated engine whose drafts are accepted at these rates, with the step time's formula changed."""
    told = {"startup_seconds": 0.5, "step_time": {"formula": STEP | step}, "acceptance": {"chat": {"rates": rates}}}
    return json.dumps(told | {"apply_drafter_effect": False})


def per_step(rates: list[float]) -> float:
    """Tokens of a step."""
    return 1 + sum(rates)


def chat(host: str, simulator: str, *, pods: int = 1, soak: str = "40s") -> Object:
    """Twice as many pods as there are of canary and control each, behind the lab's gateway. It does not stay undecided: after
    ten minutes its canary is rolled back for that, and on a busy machine times are certain later."""
    gateway = {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [host]}
    made = resource(
        "chat",
        simulator=simulator,
        replicas=2 * pods,
        canary={"replicas": pods},
        analysis={"minDuration": soak, "maxDuration": "10m", "onInconclusive": "Rollback"},
        traffic={"mode": "Gateway", "gateway": gateway},
        preflight={"mode": "Off"},
    )
    # An engine that has been killed serves again as soon as it can.
    (container,) = made["spec"]["engine"]["podTemplate"]["spec"]["containers"]
    container |= {
        "startupProbe": {"periodSeconds": 1, "failureThreshold": 600},
        "readinessProbe": {"periodSeconds": 1},
        "lifecycle": {"preStop": {"sleep": {"seconds": 4}}},
    }
    return made


def ended(specdep: Wait, stable: str) -> Object:
    """How the canary has ended."""

    def look(status: Object) -> bool:
        return bool(status["rolloutHistory"][0]["revision"] != stable)

    found: Object = specdep(look, "the canary has ended", PATIENCE)["status"]["rolloutHistory"][0]
    return found


def served(namespace: Namespace, specdep: Wait, document: Object) -> tuple[str, str]:
    """Apply the first revision; the revision, once it serves, and the gateway's address."""
    namespace.apply(document)
    stable = specdep(lambda s: s.get("phase") == "Ready", "it is Ready")["status"]["stable"]["revision"]
    url = namespace.lab.gateway_url or ""
    wait_until(lambda: answers(url, f"{namespace.name}.example"), "the gateway answers")
    return str(stable), url


def canaries(namespace: Namespace, stable: str) -> dict[str, Object]:
    """The canary's pods by name."""
    pods = namespace.list_all("pods", f"aerie.dev/name=chat,aerie.dev/revision!={stable},aerie.dev/control=false")
    return {pod["metadata"]["name"]: pod for pod in pods if not pod["metadata"].get("deletionTimestamp")}


def has_run(pod: Object, seconds: float) -> bool:
    """Whether its engine's process has run for so long, after another one that has ended."""
    (status,) = pod["status"].get("containerStatuses") or [{}]
    began = (status.get("state", {}).get("running") or {}).get("startedAt")
    if not status.get("restartCount") or began is None:
        return False
    return datetime.now(UTC) - datetime.fromisoformat(str(began)) > timedelta(seconds=seconds)


@pytest.mark.usefixtures("inside")
def test_a_canary_whose_engines_end_again_and_again_is_rolled_back(namespace: Namespace, specdep: Wait) -> None:
    """Each of three after every 24 seconds, eight seconds after one another: at any time most of them serve, so that it is no
    crash loop."""
    host = f"{namespace.name}.example"
    stable, url = served(namespace, specdep, chat(host, engine(RATES), pods=3))
    with BackgroundTraffic(TrafficTarget(url, "chat", host, timeout_seconds=60), 12.0, KINDS), contextlib.ExitStack() as faults:
        namespace.apply(chat(host, engine(BETTER), pods=3, soak="75s"))
        specdep(lambda s: s["phase"] == "Analyzing", "it is analyzed", PATIENCE)

        def later(name: str) -> bool:
            pod = canaries(namespace, stable).get(name)
            return pod is None or has_run(pod, 6)

        for name in sorted(canaries(namespace, stable)):
            faults.enter_context(namespace.faults.crash(name, 24, namespace=namespace.name))
            wait_until(functools.partial(later, name), f"{name} has been killed and runs again", timeout_seconds=PATIENCE)
        told = ended(specdep, stable)
    assert told["result"] == "RolledBack", told["message"]
    assert any(words in told["message"].lower() for words in ("processes", "crash")), told["message"]


@pytest.mark.usefixtures("inside")
def test_a_canary_that_clients_do_not_wait_for_is_rolled_back(namespace: Namespace, specdep: Wait) -> None:
    host = f"{namespace.name}.example"
    document, canary = (
        chat(host, engine(RATES)),
        chat(host, engine(BETTER, seconds_per_prompt_token=0.1)),
    )  # three seconds for a prompt
    for each in (document, canary):
        each["spec"]["speculation"]["tuning"]["slo"] = {"timePerOutputToken": "10s", "timeToFirstToken": "1s"}
    stable, url = served(namespace, specdep, document)
    with BackgroundTraffic(TrafficTarget(url, "chat", host, timeout_seconds=2), 6.0, KINDS) as traffic:
        namespace.apply(canary)
        told = ended(specdep, stable)
    assert traffic.report.errors["timeout"] > 10
    assert told["result"] == "RolledBack", told["message"]
    assert namespace.get("specdep", "chat")["status"]["analysis"]["verdict"] == "Rollback", told["message"]
    assert any(words in told["message"].lower() for words in ("first token", "given up", "abandoned")), told["message"]


@pytest.mark.usefixtures("inside")
def test_a_canary_at_half_the_speed_is_rolled_back_however_generous_the_objective(namespace: Namespace, specdep: Wait) -> None:
    host = f"{namespace.name}.example"
    slower = 2 * per_step(BETTER) / per_step(RATES)
    document = chat(host, engine(RATES))
    canary = chat(host, engine(BETTER, **{part: slower * value for part, value in STEP.items()}))
    for each in (document, canary):
        each["spec"]["speculation"]["tuning"]["slo"] = {"timePerOutputToken": "100ms", "timeToFirstToken": "2s"}
    stable, url = served(namespace, specdep, document)
    with BackgroundTraffic(TrafficTarget(url, "chat", host, timeout_seconds=60), 8.0, KINDS) as traffic:
        namespace.apply(canary)
        told = ended(specdep, stable)
    assert sum(traffic.report.errors.values()) <= 0.01 * len(traffic.report.outcomes), "nothing but the time speaks against it"
    assert told["result"] == "RolledBack", told["message"]
    assert "time per output token" in told["message"].lower()
