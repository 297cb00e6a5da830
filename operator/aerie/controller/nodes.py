"""The labels that tell the hardware of nodes, for decisions on rollouts (rollout/hardware.py).

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

from aerie.controller.client import ApiError, Cluster, Kind
from aerie.resources.placement import LABELS
from aerie.rollout.hardware import Nodes

_log = logging.getLogger(__name__)
NODES = Kind("v1", "Node", "nodes")
KEPT = 4096
VALID = 600.0
"""Seconds until the labels of a node are asked for again: those of its GPU may come after it."""
REFUSED, FAILED = 3600.0, 60.0
AT_ONCE = 8
"""Nodes that are asked for at the same time."""


class NodeLabels:
    """See the module. To be used from one event loop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._labels: dict[str, dict[str, str]] = {}
        self._until: dict[str, float] = {}
        """Until when each is valid, the oldest first."""
        self._paused_until = 0.0
        self._refused = False

    @property
    def known(self) -> Nodes:
        """By name of the node; none of a node that is not there. A view, that learns too; to be read only."""
        return self._labels

    async def learn(self, names: Iterable[str]) -> bool:
        """Ask for those of these nodes that are not known; whether anything new has come of it."""
        now = asyncio.get_running_loop().time()
        due = [name for name in names if self._until.get(name, now) <= now]
        changed = False
        for start in range(0, len(due), AT_ONCE):
            if asyncio.get_running_loop().time() < self._paused_until:
                break
            changed |= any(await asyncio.gather(*map(self._ask, due[start : start + AT_ONCE])))
        return changed

    async def _ask(self, name: str) -> bool:
        """Whether another answer came than before."""
        try:
            found = await self._cluster.metadata(NODES, None, name)
        except ApiError as error:
            self._failed(error)
            return False
        if self._refused:
            self._refused = False
            _log.info("nodes may be read now: canary and control on unlike GPUs are noticed")
        told = (found or {}).get("labels") or {}
        labels = {label: str(told[label]) for label in LABELS if label in told}
        changed = self._labels.get(name) != labels
        self._labels[name] = labels
        self._until.pop(name, None)
        self._until[name] = asyncio.get_running_loop().time() + VALID
        if len(self._until) > KEPT:
            oldest = next(iter(self._until))
            del self._until[oldest], self._labels[oldest]
        return changed

    def _failed(self, error: ApiError) -> None:
        refused = error.status in (401, 403)
        self._paused_until = asyncio.get_running_loop().time() + (REFUSED if refused else FAILED)
        if not refused:
            _log.warning("hardware of nodes: %s; again in %.0f s", error, FAILED)
        elif not self._refused:
            self._refused = True
            _log.warning(
                "Canary and control on unlike GPUs are not noticed, because the operator may not read nodes: %s. Give its "
                "service account the right to get nodes; the chart does so with rbac.nodes, where `namespaces` is empty.",
                str(error).rstrip("."),
            )
