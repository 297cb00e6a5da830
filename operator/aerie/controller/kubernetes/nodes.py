"""The labels that tell the hardware of nodes, for decisions on rollouts (rollout/facts/hardware.py).

    plan.nodes ─► those not known, or known for too long ─► GET each by its name, metadata alone ─► labels

Guarantees: a node is asked for by its name and only where a decision names it, so that the right to `get` nodes is enough; at
most `KEPT` nodes are remembered, each for `VALID`. Where the API server refuses, it is left alone for `REFUSED`, and where it
does not answer for `FAILED`; either holds up no pass by more than a few calls, and what was known of a node stays. A refusal is
logged once, until it is over. Not guaranteed: that labels are current; those of a node hardly change.
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
"""Seconds until the labels of a node are asked for again: those of its GPU may come after it."""
FORBIDDEN_RETRY_SECONDS, NODE_ERROR_RETRY_SECONDS = 3600.0, 60.0
MAX_CONCURRENT_NODE_READS = 8
"""Nodes that are asked for at the same time."""


class NodeLabelCache:
    """See the module. To be used from one event loop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._labels: dict[str, dict[str, str]] = {}
        self._valid_until: dict[str, float] = {}
        """Until when each is valid, the oldest first."""
        self._paused_until = 0.0
        self._is_forbidden = False

    @property
    def labels_by_node(self) -> LabelsByNode:
        """By name of the node; none of a node that is not there. A view, that learns too; to be read only."""
        return self._labels

    async def refresh(self, names: Iterable[str]) -> bool:
        """Ask for those of these nodes that are not known; whether anything new has come of it."""
        now = asyncio.get_running_loop().time()
        due = [name for name in names if self._valid_until.get(name, now) <= now]
        changed = False
        for start in range(0, len(due), MAX_CONCURRENT_NODE_READS):
            if asyncio.get_running_loop().time() < self._paused_until:
                break
            changed |= any(await asyncio.gather(*map(self._read_node, due[start : start + MAX_CONCURRENT_NODE_READS])))
        return changed

    async def _read_node(self, name: str) -> bool:
        """Whether another answer came than before."""
        try:
            found = await self._cluster.get_metadata(NODES, None, name)
        except ApiError as error:
            self._handle_error(error)
            return False
        if self._is_forbidden:
            self._is_forbidden = False
            _log.info("nodes may be read now: canary and control on unlike GPUs are noticed")
        told = (found or {}).get("labels") or {}
        labels = {label: str(told[label]) for label in GPU_PRODUCT_LABELS if label in told}
        changed = self._labels.get(name) != labels
        self._labels[name] = labels
        self._valid_until.pop(name, None)
        self._valid_until[name] = asyncio.get_running_loop().time() + NODE_LABELS_TTL_SECONDS
        if len(self._valid_until) > MAX_CACHED_NODES:
            oldest = next(iter(self._valid_until))
            del self._valid_until[oldest], self._labels[oldest]
        return changed

    def _handle_error(self, error: ApiError) -> None:
        refused = error.status in (401, 403)
        self._paused_until = asyncio.get_running_loop().time() + (
            FORBIDDEN_RETRY_SECONDS if refused else NODE_ERROR_RETRY_SECONDS
        )
        if not refused:
            _log.warning("hardware of nodes: %s; again in %.0f s", error, NODE_ERROR_RETRY_SECONDS)
        elif not self._is_forbidden:
            self._is_forbidden = True
            _log.warning(
                "Canary and control on unlike GPUs are not noticed, because the operator may not read nodes: %s. Give its "
                "service account the right to get nodes; the chart does so with rbac.nodes, where `namespaces` is empty.",
                str(error).rstrip("."),
            )
