"""The node agent's Events, so that `kubectl describe` shows what it shows with a kubelet.

Guarantees: a repeat of the same event within ten minutes raises the count of the first one instead of adding an object;
recording never delays or fails the caller. Not guaranteed: that every event arrives when the API server is away.
"""

from __future__ import annotations

import asyncio
import logging
import time

from aerie_lab.errors import KubeError
from aerie_lab.kube.client import KubeClient, KubeObject, core_path
from aerie_lab.node.status import format_timestamp

_log = logging.getLogger(__name__)
_EVENT_MERGE_SECONDS = 600.0
_MAX_QUEUED_EVENTS = 5000


class EventRecorder:
    """Writes events one after the other from a bounded backlog."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._queue: asyncio.Queue[tuple[KubeObject, str, str, str, str, float]] = asyncio.Queue(_MAX_QUEUED_EVENTS)
        self._recent_events: dict[tuple[str, str, str], tuple[str, int, float]] = {}

    def record(
        self, involved_object: KubeObject, reason: str, message: str, *, warning: bool = False, container: str = ""
    ) -> None:
        """Record an event about a pod or a node."""
        kind = "Warning" if warning else "Normal"
        try:
            self._queue.put_nowait((involved_object, kind, reason, message[:1000], container, time.time()))
        except asyncio.QueueFull:
            _log.warning("event dropped: %s %s", reason, message)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            about, kind, reason, message, container, moment = await self._queue.get()
            try:
                await self._write(about, kind, reason, message, container, moment)
            except KubeError as error:
                _log.info("event not written: %s: %s", reason, error)
            except Exception:  # noqa: BLE001  one event that cannot be written must not silence the others
                _log.exception("event not written: %s", reason)

    async def _write(
        self, involved_object: KubeObject, kind: str, reason: str, message: str, container: str, moment: float
    ) -> None:
        metadata = involved_object["metadata"]
        namespace = metadata.get("namespace", "default")
        key = (metadata["uid"], reason, container + message)
        recent = self._recent_events.get(key)
        if recent and moment - recent[2] < _EVENT_MERGE_SECONDS:
            name, count, _ = recent
            self._recent_events[key] = (name, count + 1, moment)
            try:
                await self._client.patch(
                    core_path("events", namespace, name), {"count": count + 1, "lastTimestamp": format_timestamp(moment)}
                )
                return
            except KubeError as error:
                if error.status != 404:
                    raise
        if len(self._recent_events) > 10_000:
            self._recent_events = {k: v for k, v in self._recent_events.items() if moment - v[2] < _EVENT_MERGE_SECONDS}
        name = f"{metadata['name']}.{time.time_ns():x}"
        reference = {
            "apiVersion": involved_object.get("apiVersion", "v1"),
            "kind": involved_object["kind"],
            "name": metadata["name"],
            "namespace": metadata.get("namespace", ""),
            "uid": metadata["uid"],
        }
        if container:
            init = any(c["name"] == container for c in involved_object["spec"].get("initContainers") or [])
            reference["fieldPath"] = f"spec.{'initContainers' if init else 'containers'}{{{container}}}"
        await self._client.create(
            core_path("events", namespace),
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": namespace},
                "involvedObject": reference,
                "type": kind,
                "reason": reason,
                "message": message,
                "source": {"component": "kubelet", "host": (involved_object.get("spec") or {}).get("nodeName", metadata["name"])},
                "firstTimestamp": format_timestamp(moment),
                "lastTimestamp": format_timestamp(moment),
                "count": 1,
            },
        )
        self._recent_events[key] = (name, 1, moment)
