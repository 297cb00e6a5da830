"""A fleet of forty slowly starting pods on a real API server: it is promoted, also if pods are evicted and a node is lost.

The pods run nothing, and are Ready after a delay, like engines that load their model. Nothing is measured on them, so the canary
has a manual promotion.
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
from tests.lab.operator.conftest import with_manual_promotion

Object = dict[str, Any]
ResourceFactory = Callable[..., Object]
FLEET, LOAD, DEADLINE = 40, 4, 60
"""Replicas, seconds to load, and progressDeadline in seconds. If the deadline applied to the whole promotion, each pod would have
DEADLINE / FLEET seconds."""


def resource(processless_resource: ResourceFactory, drafter: str, **spec: Any) -> Object:
    document = processless_resource(
        drafter, replicas=FLEET, rollout={"canary": {"stepWeights": []}, "progressDeadline": f"{DEADLINE}s"}, **spec
    )
    tolerations = [
        {"key": f"node.kubernetes.io/{condition}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        for condition in ("not-ready", "unreachable")
    ]
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    document["spec"]["engine"]["podTemplate"] = {
        "metadata": {"annotations": {PROCESSLESS_ANNOTATION: "true", PROCESSLESS_LOAD_SECONDS_ANNOTATION: str(LOAD)}},
        "spec": {
            "terminationGracePeriodSeconds": 5,
            "tolerations": tolerations,
            "topologySpreadConstraints": [{**spread, "labelSelector": {"matchLabels": {"aerie.dev/name": "chat"}}}],
            "containers": [{"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}],
        },
    }
    return document


def is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or []
    return (
        any((condition["type"], condition["status"]) == ("Ready", "True") for condition in conditions)
        and "deletionTimestamp" not in pod["metadata"]
    )


def pods(namespace: Namespace, revision: str) -> list[Object]:
    return namespace.list_all("pods", f"aerie.dev/revision={revision},aerie.dev/control=false")


def status(namespace: Namespace) -> Object:
    return dict(namespace.get("specdep", "chat").get("status") or {})


@pytest.fixture
def serving_fleet(namespace: Namespace, processless_resource: ResourceFactory) -> ResourceFactory:
    """A function that builds the resource; forty pods of its first revision serve."""

    def build(drafter: str) -> Object:
        return with_manual_promotion(resource(processless_resource, drafter))

    namespace.apply(build("eagle3"))
    wait_until(
        lambda: status(namespace).get("phase") == "Ready" and status(namespace)["readyReplicas"] == FLEET,
        "forty serve",
        timeout_seconds=300,
    )
    return build


@pytest.mark.usefixtures("operator")
@pytest.mark.timeout(1500)
@pytest.mark.nightly  # tests/unit/rollout/test_fleet_size.py has slow promotions of many sizes
def test_slow_promotion_of_forty_pods_passes_the_deadline(namespace: Namespace, serving_fleet: ResourceFactory) -> None:
    began = time.monotonic()
    old = status(namespace)["stable"]["revision"]
    namespace.apply(serving_fleet("eagle31"))
    min_ready = FLEET

    def promoted() -> bool:
        nonlocal min_ready
        min_ready = min(min_ready, sum(map(is_ready, namespace.list_all("pods", "aerie.dev/name=chat"))))
        current = status(namespace)
        assert [record["result"] for record in current["rolloutHistory"]] in (["Promoted"], ["Promoted", "Promoted"])
        return bool(current["stable"]["revision"] != old)

    wait_until(promoted, "it is promoted", timeout_seconds=1200, interval_seconds=1)
    assert time.monotonic() - began > DEADLINE, "longer than a step may stand still"
    assert min_ready >= FLEET - 1, "a list of pods is not of one moment"


@pytest.mark.nightly  # tests/unit/rollout/test_fleet_size.py has evicted pods and lost nodes
@pytest.mark.usefixtures("operator")
@pytest.mark.timeout(1500)
def test_evicted_pod_and_lost_node_do_not_roll_back_promotion(namespace: Namespace, serving_fleet: ResourceFactory) -> None:
    old = status(namespace)["stable"]["revision"]
    namespace.apply(serving_fleet("eagle31"))
    wait_until(
        lambda: (status(namespace).get("canary") or {}).get("readyReplicas", 0) > 5, "it is being promoted", timeout_seconds=600
    )
    new = status(namespace)["canary"]["revision"]

    async def evict(revision: str) -> bool:
        """Evict a pod like a kubelet: it has failed, and its object stays. Raises KubeError if the promotion deletes it first."""
        name = next(filter(is_ready, pods(namespace, revision)))["metadata"]["name"]
        failed_status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}
        async with namespace.lab.client() as client:
            await client.patch(resource_path("v1", "pods", namespace.name) + f"/{name}/status", {"status": failed_status})
        return True

    # Each try chooses a pod again.
    wait_until(lambda: asyncio.run(evict(old)), "an old pod is evicted")
    wait_until(lambda: asyncio.run(evict(new)), "a new pod is evicted")
    with FaultInjector(namespace.lab).silence_node("node-2"):
        wait_until(
            lambda: status(namespace)["stable"]["revision"] == new,
            "it is promoted",
            timeout_seconds=1200,
            interval_seconds=1,
        )
        assert [record["result"] for record in status(namespace)["rolloutHistory"]] == ["Promoted", "Promoted"]
        wait_until(
            lambda: status(namespace)["readyReplicas"] == FLEET, "all forty serve on the remaining node", timeout_seconds=300
        )
    wait_until(lambda: sum(map(is_ready, pods(namespace, new))) == FLEET, "and do so when the node is back", timeout_seconds=300)
