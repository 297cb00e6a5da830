"""Gathers what there is about one resource, for the core to decide on: out of the mirror for nothing, or live.

Live, everything is read from the API server itself, and the mirror hears of it. From the mirror, what is not mirrored is missing:
objects of somebody else that bear the name of a child, the last lines of crashed containers, and why a Job has no pod. Where
those matter, the decision differs from what is written already, and is therefore made again on what was read live.

Guarantee: before an object is made, whatever its kind, its name is asked for (`strangers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aerie.controller.kubernetes.cache import Mirror
from aerie.controller.kubernetes.client import BY_KIND, CHILDREN, PODS, ApiError, Cluster, Kind, Object
from aerie.controller.kubernetes.job_events import refusals
from aerie.controller.work_queue import Key
from aerie.manifests import naming
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.last_valid_spec import read_resource
from aerie.rollout.facts.snapshot import Observed, labels, owned
from aerie.rollout.revision.preflight_result import without_pod

_LINES = 8
_CHARACTERS = 1200


def recall(mirror: Mirror, document: Object) -> Observed:
    """What the mirror holds of the resource `document`. Raises ResourceError."""
    belongings = mirror.belonging(_key(document))
    group = [item for item in belongings if item["kind"] == PODS.kind]
    children = tuple(item for item in belongings if item["kind"] != PODS.kind)
    resource, substitute = read_resource(document, children)
    return Observed(
        resource=resource,
        substitute=substitute,
        children=children,
        pods=tuple(pod for pod in group if naming.NAME in labels(pod)),
        preflight_pods=tuple(pod for pod in group if naming.NAME not in labels(pod)),
    )


async def observe(cluster: Cluster, mirror: Mirror, document: Object, skipped: Collection[str] = ()) -> Observed:
    """Everything that belongs to the resource `document`, live, but for the kinds to skip. Raises ApiError, ResourceError.

    It is listed into the mirror, which then holds what the lists say, or what was heard since; of most objects it has known that.
    """
    key = _key(document)
    mine = f"{naming.NAME}={key.name}"
    await asyncio.gather(
        *(_list(cluster, mirror, key, kind, mine) for kind in CHILDREN if kind.kind not in skipped),
        _list(cluster, mirror, key, PODS, mine, f"{naming.PREFLIGHT}={key.name}"),
    )
    found = recall(mirror, document)
    return replace(
        found,
        last_lines=await _last_lines(cluster, key.namespace, found.pods),
        refusals=await refusals(cluster, key.namespace, without_pod(found)),
    )


async def strangers(cluster: Cluster, observed: Observed, items: Sequence[Object]) -> tuple[Object, ...]:
    """Of the objects that are about to be made, those whose names somebody else's objects bear. Raises ApiError."""
    metadata = observed.resource.metadata
    new = [item for item in items if observed.child(item["kind"], item["metadata"]["name"]) is None]
    gets = (cluster.get(BY_KIND[item["kind"]], item["metadata"]["namespace"], item["metadata"]["name"]) for item in new)
    return tuple(item for item in await asyncio.gather(*gets) if item is not None and not owned(item, metadata.uid))


async def _list(cluster: Cluster, mirror: Mirror, key: Key, kind: Kind, *selectors: str) -> None:
    listing = mirror.listing(kind, of=key)
    versions = []
    for selector in selectors:
        version: str | None = None
        async for page, version in cluster.pages(kind, key.namespace, selector):  # noqa: B007 - that of the last page counts
            listing.add(page)
        versions.append(version)
    # Of several lists, the first is the one after which something may have been missed.
    listing.end(versions[0])


def _key(document: Object) -> Key:
    return Key(document["metadata"]["namespace"], document["metadata"]["name"])


async def _last_lines(cluster: Cluster, namespace: str, engines: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    """What crashed containers wrote last, from the run that ended."""
    found: dict[str, str] = {}
    for pod in engines:
        container = pod_failures.crashed(pod)
        if container is not None and len(found) < 2:  # one sentence is shown
            name = pod["metadata"]["name"]
            found[name] = await _tail(cluster, pod, namespace, name, container)
    return found


async def _tail(cluster: Cluster, pod: Mapping[str, Any], namespace: str, name: str, container: str) -> str:
    statuses: list[dict[str, Any]] = pod["status"].get("containerStatuses") or []
    restarted = any(one["name"] == container and one.get("restartCount") for one in statuses)
    try:
        text = await cluster.log(namespace, name, container, previous=restarted, lines=_LINES)
    except ApiError:
        return ""  # gone with the container; the exit status still tells something
    return text[-_CHARACTERS:]
