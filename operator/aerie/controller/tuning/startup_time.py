"""Time that engines take to start, from the status of their pods."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from aerie.manifests import naming
from aerie.rollout.facts.snapshot import KubernetesObject

_EMPTY_OBJECT: KubernetesObject = {}


def median_startup_seconds(pods: tuple[KubernetesObject, ...]) -> float | None:
    """Return the seconds from the start of an engine's container until its pod was ready: the median of pods that
    never restarted.
    """
    startup_seconds = [seconds for pod in pods if (seconds := _seconds_to_ready(pod)) is not None]
    return statistics.median(startup_seconds) if startup_seconds else None


def _seconds_to_ready(pod: KubernetesObject) -> float | None:
    status: Mapping[str, Any] = pod.get("status") or {}
    containers: list[KubernetesObject] = status.get("containerStatuses") or []
    conditions: list[KubernetesObject] = status.get("conditions") or []
    engine = next((item for item in containers if item.get("name") == naming.ENGINE_CONTAINER), _EMPTY_OBJECT)
    ready = next((item for item in conditions if (item.get("type"), item.get("status")) == ("Ready", "True")), _EMPTY_OBJECT)
    started_at = ((engine.get("state") or {}).get("running") or {}).get("startedAt")
    ready_at = ready.get("lastTransitionTime")
    if engine.get("restartCount") or not started_at or not ready_at:
        return None
    seconds = (datetime.fromisoformat(ready_at) - datetime.fromisoformat(started_at)).total_seconds()
    return seconds if seconds > 0 else None
