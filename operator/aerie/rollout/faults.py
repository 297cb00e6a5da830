"""Faults of a canary that need no statistics: any of them ends it at once.

Guarantee: only what the canary's own pods show is said, and only where the pods that it is compared with do not show it too: a
fault of both is one of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from aerie.rollout import pods
from aerie.rollout.observed import Object

CRASHES = 3
"""Restarts of one engine that are no accident any more."""


def stops(
    canary: Sequence[Object],
    others: Sequence[Object],
    unreadable: Mapping[str, str],
    patience: timedelta | None,
    last_lines: Mapping[str, str],
    now: datetime,
) -> Iterator[str]:
    """Sentences on the canary's pods. `unreadable`: what is wrong with the metrics page of a pod, by its name; `patience`: for
    how long all pods of the canary may be away; None: as long as they like."""
    if (crashing := _crashing(canary)) and not _crashing(others):
        trouble = pods.trouble_of(crashing[0], last_lines)
        yield f"It crashes again and again: {trouble.message if trouble else crashing[0]['metadata']['name']}."
    mine = [name for pod in canary if (name := pod["metadata"]["name"]) in unreadable]
    if mine and not any(pod["metadata"]["name"] in unreadable for pod in others):
        yield f"The metrics of pod {mine[0]} cannot be believed: {unreadable[mine[0]].rstrip('.')}."
    if patience is not None and canary and not any(map(pods.ready, canary)):
        since = min((moment for pod in canary if (moment := pods.not_ready_since(pod)) is not None), default=None)
        if since is not None and now >= since + patience:
            yield f"None of its pods has served since {since:%H:%M:%S}."


def _crashing(group: Sequence[Object]) -> list[Object]:
    return [pod for pod in group if not pods.ready(pod) and pods.restarts(pod) >= CRASHES]
