"""Kopf, at the edge: every event of a resource, a child or a pod goes into the mirror, and nothing else happens here.

    Kopf's watches ─► events ─┐
                              ├─► mirror ─► queue of keys
    lists, page by page ──────┘

No Kopf index, timer, daemon, finalizer, peering or webhook: each of them writes on the user's objects, keeps state of its own,
or both. What Kopf gives is the watching: reconnects, bookmarks, namespaces that come and go.

Kopf tells nothing of an object that was deleted while it had no watch (after a 410 it lists anew, and what is not in the list it
never mentions). So lists of our own fill the mirror: once before the first pass, soon after each time that Kopf has listed, and
now and then anyhow, when each resource is looked at too, whatever is known of it.

Where the cluster does not know a kind (HTTPRoute without the Gateway API), there are none of it. A kind that comes while the
operator runs is listed from then on, and watched after its next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import kopf
from kopf._cogs.structs.ephemera import AnyMemo
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory

from aerie.controller.client import CHILDREN, PAGE, PODS, RESOURCES, ApiError, Cluster, Kind, Object
from aerie.controller.mirror import Mirror
from aerie.controller.queue import WorkQueue
from aerie.resources import names

_log = logging.getLogger(__name__)
RESYNC = 300.0
"""Seconds between two lists of everything, when nothing calls for one earlier."""
SETTLE = 10.0
"""Seconds from a list of Kopf's to one of ours: its other watches will have listed too."""
RETRY = 5.0
"""Seconds after a list that failed."""

MIRRORED: Mapping[Kind, str] = {RESOURCES: "", **dict.fromkeys(CHILDREN, names.NAME), PODS: names.REVISION}
"""What is watched, with the label that tells our own: pods of engines bear the resource's name in another label than those of
preflight Jobs, and both bear a revision."""


def registry(mirror: Mirror, relisted: asyncio.Event) -> kopf.OperatorRegistry:
    """Handlers that feed the mirror, and say when Kopf has listed instead of watched."""
    handlers = kopf.OperatorRegistry()

    async def on_event(event: kopf.RawEvent, **_: Any) -> None:
        item: Object = dict(event["object"])
        if event["type"] is None:
            relisted.set()
        if event["type"] == "DELETED":
            mirror.deleted(item)
        else:
            mirror.put(item)

    def login(**given: Any) -> kopf.ConnectionInfo | None:
        found = kopf.login_with_service_account(**given)
        if found is None:
            return kopf.login_with_kubeconfig(**given)
        # Kopf asks DNS for kubernetes.default.svc; the address that every pod is told needs none, which may be down or absent.
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        return dataclasses.replace(found, server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")

    kopf.on.login(registry=handlers)(login)
    for kind in MIRRORED:
        kopf.on.event(*_address(kind), registry=handlers)(on_event)
    return handlers


def _address(kind: Kind) -> tuple[str, str, str]:
    """Group, version and plural."""
    group, _, version = kind.api_version.rpartition("/")
    return group, version, kind.plural


class _NoMemory(kopf.DiffBaseStorage):
    """Kopf would work out with each event what has changed since the last one; nobody asks it."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        pass


class _NoMemories(ResourceMemories):
    """Kopf would keep a record of every object for as long as it is there; for handlers of events nothing is ever in it."""

    async def recall(
        self,
        raw_body: kopf.RawBody,
        *,
        memobase: AnyMemo | None = None,
        noticed_by_listing: bool = False,
        ephemeral: bool = True,  # noqa: ARG002 - always
    ) -> ResourceMemory:
        return await super().recall(raw_body, memobase=memobase, noticed_by_listing=noticed_by_listing, ephemeral=True)


def settings() -> kopf.OperatorSettings:
    """Kopf without all that it would do besides watching."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.peering.standalone = True
    made.scanning.disabled = True
    made.networking.request_timeout = 30
    made.networking.connect_timeout = 10
    made.watching.chunk_size = PAGE
    for kind, selector in MIRRORED.items():
        if selector:
            made.watching.label_selectors[_address(kind)] = selector
    made.persistence.diffbase_storage = _NoMemory()
    made.queueing.idle_timeout = 0.1  # until a worker, one per object, lets go of the object that it saw last
    made.process.ultimate_exiting_timeout = 10
    return made


async def watch(mirror: Mirror, namespaces: Iterable[str], stop: asyncio.Event, relisted: asyncio.Event) -> None:
    """Feed the mirror until `stop` is set. `namespaces` empty: all."""
    listed = tuple(namespaces)
    await kopf.operator(
        registry=registry(mirror, relisted),
        settings=settings(),
        memories=_NoMemories(),
        standalone=True,
        namespaces=listed,
        clusterwide=not listed,
        stop_flag=stop,
    )


async def fill(cluster: Cluster, mirror: Mirror, namespaces: Iterable[str]) -> None:
    """List everything into the mirror; what is not listed any more leaves it. Raises ApiError."""
    for namespace in tuple(namespaces) or (None,):
        for kind, selector in MIRRORED.items():
            listing = mirror.listing(kind, namespace)
            version: str | None = None
            async for page, version in cluster.pages(kind, namespace, selector):  # noqa: B007 - all pages are of one version
                for item in page:
                    listing.add((item,))
                    await asyncio.sleep(0)
            listing.end(version)


async def resync(
    cluster: Cluster,
    mirror: Mirror,
    queue: WorkQueue,
    namespaces: Iterable[str],
    filled: asyncio.Event,
    relisted: asyncio.Event,
) -> None:
    """Fill the mirror, set `filled`, and fill it again now and then, until cancelled."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        relisted.clear()
        try:
            await fill(cluster, mirror, namespaces)
        except ApiError as error:
            _log.warning("not everything could be listed, which is tried again in %g s: %s", RETRY, error)
            await asyncio.sleep(RETRY)
            continue
        filled.set()
        if loop.time() >= due:
            due = loop.time() + RESYNC
            for key in mirror.resources():
                queue.add(key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due):
                await relisted.wait()
                await asyncio.sleep(SETTLE)
