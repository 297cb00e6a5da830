"""The node agent's Events, so that `kubectl describe` tells what a kubelet would tell.

Guarantees: a repeat of the same event within ten minutes raises the count of the first one instead of adding an object;
telling never delays or fails what is told about. Not guaranteed: that every event arrives when the API server is away.
"""

from __future__ import annotations

import asyncio
import logging
import time

from aerie_lab.errors import KubeError
from aerie_lab.kube.client import KubeClient, Object, core
from aerie_lab.node.status import timestamp

_log = logging.getLogger(__name__)
_SAME = 600.0
_BACKLOG = 5000


class EventRecorder:
    """Writes events one after the other from a bounded backlog."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._queue: asyncio.Queue[tuple[Object, str, str, str, str, float]] = asyncio.Queue(_BACKLOG)
        self._known: dict[tuple[str, str, str], tuple[str, int, float]] = {}

    def tell(self, about: Object, reason: str, message: str, *, warning: bool = False, container: str = "") -> None:
        """Record an event about a pod or a node."""
        kind = "Warning" if warning else "Normal"
        try:
            self._queue.put_nowait((about, kind, reason, message[:1000], container, time.time()))
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

    async def _write(self, about: Object, kind: str, reason: str, message: str, container: str, moment: float) -> None:
        metadata = about["metadata"]
        namespace = metadata.get("namespace", "default")
        key = (metadata["uid"], reason, container + message)
        known = self._known.get(key)
        if known and moment - known[2] < _SAME:
            name, count, _ = known
            self._known[key] = (name, count + 1, moment)
            try:
                await self._client.patch(
                    core("events", namespace, name), {"count": count + 1, "lastTimestamp": timestamp(moment)}
                )
                return
            except KubeError as error:
                if error.status != 404:
                    raise
        if len(self._known) > 10_000:
            self._known = {k: v for k, v in self._known.items() if moment - v[2] < _SAME}
        name = f"{metadata['name']}.{time.time_ns():x}"
        reference = {
            "apiVersion": about.get("apiVersion", "v1"),
            "kind": about["kind"],
            "name": metadata["name"],
            "namespace": metadata.get("namespace", ""),
            "uid": metadata["uid"],
        }
        if container:
            init = any(c["name"] == container for c in about["spec"].get("initContainers") or [])
            reference["fieldPath"] = f"spec.{'initContainers' if init else 'containers'}{{{container}}}"
        await self._client.create(
            core("events", namespace),
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": namespace},
                "involvedObject": reference,
                "type": kind,
                "reason": reason,
                "message": message,
                "source": {"component": "kubelet", "host": (about.get("spec") or {}).get("nodeName", metadata["name"])},
                "firstTimestamp": timestamp(moment),
                "lastTimestamp": timestamp(moment),
                "count": 1,
            },
        )
        self._known[key] = (name, 1, moment)
