"""Builds the snapshot of one resource for the decision on it: from the cache without a call, or live.

A live snapshot is read from the API server and updates the cache. A cached snapshot lacks what the cache does not hold: objects
of another owner that have a child's name, the last log lines of crashed containers, and why a Job has no pod. Where one of these
matters, the decision differs from what is written already, and is therefore made again on a live snapshot.

Guarantee: before an object of any kind is created, its name is looked up (`find_name_conflicts`).
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
from aerie.rollout.facts.snapshot import ClusterState, Snapshot, is_owned_by, read_labels
from aerie.rollout.revision.preflight_result import find_jobs_without_pod

_MAX_LOG_LINES = 8
_MAX_LOG_CHARACTERS = 1200


def read_cached_snapshot(cache: ObjectCache, document: ObjectDict) -> Snapshot:
    """Return the snapshot of the resource `document` from the cache. Raises ResourceError."""
    owned_objects = cache.list_owned_objects(_resource_key(document))
    pods = [item for item in owned_objects if item["kind"] == PODS.kind]
    children = tuple(item for item in owned_objects if item["kind"] != PODS.kind)
    resource, substitute = read_resource(document, children)
    state = ClusterState(
        resource.metadata.name,
        children=children,
        pods=tuple(pod for pod in pods if naming.NAME_LABEL in read_labels(pod)),
        preflight_pods=tuple(pod for pod in pods if naming.NAME_LABEL not in read_labels(pod)),
    )
    return Snapshot(resource, state, spec_substitution=substitute)


async def read_live_snapshot(
    cluster: Cluster, cache: ObjectCache, document: ObjectDict, skipped_kinds: Collection[str] = ()
) -> Snapshot:
    """Return the snapshot of the resource `document`, read live except for the kinds to skip. Raises ApiError, ResourceError.

    The objects are listed into the cache, which then holds the listed versions or newer ones. Most of them it held already.
    """
    key = _resource_key(document)
    selector = f"{naming.NAME_LABEL}={key.name}"
    await asyncio.gather(
        *(_list_into_cache(cluster, cache, key, kind, selector) for kind in CHILD_KINDS if kind.kind not in skipped_kinds),
        _list_into_cache(cluster, cache, key, PODS, selector, f"{naming.PREFLIGHT_LABEL}={key.name}"),
    )
    snapshot = read_cached_snapshot(cache, document)
    state = replace(
        snapshot.cluster,
        last_log_lines=await _read_crash_logs(cluster, key.namespace, snapshot.cluster.pods),
        job_creation_errors=await read_pod_creation_errors(cluster, key.namespace, find_jobs_without_pod(snapshot.cluster)),
    )
    return replace(snapshot, cluster=state)


async def find_name_conflicts(
    cluster: Cluster, snapshot: Snapshot, desired_objects: Sequence[ObjectDict]
) -> tuple[ObjectDict, ...]:
    """Return the existing objects of other owners that have the name of an object to be created. Raises ApiError."""
    metadata = snapshot.resource.metadata
    new_objects = [item for item in desired_objects if snapshot.cluster.child(item["kind"], item["metadata"]["name"]) is None]
    gets = (
        cluster.get(RESOURCE_KIND_BY_NAME[item["kind"]], item["metadata"]["namespace"], item["metadata"]["name"])
        for item in new_objects
    )
    return tuple(item for item in await asyncio.gather(*gets) if item is not None and not is_owned_by(item, metadata.uid))


async def _list_into_cache(
    cluster: Cluster, cache: ObjectCache, key: NamespacedName, kind: ResourceKind, *selectors: str
) -> None:
    relist = cache.start_relist(kind, owner=key)
    versions = []
    for selector in selectors:
        version: str | None = None
        async for page, version in cluster.list_pages(kind, key.namespace, selector):  # noqa: B007 - that of the last page counts
            relist.add(page)
        versions.append(version)
    # Of several lists, the version of the first one counts: a change after it may be missing.
    relist.end(versions[0])


def _resource_key(document: ObjectDict) -> NamespacedName:
    return NamespacedName(document["metadata"]["namespace"], document["metadata"]["name"])


async def _read_crash_logs(cluster: Cluster, namespace: str, engine_pods: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    """Return the last log lines of crashed containers, from the run that ended, by name of the pod."""
    log_lines: dict[str, str] = {}
    for pod in engine_pods:
        container = pod_failures.find_crashed_container(pod)
        if container is not None and len(log_lines) < 2:  # one message is shown
            name = pod["metadata"]["name"]
            log_lines[name] = await _read_log_tail(cluster, pod, namespace, name, container)
    return log_lines


async def _read_log_tail(cluster: Cluster, pod: Mapping[str, Any], namespace: str, name: str, container: str) -> str:
    statuses: list[dict[str, Any]] = pod["status"].get("containerStatuses") or []
    has_restarted = any(
        container_status["name"] == container and container_status.get("restartCount") for container_status in statuses
    )
    try:
        text = await cluster.read_log(namespace, name, container, previous=has_restarted, lines=_MAX_LOG_LINES)
    except ApiError:
        return ""  # the log was deleted with the container; the exit status remains
    return text[-_MAX_LOG_CHARACTERS:]
