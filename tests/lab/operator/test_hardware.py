"""A canary on another GPU than its control, by the labels of real nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.resources import resource
from tests.nightly import use_each_nth

LABEL = "nvidia.com/gpu.product"
PRODUCTS = {"node-1": "NVIDIA-H100-80GB-HBM3", "node-2": "NVIDIA-A100-SXM4-80GB"}


@pytest.mark.usefixtures("operator")
def test_canary_on_another_gpu_is_not_compared_by_time(
    namespace: Namespace, wait_for_status: Callable[..., dict[str, Any]]
) -> None:
    for node, product in PRODUCTS.items():
        namespace.kubectl("label", "--overwrite", "node", node, f"{LABEL}={product}")
    try:
        namespace.apply(resource("chat", node="node-1", preflight={"mode": "Off"}))
        wait_for_status(lambda s: s.get("phase") == "Ready", "it is Ready")
        namespace.apply(resource("chat", node="node-2", preflight={"mode": "Off"}))
        status = wait_for_status(lambda s: (s.get("analysis") or {}).get("hardwareMismatch"), "the difference is shown")["status"]
    finally:
        for node in PRODUCTS:
            namespace.kubectl("label", "node", node, f"{LABEL}-")
    difference = f"canary pods run on {PRODUCTS['node-2']} (1 pod), control pods on {PRODUCTS['node-1']} (1 pod)"
    assert status["analysis"]["hardwareMismatch"] == difference
    assert difference in status["analysis"]["message"]


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("node", use_each_nth(2, [*PRODUCTS]))
def test_control_runs_on_gpu_product_of_canary(
    namespace: Namespace, wait_for_status: Callable[..., dict[str, Any]], node: str
) -> None:
    """The stable pods, and so the control, may run on either node; the canary is sent to one of them.

    Gates let the scheduler place the canary's pods first: the control's preference cannot foresee where others must go.
    """
    for name, product in PRODUCTS.items():
        namespace.kubectl("label", "--overwrite", "node", name, f"{LABEL}={product}")
    try:
        namespace.apply(without_node_selector(resource("chat", replicas=2, gated=True, preflight={"mode": "Off"})))
        open_gates(namespace, "aerie.dev/control=false")
        old = wait_for_status(lambda s: s.get("phase") == "Ready", "it is Ready")["status"]["stable"]["revision"]
        canary = resource("chat", replicas=2, node=node, gated=True, preflight={"mode": "Off"}, canary={"replicas": 2})
        namespace.apply(canary)
        selectors = {
            "canary": f"aerie.dev/revision,aerie.dev/revision!={old},aerie.dev/control=false",
            "control": f"aerie.dev/revision={old},aerie.dev/control=true",
        }
        for selector in selectors.values():
            open_gates(namespace, selector)
        wait_for_status(lambda s: s.get("phase") == "WarmingUp" or s.get("analysis"), "canary and control serve")
        arms = {arm: node_names(namespace, selector) for arm, selector in selectors.items()}
        difference = (namespace.get("specdep", "chat")["status"].get("analysis") or {}).get("hardwareMismatch")
    finally:
        for name in PRODUCTS:
            namespace.kubectl("label", "node", name, f"{LABEL}-")
    assert arms == {"canary": [node, node], "control": [node, node]}
    assert not difference


def open_gates(namespace: Namespace, selector: str) -> None:
    """Wait for the two pods of a selector, remove their scheduling gates, and wait until they are on nodes."""
    wait_until(lambda: len(namespace.list_all("pods", selector)) == 2, f"the pods of {selector} are there")
    for pod in namespace.list_all("pods", selector):
        namespace.kubectl("patch", "pod", pod["metadata"]["name"], "--type=merge", '--patch={"spec": {"schedulingGates": null}}')
    wait_until(lambda: all(node_names(namespace, selector)), f"the pods of {selector} are on nodes")


def node_names(namespace: Namespace, selector: str) -> list[str | None]:
    """Return the nodes of a selector's pods."""
    return [pod["spec"].get("nodeName") for pod in namespace.list_all("pods", selector)]


def without_node_selector(document: dict[str, Any]) -> dict[str, Any]:
    """Return the resource without its node selector."""
    del document["spec"]["engine"]["podTemplate"]["spec"]["nodeSelector"]
    return document
