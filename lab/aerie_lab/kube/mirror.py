"""A local copy of one collection, kept current by list and watch, as client-go's reflector does.

Guarantees: `on_change` sees every object once after each list and once for each later event; an object that vanished
while the watch was down is reported as DELETED after the next list; any failure is retried for ever, with a pause.
Not guaranteed: every intermediate version. Only the latest one counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aerie_lab.errors import KubeError
from aerie_lab.kube.client import KubeClient, Object

Key = tuple[str, str]
_log = logging.getLogger(__name__)


def key_of(item: Object) -> Key:
    """(namespace, name)."""
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


class Mirror:
    """Follows the collection at `where`; `objects` is its content by key."""

    def __init__(self, client: KubeClient, where: str, on_change: Callable[[str, Object], None], **selectors: str) -> None:
        self._client = client
        self._where = where
        self._on_change = on_change
        self._selectors = selectors
        self.objects: dict[Key, Object] = {}
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                version = await self._list()
                await self._follow(version)
            except KubeError as error:
                if error.status != 410:
                    _log.warning("%s: %s", self._where, error)
                    await asyncio.sleep(0.5)

    async def _list(self) -> str:
        found = await self._client.get(self._where, **self._selectors)
        kind, version = found["kind"].removesuffix("List"), found["apiVersion"]
        current = {key_of(item): {"kind": kind, "apiVersion": version, **item} for item in found["items"]}
        for key, known in list(self.objects.items()):
            # Another uid under the same name: the one was deleted and the other made while nobody watched.
            if key not in current or _uid(current[key]) != _uid(known):
                del self.objects[key]
                self._tell("DELETED", known)
        for key, item in current.items():
            before = self.objects.get(key)
            self.objects[key] = item
            if before is None or before["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                self._tell("ADDED" if before is None else "MODIFIED", item)
        self.synced.set()
        resource_version: str = found["metadata"]["resourceVersion"]
        return resource_version

    async def _follow(self, version: str) -> None:
        while True:
            async for kind, item in self._client.watch(self._where, version, **self._selectors):
                version = item["metadata"]["resourceVersion"]
                if kind == "DELETED":
                    self.objects.pop(key_of(item), None)
                elif kind != "BOOKMARK":
                    self.objects[key_of(item)] = item
                if kind != "BOOKMARK":
                    self._tell(kind, item)

    def _tell(self, kind: str, item: Object) -> None:
        try:
            self._on_change(kind, item)
        except Exception:  # noqa: BLE001  a defect met with one object must not hide all later ones
            _log.exception("%s %s", self._where, key_of(item))


def _uid(item: Object) -> object:
    return item["metadata"].get("uid")
