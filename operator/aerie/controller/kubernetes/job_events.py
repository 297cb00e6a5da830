"""Why a Job has no pod. Its status does not say: what the API server answered stands only in the Job's events.

The end of a pod's name, drawn anew with each attempt, is left out, so that the same refusal is the same sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from aerie.controller.kubernetes.client import EVENTS, ApiError, Cluster


async def read_pod_creation_errors(cluster: Cluster, namespace: str, jobs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What the latest event of each Job says of a pod that could not be made, by name of the Job; nothing where there is none."""
    found = {}
    for job in jobs:
        name = job["metadata"]["name"]
        if words := await _read_latest_message(cluster, namespace, job["metadata"].get("uid") or ""):
            found[name] = re.sub(rf'"{re.escape(name)}-[a-z0-9]+"', f'"{name}-..."', words)
    return found


async def _read_latest_message(cluster: Cluster, namespace: str, uid: str) -> str:
    query = [("fieldSelector", f"regarding.uid={uid},reason=FailedCreate"), ("limit", "100")]
    try:
        listed = (await cluster.request("GET", EVENTS.path(namespace), query))["items"]
    except ApiError:
        return ""  # the Job goes on without the words
    latest = max(listed, key=_event_time, default=None)
    return str(latest.get("note") or "") if latest is not None else ""


def _event_time(event: Mapping[str, Any]) -> str:
    series: Mapping[str, Any] = event.get("series") or {}
    moments = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return max((str(moment) for moment in moments if moment), default=str(event["metadata"].get("creationTimestamp") or ""))
