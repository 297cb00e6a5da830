"""A canary on another GPU than its control, by the labels of real nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aerie_lab.testing import Namespace
from tests.lab.operator.resources import resource

LABEL = "nvidia.com/gpu.product"
PRODUCTS = {"node-1": "NVIDIA-H100-80GB-HBM3", "node-2": "NVIDIA-A100-SXM4-80GB"}


@pytest.mark.usefixtures("operator")
def test_a_canary_on_another_gpu_is_not_compared_by_time(namespace: Namespace, specdep: Callable[..., dict[str, Any]]) -> None:
    for node, product in PRODUCTS.items():
        namespace.kubectl("label", "--overwrite", "node", node, f"{LABEL}={product}")
    try:
        namespace.apply(resource("chat", node="node-1", preflight={"mode": "Off"}))
        specdep(lambda s: s.get("phase") == "Ready", "it is Ready")
        namespace.apply(resource("chat", node="node-2", preflight={"mode": "Off"}))
        status = specdep(lambda s: (s.get("analysis") or {}).get("unlike"), "the GPUs are noticed")["status"]
    finally:
        for node in PRODUCTS:
            namespace.kubectl("label", "node", node, f"{LABEL}-")
    said = f"the canary's pods run on {PRODUCTS['node-2']} (1 pod), the control's on {PRODUCTS['node-1']} (1 pod)"
    assert status["analysis"]["unlike"] == said
    assert f"Latency is not compared: {said}" in status["analysis"]["reason"]
