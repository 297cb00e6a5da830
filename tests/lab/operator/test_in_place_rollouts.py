"""Rollouts in place on a real API server, with simulated engines: from a changed spec to the drafter that all pods serve with.

    better    is promoted: no pod is created or restarted, and pods that start later come to the drafter before they are Ready;
              then the spec returns to the drafter of the Deployment
    worse     is rolled back
    unfit     goes by pods in mode Auto, and fails in mode Required

All of them at once in one namespace, since they wait for windows most of the time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from aerie.manifests import naming
from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.in_place_resources import (
    compute_model_digest,
    create_model_claim,
    list_engine_pods,
    read_drafter_states,
    resource,
    restart_counts,
    revision_of,
    serves_alone,
)
from tests.lab.operator.test_operator import is_ready

pytestmark = pytest.mark.timeout(1500)
Object = dict[str, Any]
TIMEOUT_SECONDS = 600.0
"""Maximum for one wait. Two minutes are usual."""
MEASURED_SECONDS = 15
"""Seconds of requests after which the windows of a trial follow from them."""


@pytest.fixture
def models(namespace: Namespace, tmp_path: Path) -> Iterator[Path]:
    """The folder behind a claim with the models."""
    with create_model_claim(namespace, tmp_path / "models"):
        yield tmp_path / "models"


def wait_for(namespace: Namespace, name: str, condition: Callable[[Object], object], description: str) -> Object:
    """Wait until the status of a resource satisfies a condition; return the status."""

    def is_satisfied(item: Object) -> object:
        return condition(item.get("status") or {})

    status: Object = namespace.wait_until(
        "specdep", name, is_satisfied, f"{name}: {description}", timeout_seconds=TIMEOUT_SECONDS
    )["status"]
    return status


def find_condition(item: Object, kind: str) -> Object:
    """Return a condition of a status; empty if it has none."""
    return next((condition for condition in item.get("conditions") or [] if condition["type"] == kind), {})


def is_measured(namespace: Namespace, name: str) -> bool:
    """Return whether all pods of a resource have had requests for long enough."""
    pods = list_engine_pods(namespace, name)
    times = [find_condition(pod["status"], "Ready").get("lastTransitionTime") for pod in pods]
    latest = datetime.now(UTC) - timedelta(seconds=MEASURED_SECONDS)
    return bool(times) and all(time is not None and datetime.fromisoformat(time) < latest for time in times)


def wait_for_event(namespace: Namespace, name: str, kind: str, text: str) -> None:
    """Wait for an event of this type with the text in its reason and message; events are posted after the status."""

    def find_events() -> list[str]:
        return [
            f"{event['reason']}: {event['message']}"
            for event in namespace.list_all("events")
            if (event["involvedObject"]["kind"], event["involvedObject"]["name"]) == ("SpeculativeDeployment", name)
            and event["type"] == kind
        ]

    wait_until(lambda: any(text in event for event in find_events()), f"{name} has the event {kind} {text}")


def find_expected_drafter(namespace: Namespace, name: str, revision: str) -> Object | None:
    """Return the data of the ConfigMap by which new pods come to a drafter; None if there is none."""
    config_map = naming.expected_drafter_config_map_name(name, revision)
    return namespace.get("configmap", config_map)["data"] if namespace.exists("configmap", config_map) else None


@pytest.mark.usefixtures("inner_operator")
def test_rollouts_in_place(namespace: Namespace, models: Path) -> None:
    old, new = (compute_model_digest(models, name) for name in ("eagle3", "better"))
    documents = {
        "better": resource("better", "eagle3", replicas=2, in_place={"pods": 2}),
        "worse": resource("worse", "eagle3"),
        "auto": resource("auto", "eagle3"),
        "required": resource("required", "eagle3", in_place={"mode": "Required"}),
    }
    namespace.apply(*documents.values())
    stable = {name: wait_for(namespace, name, is_ready, "it is Ready")["stable"]["revision"] for name in documents}
    for name in documents:
        wait_until(lambda name=name: is_measured(namespace, name), f"{name} has had requests", timeout_seconds=TIMEOUT_SECONDS)  # type: ignore[misc]
    before = {name: restart_counts(list_engine_pods(namespace, name)) for name in documents}

    changed = {
        "better": resource("better", "better", replicas=2, in_place={"pods": 2}),
        "worse": resource("worse", "worse"),
        "auto": resource("auto", "unfit"),
        "required": resource("required", "unfit", in_place={"mode": "Required"}),
    }
    namespace.apply(*changed.values())

    status = wait_for(namespace, "better", lambda s: s["phase"] == "Analyzing", "it is on trial")
    assert status["inPlaceRollout"]["revision"] == revision_of(changed["better"])
    assert "canary" not in status
    heading, row = namespace.kubectl("get", "specdep", "better", "-o", "wide").splitlines()
    start = heading.index("IN-PLACE")
    assert row[start:].split()[0] == "models/better"
    description = namespace.kubectl("describe", "specdep", "better")
    names = {pod["metadata"]["name"] for pod in list_engine_pods(namespace, "better")}
    assert all(name in description for name in names), "the pods on trial are named"

    # A drafter that does not fit.
    status = wait_for(namespace, "auto", lambda s: s.get("canary"), "it goes by pods")
    assert re.search(r"by pods: .*rms_norm_eps", status["canary"]["change"]), status["canary"]["change"]
    wait_for_event(namespace, "auto", "Normal", "Not in place: ")  # its condition may have moved on with the canary
    status = wait_for(namespace, "required", lambda s: s["phase"] == "Failed", "it fails")
    assert "rms_norm_eps" in find_condition(status, "Progressing")["message"]
    wait_for_event(namespace, "required", "Warning", "InPlaceImpossible: ")
    assert restart_counts(list_engine_pods(namespace, "required")) == before["required"]
    assert len(namespace.list_all("deployments", f"{naming.NAME_LABEL}=required")) == 1
    namespace.kubectl("delete", "specdep", "auto", "required", "--wait=false")

    # A worse one.
    status = wait_for(namespace, "worse", lambda s: s["phase"] == "RolledBack", "it is rolled back")
    assert status["rolloutHistory"][0]["result"] == "RolledBack"
    assert "tokens per step" in status["rolloutHistory"][0]["message"]
    assert (status["stable"]["revision"], "inPlace" in status["stable"]) == (stable["worse"], False)
    assert all(serves_alone(state, old) for state in read_drafter_states(namespace, "worse").values())
    assert restart_counts(list_engine_pods(namespace, "worse")) == before["worse"]
    assert find_expected_drafter(namespace, "worse", stable["worse"]) is None
    wait_for_event(namespace, "worse", "Warning", "RolledBack: ")

    # A better one.
    status = wait_for(namespace, "better", lambda s: s["phase"] == "Ready" and s["stable"].get("inPlace"), "it is promoted")
    assert status["stable"]["revision"] == stable["better"], "the pods' Deployment stays"
    assert status["stable"]["inPlace"]["revision"] == revision_of(changed["better"])
    assert status["stable"]["inPlace"]["digest"] == new
    assert status["stable"]["drafter"].endswith("/better"), status["stable"]["drafter"]
    assert "inPlaceRollout" not in status
    assert status["rolloutHistory"][0]["result"] == "Promoted"
    assert restart_counts(list_engine_pods(namespace, "better")) == before["better"]
    assert all(serves_alone(state, new) for state in read_drafter_states(namespace, "better").values())
    expected = find_expected_drafter(namespace, "better", stable["better"])
    assert expected is not None
    assert new in json.dumps(expected)
    for reason in ("Staging", "Analyzing", "Promoting", "Promoted", "Complete"):
        wait_for_event(namespace, "better", "Normal", f"{reason}: ")

    # Pods that start now.
    (oldest, *_) = list_engine_pods(namespace, "better")
    scaled = resource("better", "better", replicas=3, in_place={"pods": 2})
    namespace.apply(scaled)
    namespace.kubectl("delete", "pod", oldest["metadata"]["name"], "--wait=false")

    def find_new_pods() -> list[Object]:
        pods = [pod for pod in list_engine_pods(namespace, "better") if pod["metadata"]["uid"] not in before["better"]]
        return (
            pods if len(pods) == 2 and all(find_condition(pod["status"], "Ready").get("status") == "True" for pod in pods) else []
        )

    started = wait_until(find_new_pods, "two new pods are Ready", timeout_seconds=TIMEOUT_SECONDS)
    states = read_drafter_states(namespace, "better", started)
    for pod in started:
        state = states[pod["metadata"]["name"]]
        assert serves_alone(state, new), state
        ready_at = datetime.fromisoformat(find_condition(pod["status"], "Ready")["lastTransitionTime"]).timestamp()
        assert state["since"] < ready_at + 1, "it had the drafter before it was Ready; the API server has whole seconds"

    # The return to the first drafter.
    wait_until(lambda: is_measured(namespace, "better"), "it has had requests", timeout_seconds=TIMEOUT_SECONDS)
    restarts_before = restart_counts(list_engine_pods(namespace, "better"))
    back = resource("better", "eagle3", replicas=3, in_place={"pods": 2})
    promote = {"aerie.dev/promote": revision_of(back)}
    namespace.apply({**back, "metadata": {"name": "better", "annotations": promote}})
    status = wait_for(
        namespace, "better", lambda s: s["phase"] == "Ready" and s["stable"]["inPlace"]["digest"] == old, "it is promoted again"
    )
    assert status["stable"]["revision"] == status["stable"]["inPlace"]["revision"] == stable["better"]
    assert all(serves_alone(state, old) for state in read_drafter_states(namespace, "better").values())
    assert restart_counts(list_engine_pods(namespace, "better")) == restarts_before
    assert old in json.dumps(find_expected_drafter(namespace, "better", stable["better"]))
