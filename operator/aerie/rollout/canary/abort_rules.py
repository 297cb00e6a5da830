"""Faults of a canary that need no statistics: any of them ends it at once.

Guarantees: only what the canary's own pods show is said, and only where the pods that it is compared with show it less: a fault
of both is a fault of the cluster. No pod decides over a fleet: of many pods a few may crash, fail or lie (lateness.tolerated).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta

from aerie.rollout.capacity.arms import Group
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.late_pods import tolerated
from aerie.rollout.facts.snapshot import Object


def stops(
    canary: Group,
    others: Group,
    unreadable: Mapping[str, str],
    patience: timedelta | None,
    last_lines: Mapping[str, str],
    now: datetime,
) -> Iterator[str]:
    """Sentences on the canary's pods. `others`: the pods that it is compared with; `unreadable`: what is wrong with the metrics
    page of a pod, by its name; `patience`: for how long all pods of the canary may be away; None: as long as they like."""
    crashing = _crashing(canary)
    if _is_own(crashing, canary, _crashing(others), others):
        trouble = pod_failures.trouble_of(crashing[0], last_lines)
        yield f"It crashes again and again: {trouble.message if trouble else crashing[0]['metadata']['name']}."
    failing = _failing(canary, now)
    if len(failing) >= pod_failures.CRASHES and _is_own(failing, canary, _failing(others, now), others):
        trouble = pod_failures.trouble_of(failing[0], last_lines)
        said = trouble.message if trouble else failing[0]["metadata"]["name"]
        yield f"Its pods fail again and again: {said.rstrip('.')}."
    lying = [pod for pod in canary.objects if pod["metadata"]["name"] in unreadable]
    if _is_own(lying, canary, [pod for pod in others.objects if pod["metadata"]["name"] in unreadable], others):
        name = lying[0]["metadata"]["name"]
        yield f"The metrics of pod {name} cannot be believed: {unreadable[name].rstrip('.')}."
    if patience is not None and canary.objects and not any(map(pod_failures.ready, canary.objects)):
        since = max((moment for pod in canary.objects if (moment := pod_failures.not_ready_since(pod)) is not None), default=None)
        if since is not None and now >= since + patience:
            yield f"None of its pods has served since {since:%H:%M:%S}."


def _is_own(mine: Collection[Object], canary: Group, theirs: Collection[Object], others: Group) -> bool:
    """Whether the fault is the canary's: more of its pods have it than a node's fault explains, and a larger share of them
    than of the others."""
    if len(mine) <= tolerated(canary.pods.asked):
        return False
    return len(mine) * max(1, others.pods.asked) > len(theirs) * max(1, canary.pods.asked)


def _crashing(group: Group) -> list[Object]:
    return [pod for pod in group.objects if pod_failures.crash_loop(pod)]


def _failing(group: Group, now: datetime) -> list[Object]:
    """Pods of the last hour that have ended for good: evicted again and again, or refused by every node."""
    made = ((pod, pod["metadata"].get("creationTimestamp")) for pod in group.dead)
    return [pod for pod, at in made if at and datetime.fromisoformat(at) > now - pod_failures.LONG_RUN]
