"""What a container gets from its pod.

Guarantees: what may change while the container runs comes from a function, which returns its present value.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie_lab.images.table import ImageTable
from aerie_lab.kube.client import KubeObject


@dataclass(frozen=True)
class ContainerContext:
    """A container's inputs from its pod. Callables return what may change."""

    get_pod: Callable[[], KubeObject]
    folder: Path
    hostname: str
    address: str
    network_fd: int | None
    images: ImageTable
    read_environment_inputs: Callable[[KubeObject], Awaitable[dict[str, Any]]]
    """Arguments of `build_environment` from the API: lookup, status, node, and service variables."""
    build_mounts: Callable[[KubeObject, Mapping[str, str]], list[dict[str, Any]]]
    shared_memory: Path
    record_event: Callable[..., None]
    on_state_change: Callable[[], None]
    restart_backoff: float
