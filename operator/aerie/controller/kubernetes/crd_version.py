"""Detects a CustomResourceDefinition that is older than the operator, and writes that have no effect because of it.

    the definition, where it may be read ────┐
                                             ├─► fields that the API server drops ─► log, metric, condition Degraded
    else the answers to status writes ───────┘
    a status that was written, and the part of it that was stored ─► the same status is not written again

Guarantees: a status that the API server stores only in part is written once, and not in each reconcile. It is written again after
an hour, because a newer definition may have been installed. Missing fields are reported once per change.
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
"""Seconds between two checks of the definition."""
PARTIAL_WRITE_TTL_SECONDS = 3600.0
"""Seconds after which a write that was stored in part may be repeated."""
_MAX_LISTED_FIELDS = 5


class CrdVersionMonitor:
    """Monitor of the installed definition, for use from one event loop."""

    def __init__(self, metrics: OperatorMetrics) -> None:
        self._metrics = metrics
        self._missing_fields: tuple[str, ...] = ()
        self._is_readable = False
        """True when the definition has been read, so that the answers to writes are not needed to find missing fields."""
        self._partial_writes: dict[NamespacedName, tuple[ObjectDict, ObjectDict, float]] = {}
        """Per resource: the status that was written, the status that was stored, and the time until which this record
        is valid.
        """

    @property
    def problem(self) -> str:
        """Problem with the definition, as a sentence without a period; empty when there is none."""
        if not self._missing_fields:
            return ""
        names = ", ".join(self._missing_fields[:_MAX_LISTED_FIELDS]) + (
            " and others" if len(self._missing_fields) > _MAX_LISTED_FIELDS else ""
        )
        return (
            f"the CustomResourceDefinition is older than the operator, and the API server drops {names}: apply the definition of "
            "this release (crds/, or the chart's with crds.enabled)"
        )

    async def run(self, cluster: Cluster) -> None:
        """Check the definition periodically until cancelled."""
        name = build_custom_resource_definition()["metadata"]["name"]
        while True:
            try:
                definition = await cluster.request("GET", CUSTOM_RESOURCE_DEFINITIONS.path(None, name))
            except ApiError as error:  # not readable with rights in namespaces alone
                _log.debug("the CustomResourceDefinition cannot be read: %s", error)
            else:
                self._is_readable = True
                self._report_missing_fields(tuple(find_missing_crd_fields(definition)))
            await asyncio.sleep(CRD_CHECK_INTERVAL_SECONDS)

    def record_write(self, key: NamespacedName, written: ObjectDict, stored: ObjectDict) -> None:
        """Record that the status of the resource was written, and what was stored of it."""
        if written == stored:
            self._partial_writes.pop(key, None)
            return
        self._partial_writes[key] = written, stored, asyncio.get_running_loop().time() + PARTIAL_WRITE_TTL_SECONDS
        missing = set(find_dropped_fields(written, stored)) - set(self._missing_fields)
        if missing and not self._is_readable:
            self._report_missing_fields(tuple(sorted({*self._missing_fields, *missing})))

    def is_partial_write(self, key: NamespacedName, status: ObjectDict, stored: ObjectDict) -> bool:
        """Return True when this status has been written before, and `stored` is what the API server stored of it."""
        partial_write = self._partial_writes.get(key)
        return (
            partial_write is not None
            and partial_write[:2] == (status, stored)
            and asyncio.get_running_loop().time() < partial_write[2]
        )

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted."""
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
            _log.warning("the CustomResourceDefinition now has all fields of this operator")
