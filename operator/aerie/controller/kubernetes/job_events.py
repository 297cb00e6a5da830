"""Reads why a Job has no pod. The Job's status does not contain it. Only its events have the API server's answer.

The suffix of the pod's name is random in each attempt. It is left out, so that the same rejection gives the same message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from aerie.controller.kubernetes.client import EVENTS, ApiError, Cluster


async def read_pod_creation_errors(cluster: Cluster, namespace: str, jobs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the latest event's message about a pod that could not be created, by name of the Job.

    Jobs without one are left out.
    """
    messages = {}
    for job in jobs:
        name = job["metadata"]["name"]
        if message := await _read_latest_message(cluster, namespace, job["metadata"].get("uid") or ""):
            messages[name] = re.sub(rf'"{re.escape(name)}-[a-z0-9]+"', f'"{name}-..."', message)
    return messages


async def _read_latest_message(cluster: Cluster, namespace: str, uid: str) -> str:
    query = [("fieldSelector", f"regarding.uid={uid},reason=FailedCreate"), ("limit", "100")]
    try:
        events = (await cluster.request("GET", EVENTS.path(namespace), query))["items"]
    except ApiError:
        return ""  # the message is not essential
    latest = max(events, key=_event_time, default=None)
    return str(latest.get("note") or "") if latest is not None else ""


def _event_time(event: Mapping[str, Any]) -> str:
    series: Mapping[str, Any] = event.get("series") or {}
    timestamps = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return max(
        (str(timestamp) for timestamp in timestamps if timestamp), default=str(event["metadata"].get("creationTimestamp") or "")
    )
