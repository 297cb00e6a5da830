"""Kopf's watches: every event of a resource, a child or a pod goes into the cache, and nothing else happens here.

    Kopf's watches ─► events ─┐
                              ├─► cache ─► queue of keys
    lists (listing.py) ───────┘

No Kopf index, timer, daemon, finalizer, peering or webhook is used: each of them writes to the user's objects, keeps state of its
own, or both. Kopf provides the watches with their reconnects and bookmarks. The lists are our own (listing.py).

By default Kopf ends the operator when a watch is forbidden (403) or fails (5xx, no answer) for a minute. Here it retries without
end, every half minute. A namespace whose Role was deleted therefore stops no other one, and is watched again when the Role is
back. These attempts are not logged: listing.py meets the same rejections, and reports each once. Not guaranteed: that every error
is survived. One that Kopf does not regard as temporary (404, a kind that the cluster no longer knows) ends the process. The next
process runs without that kind.
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
"""Objects per page of a list of Kopf's, which lists all kinds at the same time and holds what it has read for a while."""


class _EndlessBackoff(Iterable[float]):
    """Delays between the attempts of one call of Kopf's, without an end."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 2.0, 4.0, 8.0, 16.0), itertools.repeat(30.0))


def build_registry(cache: ObjectCache, relist_requested: asyncio.Event) -> kopf.OperatorRegistry:
    """Return handlers that feed the cache, and set `relist_requested` when Kopf has listed instead of watched."""
    registry = kopf.OperatorRegistry()

    async def on_event(event: kopf.RawEvent, **_: Any) -> None:
        item: ObjectDict = dict(event["object"])
        if event["type"] is None:
            relist_requested.set()
        if event["type"] == "DELETED":
            cache.handle_deletion(item)
        else:
            cache.put(item)

    def login(**login_arguments: Any) -> kopf.ConnectionInfo | None:
        connection = kopf.login_with_service_account(**login_arguments)
        if connection is None:
            return kopf.login_with_kubeconfig(**login_arguments)
        # Kopf resolves kubernetes.default.svc by DNS, which may be down or absent. The address in every pod's environment needs
        # no DNS.
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        return dataclasses.replace(connection, server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")

    kopf.on.login(registry=registry)(login)
    for kind in CACHED_KIND_SELECTORS:
        kopf.on.event(*_group_version_plural(kind), registry=registry)(on_event)
    return registry


def _group_version_plural(kind: ResourceKind) -> tuple[str, str, str]:
    """Return group, version and plural."""
    group, _, version = kind.api_version.rpartition("/")
    return group, version, kind.plural


class _NullDiffBaseStorage(kopf.DiffBaseStorage):
    """Storage that disables Kopf's diffs.

    Kopf would compute with each event what has changed since the last one, which is not used.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        pass


class _EphemeralMemories(ResourceMemories):
    """Memories that are dropped after each event.

    Kopf would keep a record of every object while it exists, which event handlers never use.
    """

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
    """Return settings of Kopf that disable everything but the watches."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = _EndlessBackoff()
    settings.watching.chunk_size = _LIST_CHUNK_SIZE
    for kind, selector in CACHED_KIND_SELECTORS.items():
        if selector:
            settings.watching.label_selectors[_group_version_plural(kind)] = selector
    settings.persistence.diffbase_storage = _NullDiffBaseStorage()
    settings.queueing.idle_timeout = 0.001  # until a worker, one per object, releases its last object; 0 would spin
    settings.process.ultimate_exiting_timeout = 10
    return settings


async def run_watches(
    cache: ObjectCache, namespaces: Iterable[str], stop: asyncio.Event, relist_requested: asyncio.Event
) -> None:
    """Feed the cache until `stop` is set. No `namespaces` means all of them."""
    logging.getLogger("kopf._cogs.clients.watching").setLevel(logging.CRITICAL)  # a line for each attempt
    namespace_list = tuple(namespaces)
    await kopf.operator(
        registry=build_registry(cache, relist_requested),
        settings=build_settings(),
        memories=_EphemeralMemories(),
        standalone=True,
        namespaces=namespace_list,
        clusterwide=not namespace_list,
        stop_flag=stop,
    )
