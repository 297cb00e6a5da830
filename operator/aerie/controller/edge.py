"""Kopf, at the edge: every event of a resource or of a child adds the resource's key to the queue, and nothing else.

No Kopf index, timer, daemon, finalizer, peering or webhook: each of them writes on the user's objects, keeps state of its own,
or both. What Kopf gives is the watching: reconnects, bookmarks, namespaces that come and go. Events that a watch missed are
made up for by a list of all resources now and then.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import kopf

from aerie.api import GROUP, PLURAL, VERSION
from aerie.controller.client import RESOURCES, ApiError, Cluster
from aerie.controller.queue import Key, WorkQueue
from aerie.resources import names

_log = logging.getLogger(__name__)
RESYNC = 300.0
"""Seconds between two lists of all resources."""

_WATCHED = (("apps", "v1", "deployments"), ("", "v1", "services"), ("", "v1", "pods"), ("batch", "v1", "jobs"))


def registry(queue: WorkQueue) -> kopf.OperatorRegistry:
    """Handlers that feed the queue."""
    handlers = kopf.OperatorRegistry()

    async def on_resource(namespace: str | None, name: str | None, **_: Any) -> None:
        if namespace and name:
            queue.add(Key(namespace, name))

    async def on_child(namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        name = labels.get(names.NAME) or labels.get(names.PREFLIGHT)
        if namespace and name:
            queue.add(Key(namespace, name))

    def login(**given: Any) -> kopf.ConnectionInfo | None:
        found = kopf.login_with_service_account(**given)
        if found is None:
            return kopf.login_with_kubeconfig(**given)
        # Kopf asks DNS for kubernetes.default.svc; the address that every pod is told needs none, which may be down or absent.
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        return dataclasses.replace(found, server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")

    kopf.on.login(registry=handlers)(login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)(on_resource)
    for group, version, plural in _WATCHED:
        kopf.on.event(group, version, plural, labels={names.MANAGED_BY: names.FIELD_MANAGER}, registry=handlers)(on_child)
    return handlers


def settings() -> kopf.OperatorSettings:
    """Kopf without all that it would do besides watching."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.peering.standalone = True
    made.scanning.disabled = True
    made.networking.request_timeout = 30
    made.networking.connect_timeout = 10
    made.process.ultimate_exiting_timeout = 10
    return made


async def watch(queue: WorkQueue, namespaces: Iterable[str], stop: asyncio.Event, ready: asyncio.Event) -> None:
    """Feed the queue until `stop` is set. `namespaces` empty: all."""
    listed = tuple(namespaces)
    await kopf.operator(
        registry=registry(queue),
        settings=settings(),
        standalone=True,
        namespaces=listed,
        clusterwide=not listed,
        stop_flag=stop,
        ready_flag=ready,
    )


async def resync(cluster: Cluster, queue: WorkQueue, namespaces: Iterable[str]) -> None:
    """Add all resources now and then, until cancelled."""
    listed = tuple(namespaces) or (None,)
    while True:
        for namespace in listed:
            try:
                for item in await cluster.list_all(RESOURCES, namespace):
                    queue.add(Key(item["metadata"]["namespace"], item["metadata"]["name"]))
            except ApiError as error:
                _log.warning("the resources could not be listed: %s", error)
        await asyncio.sleep(RESYNC)
