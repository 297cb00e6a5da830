"""Kopf, at the edge: every event of a resource, a child or a pod goes into the mirror, and nothing else happens here.

    Kopf's watches ─► events ─┐
                              ├─► mirror ─► queue of keys
    lists (listing.py) ───────┘

No Kopf index, timer, daemon, finalizer, peering or webhook: each of them writes on the user's objects, keeps state of its own,
or both. What Kopf gives is the watching: reconnects, bookmarks. The lists are our own (listing.py).

By itself Kopf ends the operator when a watch is refused (403) or fails (5xx, no answer) for a minute. Here it tries for ever,
each half a minute, so that a namespace whose Role is gone stops no other one and is watched again when it is back. Kopf says
nothing of these attempts: listing.py meets the same refusals, and tells of each once. Not guaranteed: what Kopf takes for no
passing error (a kind that the cluster knows no longer, 404) ends the process, and the next one does without it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import kopf
from kopf._cogs.structs.ephemera import AnyMemo
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory

from aerie.controller.kubernetes.cache import ObjectCache
from aerie.controller.kubernetes.client import ObjectDict, ResourceKind
from aerie.controller.kubernetes.listing import CACHED_KIND_SELECTORS

_LIST_CHUNK_SIZE = 25
"""Objects in one answer to a list of Kopf's, which lists all kinds at the same time and holds what it has read for a while."""


class _EndlessBackoff(Iterable[float]):
    """Pauses between the attempts of one call of Kopf's, without an end."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 2.0, 4.0, 8.0, 16.0), itertools.repeat(30.0))


def build_registry(cache: ObjectCache, relist_requested: asyncio.Event) -> kopf.OperatorRegistry:
    """Handlers that feed the mirror, and say when Kopf has listed instead of watched."""
    handlers = kopf.OperatorRegistry()

    async def on_event(event: kopf.RawEvent, **_: Any) -> None:
        item: ObjectDict = dict(event["object"])
        if event["type"] is None:
            relist_requested.set()
        if event["type"] == "DELETED":
            cache.handle_deletion(item)
        else:
            cache.put(item)

    def login(**given: Any) -> kopf.ConnectionInfo | None:
        found = kopf.login_with_service_account(**given)
        if found is None:
            return kopf.login_with_kubeconfig(**given)
        # Kopf asks DNS for kubernetes.default.svc; the address that every pod is told needs none, which may be down or absent.
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        return dataclasses.replace(found, server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")

    kopf.on.login(registry=handlers)(login)
    for kind in CACHED_KIND_SELECTORS:
        kopf.on.event(*_group_version_plural(kind), registry=handlers)(on_event)
    return handlers


def _group_version_plural(kind: ResourceKind) -> tuple[str, str, str]:
    """Group, version and plural."""
    group, _, version = kind.api_version.rpartition("/")
    return group, version, kind.plural


class _NullDiffBaseStorage(kopf.DiffBaseStorage):
    """Kopf would work out with each event what has changed since the last one; nobody asks it."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        pass


class _EphemeralMemories(ResourceMemories):
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


def build_settings() -> kopf.OperatorSettings:
    """Kopf without all that it would do besides watching."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.peering.standalone = True
    made.scanning.disabled = True
    made.networking.request_timeout = 30
    made.networking.connect_timeout = 10
    made.networking.error_backoffs = _EndlessBackoff()
    made.watching.chunk_size = _LIST_CHUNK_SIZE
    for kind, selector in CACHED_KIND_SELECTORS.items():
        if selector:
            made.watching.label_selectors[_group_version_plural(kind)] = selector
    made.persistence.diffbase_storage = _NullDiffBaseStorage()
    made.queueing.idle_timeout = 0.001  # until a worker, one per object, lets go of the object that it saw last; 0 spins
    made.process.ultimate_exiting_timeout = 10
    return made


async def run_watches(
    cache: ObjectCache, namespaces: Iterable[str], stop: asyncio.Event, relist_requested: asyncio.Event
) -> None:
    """Feed the mirror until `stop` is set. `namespaces` empty: all."""
    logging.getLogger("kopf._cogs.clients.watching").setLevel(logging.CRITICAL)  # a line for each attempt
    listed = tuple(namespaces)
    await kopf.operator(
        registry=build_registry(cache, relist_requested),
        settings=build_settings(),
        memories=_EphemeralMemories(),
        standalone=True,
        namespaces=listed,
        clusterwide=not listed,
        stop_flag=stop,
    )
