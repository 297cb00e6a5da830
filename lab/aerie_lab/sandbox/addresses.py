"""The addresses inside a lab. They are the same in every lab, because no lab sees another one's network."""

CONTROL_PLANE_IP = "10.245.0.1"
"""What the API server advertises."""
HUB_PORT = 8070
HUB_URL = f"http://{CONTROL_PLANE_IP}:{HUB_PORT}"
"""The lab's Hub, HF_ENDPOINT of containers in namespaces with its label (node/support.py)."""
SERVICE_CIDR = "10.96.0.0/16"
BRIDGE_IP = "10.244.0.1"
"""The pods' way to the rest of the lab; their range is 10.244.0.0/16."""
BRIDGE_MAC = "02:ae:00:00:00:01"
"""Given, not left to the kernel: a bridge without one takes the lowest of its ports', so that it changes when a pod comes or
goes, and every other pod sends to the old one until its neighbour entry expires."""


def node_address(index: int) -> str:
    """Return the address of the node with this index (from 0)."""
    return f"10.245.0.{11 + index}"
