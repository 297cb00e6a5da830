"""Caches the labels of nodes that identify their hardware, for decisions on rollouts (rollout/facts/hardware.py).

    plan.hardware_nodes ─► nodes that are unknown or expired ─► GET each by its name, metadata alone ─► labels

Guarantees: a node is read by its name, and only when a decision names it, so the right to `get` nodes is enough. At most
`MAX_CACHED_NODES` nodes are cached, each for `NODE_LABELS_TTL_SECONDS`. After a rejection by the API server, no node is read for
`FORBIDDEN_RETRY_SECONDS`, and after any other error for `NODE_ERROR_RETRY_SECONDS`. Either delays a reconcile by a few calls at
most, and cached labels stay. A rejection is logged once until it ends. Not guaranteed: that labels are current; those of a node
hardly change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from aerie.controller.kubernetes.client import ApiError, Cluster, ResourceKind
from aerie.manifests.pod.placement import GPU_PRODUCT_LABELS
from aerie.rollout.facts.hardware import LabelsByNode

_log = logging.getLogger(__name__)
NODES = ResourceKind("v1", "Node", "nodes")
MAX_CACHED_NODES = 4096
NODE_LABELS_TTL_SECONDS = 600.0
"""Seconds until the labels of a node are read again: the labels of its GPU may be added after the node itself."""
FORBIDDEN_RETRY_SECONDS = 3600.0
"""Seconds without reads of nodes after one was forbidden."""
NODE_ERROR_RETRY_SECONDS = 60.0
"""Seconds without reads of nodes after one has failed otherwise."""
MAX_CONCURRENT_NODE_READS = 8
"""Nodes that are read at the same time."""


class NodeLabelCache:
    """Cache of node labels, for use from one event loop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._labels: dict[str, dict[str, str]] = {}
        self._valid_until: dict[str, float] = {}
        """Expiry time of each node's labels, the oldest first."""
        self._paused_until = 0.0
        self._is_forbidden = False

    @property
    def labels_by_node(self) -> LabelsByNode:
        """Labels by name of the node; none for a node that does not exist.

        A live view of the cache, which must not be changed.
        """
        return self._labels

    async def refresh(self, names: Iterable[str]) -> bool:
        """Read those of these nodes that are unknown or expired, and return True if any labels have changed."""
        now = asyncio.get_running_loop().time()
        due = [name for name in names if self._valid_until.get(name, now) <= now]
        changed = False
        for start in range(0, len(due), MAX_CONCURRENT_NODE_READS):
            if asyncio.get_running_loop().time() < self._paused_until:
                break
            changed |= any(await asyncio.gather(*map(self._read_node, due[start : start + MAX_CONCURRENT_NODE_READS])))
        return changed

    async def _read_node(self, name: str) -> bool:
        """Read the node, and return True if its labels have changed."""
        try:
            metadata = await self._cluster.get_metadata(NODES, None, name)
        except ApiError as error:
            self._handle_error(error)
            return False
        if self._is_forbidden:
            self._is_forbidden = False
            _log.info("nodes can be read now: different GPUs of canary and control are detected")
        node_labels = (metadata or {}).get("labels") or {}
        labels = {label: str(node_labels[label]) for label in GPU_PRODUCT_LABELS if label in node_labels}
        changed = self._labels.get(name) != labels
        self._labels[name] = labels
        self._valid_until.pop(name, None)
        self._valid_until[name] = asyncio.get_running_loop().time() + NODE_LABELS_TTL_SECONDS
        if len(self._valid_until) > MAX_CACHED_NODES:
            oldest = next(iter(self._valid_until))
            del self._valid_until[oldest], self._labels[oldest]
        return changed

    def _handle_error(self, error: ApiError) -> None:
        is_forbidden = error.status in (401, 403)
        self._paused_until = asyncio.get_running_loop().time() + (
            FORBIDDEN_RETRY_SECONDS if is_forbidden else NODE_ERROR_RETRY_SECONDS
        )
        if not is_forbidden:
            _log.warning("labels of nodes cannot be read: %s; retrying in %.0f s", error, NODE_ERROR_RETRY_SECONDS)
        elif not self._is_forbidden:
            self._is_forbidden = True
            _log.warning(
                "different GPUs of canary and control are not detected, because the operator may not read nodes: %s. Grant its "
                "service account the right to get nodes; the chart does so with rbac.nodes, where `namespaces` is empty.",
                str(error).rstrip("."),
            )
