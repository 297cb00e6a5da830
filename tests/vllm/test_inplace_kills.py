"""Kills with SIGKILL during a change of the drafter in place on real vLLM: of the operator, the gateway and the engine.

    Analyzing: operator, gateway, engine ─► Promoting: operator ─► Ready: engine

tests/lab/operator/test_in_place_kills.py has all phases, with simulated engines. This proves what those cannot: a real engine
that ends with another drafter loaded comes back with the one that it should have, before it is Ready.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from aerie.manifests import naming
from aerie_drafter.bundle import find_bundle_path
from aerie_lab.engine.load_generation.background import BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import TrafficTarget
from aerie_lab.errors import LabError
from aerie_lab.testing import Namespace, wait_until
from aerie_vllm.worker_protocol import compute_digest
from tests.lab.operator.in_place_resources import list_engine_pods, read_drafter_states, restart_counts, revision_of, serves_alone
from tests.lab.operator.test_in_place_kills import is_answered
from tests.vllm.test_operator import RESOURCE, START, operated_namespace

pytestmark = pytest.mark.timeout(2400)  # the first test may have to install vLLM
__all__ = ["operated_namespace"]
Object = dict[str, Any]
DRAFTERS = {
    "eagle3": {"repo": "aerie/bundle-eagle3", "revision": "9deb9b2fa945cf67f815f3d47c605a5aa8e6674b"},
    "eagle31": {"repo": "aerie/bundle-eagle31", "revision": "8e9a84344ee5a0f8a7a5f2d5a995ae77ec548e0c"},
}
REQUESTS_PER_SECOND = 3.0


def build_document(drafter: str) -> Object:
    """Return the resource with a drafter; its trial gets no verdict within this test."""
    document: Object = yaml.safe_load(RESOURCE)
    document["spec"]["drafter"]["source"]["huggingFace"] = DRAFTERS[drafter]
    document["spec"]["rollout"]["inPlace"] = {"mode": "Required", "minDuration": "30m"}
    document["spec"]["rollout"]["analysis"] = {"maxDuration": "1h"}
    return document


def compute_bundle_digest(drafter: str) -> str:
    """Return the digest that engines report for a drafter of the bundle."""
    files = {name: (find_bundle_path(drafter) / name).read_bytes() for name in ("config.json", "model.safetensors")}
    return compute_digest({name: hashlib.sha256(content).hexdigest() for name, content in files.items()})


def read_state(namespace: Namespace) -> Object | None:
    """Return what the engine reports of its drafter; None if it does not answer."""
    try:
        return next(iter(read_drafter_states(namespace, "docs").values()), None)
    except LabError:
        return None


def wait_for(condition: Callable[[], object], description: str) -> None:
    wait_until(condition, description, timeout_seconds=START, interval_seconds=0.5)


@pytest.mark.nightly  # tests/unit/rollout/in_place ends operators and engines at any time
@pytest.mark.usefixtures("vllm")
def test_engine_has_the_drafter_that_it_should_have_after_kills(operated_namespace: Namespace) -> None:
    namespace, lab = operated_namespace, operated_namespace.lab
    digests = {drafter: compute_bundle_digest(drafter) for drafter in DRAFTERS}
    target = TrafficTarget(lab.gateway_url or "", "docs", "docs.example.com")

    def read_status() -> Object:
        status: Object = namespace.get("specdep", "docs").get("status") or {}
        return status

    def is_on_trial() -> bool:
        state = read_state(namespace)
        return bool(state and state["lease"] and state["loaded"]["digest"] == digests["eagle31"])

    def kill(container: str, label: str) -> None:
        pods = json.loads(lab.kubectl("get", "pods", "--all-namespaces", "-l", label, "-o", "json"))["items"]
        (pod,) = (pod for pod in pods if not pod["metadata"].get("deletionTimestamp"))
        namespace.faults.kill(pod["metadata"]["name"], container, namespace=pod["metadata"]["namespace"])

    def kill_engine(digest: str) -> None:
        """Kill it, and check that it is not Ready before it serves with the drafter of this digest."""
        (before,) = restart_counts(list_engine_pods(namespace, "docs")).values()
        kill("engine", f"{naming.NAME_LABEL}=docs")

        def is_ready_again() -> bool:
            (pod,) = list_engine_pods(namespace, "docs")
            (restarts,) = restart_counts([pod]).values()
            conditions = {condition["type"]: condition["status"] for condition in pod["status"]["conditions"]}
            return restarts == before + 1 and conditions["Ready"] == "True"

        wait_for(is_ready_again, "the engine is Ready again")
        state = read_state(namespace)
        assert state is not None
        assert state["own"]["digest"] == digest

    namespace.apply(build_document("eagle3"))
    wait_for(lambda: read_status().get("phase") == "Ready", "EAGLE 3 serves")
    (pod,) = list_engine_pods(namespace, "docs")
    wait_for(lambda: is_answered(target), "the route is served")
    with BackgroundTraffic(target, REQUESTS_PER_SECOND):
        namespace.apply(build_document("eagle31"))
        wait_for(lambda: read_status().get("phase") == "Analyzing", "the trial begins")
        seed = read_status()["inPlaceRollout"]["seed"]
        for victim in ("operator", "gateway", "engine"):
            wait_for(is_on_trial, f"EAGLE 3.1 is on trial before a kill of the {victim}")
            match victim:
                case "operator":
                    kill("operator", "app.kubernetes.io/name=aerie")
                case "gateway":
                    kill("envoy", "app=envoy")
                    wait_for(lambda: is_answered(target), "the gateway answers again")
                case "engine":
                    kill_engine(digests["eagle3"])
            assert read_status()["inPlaceRollout"]["seed"] == seed, "the same trial"
        wait_for(is_on_trial, "the trial continues")
        namespace.kubectl("annotate", "specdep", "docs", f"aerie.dev/promote={revision_of(build_document('eagle31'))}")
        wait_for(lambda: read_status()["phase"] != "Analyzing", "the promotion begins")
        kill("operator", "app.kubernetes.io/name=aerie")
        wait_for(lambda: read_status()["phase"] == "Ready" and "inPlaceRollout" not in read_status(), "EAGLE 3.1 is promoted")
        state = read_state(namespace)
        assert state is not None
        assert serves_alone(state, digests["eagle31"])
        kill_engine(digests["eagle31"])
        wait_for(lambda: is_answered(target), "the engine answers")
    status = read_status()
    assert [outcome["result"] for outcome in status["rolloutHistory"]] == ["Promoted", "Promoted"]
    assert status["stable"]["inPlace"]["digest"] == digests["eagle31"]
    assert restart_counts(list_engine_pods(namespace, "docs")) == {pod["metadata"]["uid"]: 2}, "no pod was created"
