"""What a pod gets from the agent: its node, and the objects that all pods share.

Guarantees: the same objects for the agent's whole life. Not guaranteed: that they are in step; the mirror of the Services lags.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aerie_lab.images.table import ImageTable
from aerie_lab.kube.client import KubeClient
from aerie_lab.kube.informer import Informer
from aerie_lab.node.events import EventRecorder
from aerie_lab.sandbox.network import PodNetworks


@dataclass(frozen=True)
class Node:
    """The node of a pod, as far as the pod needs it."""

    name: str
    address: str
    allocatable: Mapping[str, str]


@dataclass(frozen=True)
class AgentContext:
    """Objects that all pods of the agent share."""

    client: KubeClient
    networks: PodNetworks
    network_lock: asyncio.Lock
    """Held while a pod network is made or removed: one at a time."""
    images: ImageTable
    services: Informer
    events: EventRecorder
    folder: Path
    restart_backoff: float
