"""Pods as tests write them: little to type, everything else as the API server's defaults have it.

pod("hello", shell("echo hello"), restartPolicy="Never")
"""

from __future__ import annotations

import json
from typing import Any

from aerie_lab.errors import LabError

Object = dict[str, Any]


def pod(name: str, *containers: Object, metadata: Object | None = None, **spec: Any) -> Object:
    """Return a pod that ends without a grace period unless `spec` overrides it; a container without a name is `main`."""
    spec = {"terminationGracePeriodSeconds": 0, **spec}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}, **(metadata or {})},
        "spec": {"containers": [{"name": "main", **container} for container in containers], **spec},
    }


def shell(script: str, **fields: Any) -> Object:
    """Return a container that runs a script of the machine's sh."""
    return {"image": "aerie.dev/lab/shell", "command": ["sh", "-ec", script], **fields}


def python(script: str, **fields: Any) -> Object:
    """Return a container that runs a script of the lab's Python."""
    return {"image": "aerie.dev/lab/shell", "command": ["python", "-u", "-c", script], **fields}


def echo(**fields: Any) -> Object:
    """Return a container of the small HTTP server of aerie_lab.images.echo, on port 8080."""
    return {"image": "aerie.dev/lab/echo:1", **fields}


def config_map(name: str, **data: str) -> Object:
    """Return a config map."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def find_container_status(item: Object, name: str = "main") -> Object:
    """Return the status of one container of a pod, init containers included. Raises LabError where none was written yet."""
    status = item["status"]
    for container_status in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        if container_status["name"] == name:
            result: Object = container_status
            return result
    raise LabError(f"container {name} has no status yet")


def read_termination_message(item: Object, name: str = "main") -> str:
    """Return the termination message of a container that has ended."""
    text: str = find_container_status(item, name)["state"]["terminated"].get("message", "")
    return text


def read_termination_json(item: Object, name: str = "main") -> Any:
    """Return the termination message, read as JSON."""
    return json.loads(read_termination_message(item, name))


def read_condition_status(item: Object, condition_type: str) -> str:
    """Return the status of a condition, or ''."""
    return next((str(c["status"]) for c in item["status"].get("conditions", []) if c["type"] == condition_type), "")
