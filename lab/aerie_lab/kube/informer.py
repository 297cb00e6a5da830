"""A local copy of one collection, kept current by list and watch, as client-go's reflector does.

Guarantees: `on_event` receives every object once after each list and once for each later event; an object that vanished
while the watch was down is reported as DELETED after the next list; any failure is retried for ever, with a pause.
Not guaranteed: every intermediate version. Only the latest one counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aerie_lab.errors import KubeError
from aerie_lab.kube.client import KubeClient, KubeObject

ObjectKey = tuple[str, str]
_log = logging.getLogger(__name__)


def object_key(item: KubeObject) -> ObjectKey:
    """(namespace, name)."""
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


class Informer:
    """Follows the collection at `url_path`; `objects` is its content by key."""

    def __init__(self, client: KubeClient, url_path: str, on_event: Callable[[str, KubeObject], None], **selectors: str) -> None:
        self._client = client
        self._url_path = url_path
        self._on_event = on_event
        self._selectors = selectors
        self.objects: dict[ObjectKey, KubeObject] = {}
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                version = await self._relist()
                await self._watch(version)
            except KubeError as error:
                if error.status != 410:
                    _log.warning("%s: %s", self._url_path, error)
                    await asyncio.sleep(0.5)

    async def _relist(self) -> str:
        collection = await self._client.get(self._url_path, **self._selectors)
        kind, version = collection["kind"].removesuffix("List"), collection["apiVersion"]
        current = {object_key(item): {"kind": kind, "apiVersion": version, **item} for item in collection["items"]}
        for key, previous in list(self.objects.items()):
            # Another uid under the same name: the object was deleted and recreated while no watch was open.
            if key not in current or _uid(current[key]) != _uid(previous):
                del self.objects[key]
                self._notify("DELETED", previous)
        for key, item in current.items():
            before = self.objects.get(key)
            self.objects[key] = item
            if before is None or before["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                self._notify("ADDED" if before is None else "MODIFIED", item)
        self.synced.set()
        resource_version: str = collection["metadata"]["resourceVersion"]
        return resource_version

    async def _watch(self, version: str) -> None:
        while True:
            async for kind, item in self._client.watch(self._url_path, version, **self._selectors):
                version = item["metadata"]["resourceVersion"]
                if kind == "DELETED":
                    self.objects.pop(object_key(item), None)
                elif kind != "BOOKMARK":
                    self.objects[object_key(item)] = item
                if kind != "BOOKMARK":
                    self._notify(kind, item)

    def _notify(self, kind: str, item: KubeObject) -> None:
        try:
            self._on_event(kind, item)
        except Exception:  # noqa: BLE001  a defect met with one object must not hide all later ones
            _log.exception("%s %s", self._url_path, object_key(item))


def _uid(item: KubeObject) -> object:
    return item["metadata"].get("uid")
