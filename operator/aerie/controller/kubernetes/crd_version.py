"""Whether the cluster's CustomResourceDefinition is older than the operator, and writes that have no effect because it is.

    the definition, where it may be read ────┐
                                             ├─► fields that the API server drops ─► log, metric, condition Degraded
    else what a write was answered with ─────┘
    a status that was written, and what of it was stored ─► the same status is not written again

Guarantees: a status of which the API server stores only a part is written once, and not with each look; after an hour once more,
because a newer definition may have come. What is missing is told once for each change.
"""

from __future__ import annotations

import asyncio
import logging

from aerie.api.crd import build_custom_resource_definition
from aerie.api.validation.release_skew import find_dropped_fields, find_missing_crd_fields
from aerie.controller.kubernetes.client import ApiError, Cluster, ObjectDict, ResourceKind
from aerie.controller.metrics import OperatorMetrics
from aerie.controller.work_queue import NamespacedName

_log = logging.getLogger(__name__)
CUSTOM_RESOURCE_DEFINITIONS = ResourceKind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions")
CRD_CHECK_INTERVAL_SECONDS = 300.0
"""Seconds between two looks at the definition."""
PARTIAL_WRITE_TTL_SECONDS = 3600.0
"""Seconds for which it is remembered that a write had no effect."""
_MAX_LISTED_FIELDS = 5


class CrdVersionMonitor:
    """See the module. To be used from one event loop."""

    def __init__(self, metrics: OperatorMetrics) -> None:
        self._metrics = metrics
        self._missing_fields: tuple[str, ...] = ()
        self._is_readable = False
        """Whether the definition has been read, and answers need not tell what it lacks."""
        self._partial_writes: dict[NamespacedName, tuple[ObjectDict, ObjectDict, float]] = {}
        """What was written, what was stored of it, and until when that is remembered."""

    @property
    def problem(self) -> str:
        """What is amiss with the definition, as a sentence without an end; empty where nothing is."""
        if not self._missing_fields:
            return ""
        shown = ", ".join(self._missing_fields[:_MAX_LISTED_FIELDS]) + (
            " and others" if len(self._missing_fields) > _MAX_LISTED_FIELDS else ""
        )
        return (
            f"the CustomResourceDefinition is older than the operator, and the API server drops {shown}: apply the definition of "
            "this release (crds/, or the chart's with crds.enabled)"
        )

    async def run(self, cluster: Cluster) -> None:
        """Look at the definition now and then, until cancelled."""
        name = build_custom_resource_definition()["metadata"]["name"]
        while True:
            try:
                definition = await cluster.request("GET", CUSTOM_RESOURCE_DEFINITIONS.path(None, name))
            except ApiError as error:  # with rights in namespaces alone it may not be read
                _log.debug("the CustomResourceDefinition cannot be read: %s", error)
            else:
                self._is_readable = True
                self._report_missing_fields(tuple(find_missing_crd_fields(definition)))
            await asyncio.sleep(CRD_CHECK_INTERVAL_SECONDS)

    def record_write(self, key: NamespacedName, written: ObjectDict, stored: ObjectDict) -> None:
        """The status of the resource was written."""
        if written == stored:
            self._partial_writes.pop(key, None)
            return
        self._partial_writes[key] = written, stored, asyncio.get_running_loop().time() + PARTIAL_WRITE_TTL_SECONDS
        missing = set(find_dropped_fields(written, stored)) - set(self._missing_fields)
        if missing and not self._is_readable:
            self._report_missing_fields(tuple(sorted({*self._missing_fields, *missing})))

    def is_partial_write(self, key: NamespacedName, status: ObjectDict, stored: ObjectDict) -> bool:
        """Whether this status has been written, and this is what the API server made of it."""
        known = self._partial_writes.get(key)
        return known is not None and known[:2] == (status, stored) and asyncio.get_running_loop().time() < known[2]

    def forget(self, key: NamespacedName) -> None:
        """The resource is gone."""
        self._partial_writes.pop(key, None)

    def _report_missing_fields(self, missing_fields: tuple[str, ...]) -> None:
        if missing_fields == self._missing_fields:
            return
        self._missing_fields = missing_fields
        self._partial_writes.clear()
        self._metrics.set_dropped_field_count(len(missing_fields))
        if missing_fields:
            _log.error("%s", self.problem)
        else:
            _log.warning("the CustomResourceDefinition has all fields of this operator now")
