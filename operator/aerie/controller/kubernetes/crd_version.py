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

from aerie.api.crd import custom_resource_definition
from aerie.api.validation.release_skew import dropped, lacking
from aerie.controller.kubernetes.client import ApiError, Cluster, Kind, Object
from aerie.controller.metrics import Telemetry
from aerie.controller.work_queue import Key

_log = logging.getLogger(__name__)
DEFINITIONS = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions")
CHECK = 300.0
"""Seconds between two looks at the definition."""
VALID = 3600.0
"""Seconds for which it is remembered that a write had no effect."""
_SHOWN = 5


class Versions:
    """See the module. To be used from one event loop."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._lacking: tuple[str, ...] = ()
        self._readable = False
        """Whether the definition has been read, and answers need not tell what it lacks."""
        self._partly: dict[Key, tuple[Object, Object, float]] = {}
        """What was written, what was stored of it, and until when that is remembered."""

    @property
    def trouble(self) -> str:
        """What is amiss with the definition, as a sentence without an end; empty where nothing is."""
        if not self._lacking:
            return ""
        shown = ", ".join(self._lacking[:_SHOWN]) + (" and others" if len(self._lacking) > _SHOWN else "")
        return (
            f"the CustomResourceDefinition is older than the operator, and the API server drops {shown}: apply the definition of "
            "this release (crds/, or the chart's with crds.enabled)"
        )

    async def watch(self, cluster: Cluster) -> None:
        """Look at the definition now and then, until cancelled."""
        name = custom_resource_definition()["metadata"]["name"]
        while True:
            try:
                definition = await cluster.call("GET", DEFINITIONS.path(None, name))
            except ApiError as error:  # with rights in namespaces alone it may not be read
                _log.debug("the CustomResourceDefinition cannot be read: %s", error)
            else:
                self._readable = True
                self._tell(tuple(lacking(definition)))
            await asyncio.sleep(CHECK)

    def answered(self, key: Key, written: Object, stored: Object) -> None:
        """The status of the resource was written."""
        if written == stored:
            self._partly.pop(key, None)
            return
        self._partly[key] = written, stored, asyncio.get_running_loop().time() + VALID
        missing = set(dropped(written, stored)) - set(self._lacking)
        if missing and not self._readable:
            self._tell(tuple(sorted({*self._lacking, *missing})))

    def written(self, key: Key, status: Object, stored: Object) -> bool:
        """Whether this status has been written, and this is what the API server made of it."""
        known = self._partly.get(key)
        return known is not None and known[:2] == (status, stored) and asyncio.get_running_loop().time() < known[2]

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        self._partly.pop(key, None)

    def _tell(self, found: tuple[str, ...]) -> None:
        if found == self._lacking:
            return
        self._lacking = found
        self._partly.clear()
        self._telemetry.fields_dropped(len(found))
        if found:
            _log.error("%s", self.trouble)
        else:
            _log.warning("the CustomResourceDefinition has all fields of this operator now")
