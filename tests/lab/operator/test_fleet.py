"""A fleet of forty whose pods take their time, on a real API server: promoted, also where pods are evicted and a node is lost.

The pods run nothing, and are Ready after a while, as engines that load their model. Nothing is measured on them, so a person has
said beforehand that the canary is to be promoted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from aerie_lab.faults import FaultInjector
from aerie_lab.kube.client import resource_path
from aerie_lab.node.support import PROCESSLESS_ANNOTATION, PROCESSLESS_LOAD_SECONDS_ANNOTATION
from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.conftest import accepted

Object = dict[str, Any]
Light = Callable[..., Object]
FLEET, LOAD, DEADLINE = 40, 4, 60
"""Replicas, seconds to load, and progressDeadline in seconds. A promotion that is judged by its own length has DEADLINE / FLEET
seconds for a pod."""


def resource(light: Light, drafter: str, **spec: Any) -> Object:
    document = light(drafter, replicas=FLEET, rollout={"canary": {"stepWeights": []}, "progressDeadline": f"{DEADLINE}s"}, **spec)
    away = [
        {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        for what in ("not-ready", "unreachable")
    ]
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    document["spec"]["engine"]["podTemplate"] = {
        "metadata": {"annotations": {PROCESSLESS_ANNOTATION: "true", PROCESSLESS_LOAD_SECONDS_ANNOTATION: str(LOAD)}},
        "spec": {
            "terminationGracePeriodSeconds": 5,
            "tolerations": away,
            "topologySpreadConstraints": [{**spread, "labelSelector": {"matchLabels": {"aerie.dev/name": "chat"}}}],
            "containers": [{"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}],
        },
    }
    return document


def ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or []
    return (
        any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)
        and "deletionTimestamp" not in pod["metadata"]
    )


def pods(namespace: Namespace, revision: str) -> list[Object]:
    return namespace.list_all("pods", f"aerie.dev/revision={revision},aerie.dev/control=false")


def status(namespace: Namespace) -> Object:
    return dict(namespace.get("specdep", "chat").get("status") or {})


@pytest.fixture
def serves(namespace: Namespace, light: Light) -> Light:
    """The function that makes the resource; forty pods of its first revision serve."""

    def make(drafter: str) -> Object:
        return accepted(resource(light, drafter))

    namespace.apply(make("eagle3"))
    wait_until(
        lambda: status(namespace).get("phase") == "Ready" and status(namespace)["readyReplicas"] == FLEET,
        "forty serve",
        timeout_seconds=300,
    )
    return make


@pytest.mark.usefixtures("operator")
@pytest.mark.timeout(1500)
def test_forty_pods_that_take_longer_than_the_deadline_all_in_all_are_promoted(namespace: Namespace, serves: Light) -> None:
    began = time.monotonic()
    old = status(namespace)["stable"]["revision"]
    namespace.apply(serves("eagle31"))
    least = FLEET

    def promoted() -> bool:
        nonlocal least
        least = min(least, sum(map(ready, namespace.list_all("pods", "aerie.dev/name=chat"))))
        found = status(namespace)
        assert [each["result"] for each in found["rolloutHistory"]] in (["Promoted"], ["Promoted", "Promoted"])
        return bool(found["stable"]["revision"] != old)

    wait_until(promoted, "it is promoted", timeout_seconds=1200, interval_seconds=1)
    assert time.monotonic() - began > DEADLINE, "longer than a step may stand still"
    assert least >= FLEET - 1, "one look at pods is not of one moment"


@pytest.mark.usefixtures("operator")
@pytest.mark.timeout(1500)
def test_an_evicted_pod_and_a_lost_node_in_the_promotion_take_nothing_back(namespace: Namespace, serves: Light) -> None:
    old = status(namespace)["stable"]["revision"]
    namespace.apply(serves("eagle31"))
    wait_until(
        lambda: (status(namespace).get("canary") or {}).get("readyReplicas", 0) > 5, "it is being promoted", timeout_seconds=600
    )
    new = status(namespace)["canary"]["revision"]
    evicted = [next(filter(ready, pods(namespace, revision)))["metadata"]["name"] for revision in (old, new)]

    async def evict() -> None:
        """What a kubelet does: the pod has failed, and its object stays."""
        said = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}
        async with namespace.lab.client() as client:
            for name in evicted:
                await client.patch(resource_path("v1", "pods", namespace.name) + f"/{name}/status", {"status": said})

    asyncio.run(evict())
    with FaultInjector(namespace.lab).silence_node("node-2"):
        wait_until(
            lambda: status(namespace)["stable"]["revision"] == new,
            "it is promoted",
            timeout_seconds=1200,
            interval_seconds=1,
        )
        assert [each["result"] for each in status(namespace)["rolloutHistory"]] == ["Promoted", "Promoted"]
        wait_until(
            lambda: status(namespace)["readyReplicas"] == FLEET, "all forty serve on the node that is left", timeout_seconds=300
        )
    wait_until(lambda: sum(map(ready, pods(namespace, new))) == FLEET, "and do so when the node is back", timeout_seconds=300)
