"""Gathers what there is about one resource, for the core to decide on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.controller.client import CHILDREN, PODS, SERVICES, ApiError, Cluster, Object
from aerie.resources import names
from aerie.rollout import pods
from aerie.rollout.observed import Observed

_LINES = 8
_CHARACTERS = 1200


async def observe(cluster: Cluster, document: Object) -> Observed:
    """Everything that belongs to the resource `document`. Raises ApiError, ResourceError."""
    resource = SpeculativeDeployment.from_dict(document)
    namespace, name = document["metadata"]["namespace"], document["metadata"]["name"]
    mine = f"{names.NAME}={name}"
    *listed, engines, checks = await asyncio.gather(
        *(cluster.list_all(kind, namespace, mine) for kind in CHILDREN),
        cluster.list_all(PODS, namespace, mine),
        cluster.list_all(PODS, namespace, f"{names.PREFLIGHT}={name}"),
    )
    children = tuple(item for items in listed for item in items)
    return Observed(
        resource=resource,
        children=children,
        namesakes=await _namesakes(cluster, namespace, name, children),
        pods=tuple(engines),
        preflight_pods=tuple(checks),
        last_lines=await _last_lines(cluster, namespace, engines),
    )


async def _namesakes(cluster: Cluster, namespace: str, name: str, children: tuple[Object, ...]) -> tuple[Object, ...]:
    """The Service of that name, where it is not ours: the one name of a child that somebody may have had before."""
    if any(child["kind"] == SERVICES.kind and child["metadata"]["name"] == name for child in children):
        return ()
    found = await cluster.get(SERVICES, namespace, name)
    return () if found is None else (found,)


async def _last_lines(cluster: Cluster, namespace: str, engines: list[Object]) -> Mapping[str, str]:
    """What crashed containers wrote last, from the run that ended."""
    found: dict[str, str] = {}
    for pod in engines:
        container = pods.crashed(pod)
        if container is not None and len(found) < 2:  # one sentence is shown
            name = pod["metadata"]["name"]
            found[name] = await _tail(cluster, pod, namespace, name, container)
    return found


async def _tail(cluster: Cluster, pod: Object, namespace: str, name: str, container: str) -> str:
    statuses: list[dict[str, Any]] = pod["status"].get("containerStatuses") or []
    restarted = any(one["name"] == container and one.get("restartCount") for one in statuses)
    try:
        text = await cluster.log(namespace, name, container, previous=restarted, lines=_LINES)
    except ApiError:
        return ""  # gone with the container; the exit status still tells something
    return text[-_CHARACTERS:]
