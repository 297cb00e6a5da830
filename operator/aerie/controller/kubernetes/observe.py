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

from aerie.controller.kubernetes.cache import ObjectCache
from aerie.controller.kubernetes.client import (
    CHILD_KINDS,
    PODS,
    RESOURCE_KIND_BY_NAME,
    ApiError,
    Cluster,
    ObjectDict,
    ResourceKind,
)
from aerie.controller.kubernetes.job_events import read_pod_creation_errors
from aerie.controller.work_queue import NamespacedName
from aerie.manifests import naming
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.last_valid_spec import read_resource
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by, read_labels
from aerie.rollout.revision.preflight_result import find_jobs_without_pod

_MAX_LOG_LINES = 8
_MAX_LOG_CHARACTERS = 1200


def read_cached_snapshot(cache: ObjectCache, document: ObjectDict) -> Snapshot:
    """What the mirror holds of the resource `document`. Raises ResourceError."""
    belongings = cache.list_owned_objects(_resource_key(document))
    group = [item for item in belongings if item["kind"] == PODS.kind]
    children = tuple(item for item in belongings if item["kind"] != PODS.kind)
    resource, substitute = read_resource(document, children)
    return Snapshot(
        resource=resource,
        spec_substitution=substitute,
        children=children,
        pods=tuple(pod for pod in group if naming.NAME_LABEL in read_labels(pod)),
        preflight_pods=tuple(pod for pod in group if naming.NAME_LABEL not in read_labels(pod)),
    )


async def read_live_snapshot(
    cluster: Cluster, cache: ObjectCache, document: ObjectDict, skipped_kinds: Collection[str] = ()
) -> Snapshot:
    """Everything that belongs to the resource `document`, live, but for the kinds to skip. Raises ApiError, ResourceError.

    It is listed into the mirror, which then holds what the lists say, or what was heard since; of most objects it has known that.
    """
    key = _resource_key(document)
    mine = f"{naming.NAME_LABEL}={key.name}"
    await asyncio.gather(
        *(_list_into_cache(cluster, cache, key, kind, mine) for kind in CHILD_KINDS if kind.kind not in skipped_kinds),
        _list_into_cache(cluster, cache, key, PODS, mine, f"{naming.PREFLIGHT_LABEL}={key.name}"),
    )
    found = read_cached_snapshot(cache, document)
    return replace(
        found,
        last_log_lines=await _read_crash_logs(cluster, key.namespace, found.pods),
        job_creation_errors=await read_pod_creation_errors(cluster, key.namespace, find_jobs_without_pod(found)),
    )


async def find_name_conflicts(
    cluster: Cluster, snapshot: Snapshot, desired_objects: Sequence[ObjectDict]
) -> tuple[ObjectDict, ...]:
    """Of the objects that are about to be made, those whose names somebody else's objects bear. Raises ApiError."""
    metadata = snapshot.resource.metadata
    new = [item for item in desired_objects if snapshot.child(item["kind"], item["metadata"]["name"]) is None]
    gets = (
        cluster.get(RESOURCE_KIND_BY_NAME[item["kind"]], item["metadata"]["namespace"], item["metadata"]["name"]) for item in new
    )
    return tuple(item for item in await asyncio.gather(*gets) if item is not None and not is_owned_by(item, metadata.uid))


async def _list_into_cache(
    cluster: Cluster, cache: ObjectCache, key: NamespacedName, kind: ResourceKind, *selectors: str
) -> None:
    listing = cache.start_relist(kind, owner=key)
    versions = []
    for selector in selectors:
        version: str | None = None
        async for page, version in cluster.list_pages(kind, key.namespace, selector):  # noqa: B007 - that of the last page counts
            listing.add(page)
        versions.append(version)
    # Of several lists, the first is the one after which something may have been missed.
    listing.end(versions[0])


def _resource_key(document: ObjectDict) -> NamespacedName:
    return NamespacedName(document["metadata"]["namespace"], document["metadata"]["name"])


async def _read_crash_logs(cluster: Cluster, namespace: str, engine_pods: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    """What crashed containers wrote last, from the run that ended."""
    found: dict[str, str] = {}
    for pod in engine_pods:
        container = pod_failures.find_crashed_container(pod)
        if container is not None and len(found) < 2:  # one sentence is shown
            name = pod["metadata"]["name"]
            found[name] = await _read_log_tail(cluster, pod, namespace, name, container)
    return found


async def _read_log_tail(cluster: Cluster, pod: Mapping[str, Any], namespace: str, name: str, container: str) -> str:
    statuses: list[dict[str, Any]] = pod["status"].get("containerStatuses") or []
    restarted = any(one["name"] == container and one.get("restartCount") for one in statuses)
    try:
        text = await cluster.read_log(namespace, name, container, previous=restarted, lines=_MAX_LOG_LINES)
    except ApiError:
        return ""  # gone with the container; the exit status still tells something
    return text[-_MAX_LOG_CHARACTERS:]
