"""The nodes that the agent simulates: their status, and that their leases are renewed."""

from __future__ import annotations

import json

from aerie_lab.cluster import Lab
from aerie_lab.testing import wait_until
from aerie_lab.testing.pods import Object, read_condition_status


def read_node(lab: Lab, name: str) -> Object:
    node_object: Object = json.loads(lab.kubectl("get", "node", name, "-o", "json"))
    return node_object


def test_a_node_registers_with_the_capacity_of_the_settings(lab: Lab) -> None:
    registered_node = read_node(lab, "node-1")
    for field in ("capacity", "allocatable"):
        assert {"cpu": "32", "memory": "256Gi", "nvidia.com/gpu": "8", "pods": "250"}.items() <= registered_node["status"][
            field
        ].items()
    assert read_condition_status(registered_node, "Ready") == "True"
    assert read_condition_status(registered_node, "MemoryPressure") == "False"
    assert registered_node["metadata"]["labels"]["kubernetes.io/hostname"] == "node-1"
    assert {a["type"] for a in registered_node["status"]["addresses"]} == {"InternalIP", "Hostname"}
    assert registered_node["status"]["nodeInfo"]["kubeletVersion"].startswith("v1.36.")


def test_leases_are_renewed(lab: Lab) -> None:
    def renewals() -> dict[str, str]:
        leases = json.loads(lab.kubectl("get", "leases", "-n", "kube-node-lease", "-o", "json"))["items"]
        return {lease["metadata"]["name"]: lease["spec"]["renewTime"] for lease in leases}

    before = renewals()
    assert before.keys() == {"node-1", "node-2"}
    wait_until(
        lambda: all(renewals()[name] > moment for name, moment in before.items()), "both leases renewed", interval_seconds=0.5
    )


def test_a_node_marked_as_lost_becomes_ready_again(lab: Lab) -> None:
    lost = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
    patch = json.dumps({"status": {"conditions": lost}})
    lab.kubectl("patch", "node", "node-2", "--subresource=status", "--type=strategic", "-p", patch)
    current_node: Object = {}

    def is_healthy() -> bool:
        nonlocal current_node
        current_node = read_node(lab, "node-2")
        return read_condition_status(current_node, "Ready") == "True" and not current_node["spec"].get("taints")

    wait_until(is_healthy, "node-2 Ready and without taints")
