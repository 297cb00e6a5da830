"""Where the engine of a pod is called: the pod's address and the container port with the engine's port name.

Not guaranteed: that the address still belongs to the pod when it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from aerie.manifests import naming


def find_engine_url(pod: Mapping[str, Any]) -> str | None:
    """Return `http://address:port` of the pod's engine; None while the pod has no address, or where it has no such port."""
    address = (pod.get("status") or {}).get("podIP") or ""
    containers: Iterable[Mapping[str, Any]] = pod["spec"].get("containers") or ()
    engine = next((container for container in containers if container["name"] == naming.ENGINE_CONTAINER), {})
    ports = (port for port in engine.get("ports") or [] if port.get("name") == naming.ENGINE_PORT_NAME)
    port = next((port["containerPort"] for port in ports), None)
    if not address or not port:
        return None
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
