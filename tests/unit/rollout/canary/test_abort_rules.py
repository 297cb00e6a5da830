"""Abort conditions: failures of a canary that need no statistics, and failures that are not the canary's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aerie.rollout.canary.abort_rules import find_abort_reasons
from aerie.rollout.capacity.arms import ArmPods
from aerie.rollout.capacity.replica_counts import PodCounts
from aerie.rollout.facts.late_pods import LatePods
from aerie.rollout.facts.pod_failures import is_pod_ready
from tests.golden import Messages

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
DEADLINE = timedelta(minutes=30)


def pod(
    name: str,
    *,
    serves: bool = True,
    since: timedelta = timedelta(),
    restarts: int = 0,
    ran: timedelta | None = None,
    container: str = "engine",
) -> dict[str, Any]:
    condition = {"type": "Ready", "status": str(serves), "lastTransitionTime": (NOW - since).isoformat()}
    terminated: dict[str, Any] = {"exitCode": 1}
    if ran is not None:
        terminated |= {"startedAt": (NOW - ran).isoformat(), "finishedAt": NOW.isoformat()}
    state = {"terminated": terminated} if restarts else {}
    ended = {"name": container, "ready": serves, "restartCount": restarts, "lastState": state}
    return {"metadata": {"name": name}, "status": {"conditions": [condition], "containerStatuses": [ended]}}


def evicted(name: str, age: timedelta) -> dict[str, Any]:
    metadata = {"name": name, "creationTimestamp": (NOW - age).isoformat()}
    return {"metadata": metadata, "status": {"phase": "Failed", "message": "The node was low on ephemeral-storage."}}


def group(objects: list[Any], dead: list[Any] | None = None) -> ArmPods:
    counts = PodCounts(len(objects), ready=sum(map(is_pod_ready, objects)))
    return ArmPods(tuple(objects), tuple(dead or ()), counts, LatePods())


def abort_reasons(canary: list[Any], others: list[Any], deadline: timedelta | None = DEADLINE, **unreadable: str) -> list[str]:
    return list(find_abort_reasons(group(canary), group(others), unreadable, deadline, {}, NOW))


def test_serving_pods_give_no_abort_reason() -> None:
    assert abort_reasons([pod("a")], [pod("b")]) == []
    assert abort_reasons([pod("a", restarts=9)], [pod("b")]) == [], "it has recovered"


def test_crash_loop_of_canary_alone_aborts(messages: Messages) -> None:
    (message,) = abort_reasons([pod("a", serves=False, restarts=3)], [pod("b")])
    messages.check("crash loop", message)
    assert abort_reasons([pod("a", serves=False, restarts=2)], [pod("b")]) == []
    assert abort_reasons([pod("a", serves=False, restarts=3)], [pod("b", serves=False, restarts=3)]) == []


def test_crash_loop_of_sidecar_does_not_abort() -> None:
    assert abort_reasons([pod("a", serves=False, restarts=9, container="log-shipper")], [pod("b")]) == []


def test_restarts_over_days_do_not_abort() -> None:
    assert abort_reasons([pod("a", serves=False, restarts=3, ran=timedelta(hours=20))], [pod("b")]) == []
    assert abort_reasons([pod("a", serves=False, restarts=4, ran=timedelta(minutes=20))], [pod("b")]) != []


@pytest.mark.parametrize(
    ("size", "crashing", "stopped"), [(2, 1, True), (4, 1, False), (4, 2, True), (40, 2, False), (40, 3, True)]
)
def test_crashing_pods_abort_by_share_of_fleet(size: int, crashing: int, stopped: bool) -> None:
    bad = [pod(f"bad-{number}", serves=False, restarts=5) for number in range(crashing)]
    good = [pod(f"good-{number}") for number in range(size - crashing)]
    assert bool(abort_reasons(bad + good, [pod("stable")])) == stopped
    invalid_metrics: dict[str, Any] = dict.fromkeys((crashed["metadata"]["name"] for crashed in bad), "a counter is NaN")
    serving = [pod(name) for name in invalid_metrics] + good
    assert bool(abort_reasons(serving, [pod("stable")], **invalid_metrics)) == stopped


def test_one_crashing_stable_pod_of_many_does_not_excuse_canary() -> None:
    others = [pod(f"stable-{number}", serves=number > 0, restarts=5) for number in range(100)]
    assert abort_reasons([pod("a", serves=False, restarts=5)], others) != []


def test_repeated_evictions_of_canary_abort(messages: Messages) -> None:
    dead = [evicted(f"a-{number}", timedelta(minutes=10 * number)) for number in range(3)]
    canary, others = group([pod("a", serves=False)], dead), group([pod("b")])
    (message,) = find_abort_reasons(canary, others, {}, DEADLINE, {}, NOW)
    messages.check("evicted repeatedly", message)
    assert list(find_abort_reasons(canary, group([pod("b")], dead), {}, DEADLINE, {}, NOW)) == [], "the cluster's fault"
    old = [evicted(f"a-{number}", timedelta(hours=10 * number)) for number in range(3)]
    assert list(find_abort_reasons(group([pod("a", serves=False)], old), others, {}, DEADLINE, {}, NOW)) == []


def test_evicted_pods_that_had_waited_for_their_nodes_abort() -> None:
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": (NOW - timedelta(minutes=5)).isoformat()}
    dead = [evicted(name, timedelta(hours=3)) for name in "abc"]
    canary, others = group([pod("d", serves=False)], dead), group([pod("e")])
    assert not list(find_abort_reasons(canary, others, {}, DEADLINE, {}, NOW))
    for ended in dead:
        ended["status"]["conditions"] = [placed]
    assert list(find_abort_reasons(canary, others, {}, DEADLINE, {}, NOW))


def test_invalid_metrics_of_canary_alone_abort(messages: Messages) -> None:
    (message,) = abort_reasons([pod("a")], [pod("b")], a="a counter is NaN.")
    messages.check("invalid metrics", message)
    assert abort_reasons([pod("a")], [pod("b")], a="a counter is NaN", b="a counter is NaN") == []
    assert abort_reasons([pod("a")], [pod("b")], b="a counter is NaN") == []


def test_canary_without_ready_pod_past_deadline_aborts(messages: Messages) -> None:
    away = pod("a", serves=False, since=timedelta(minutes=31))
    (message,) = abort_reasons([away], [pod("b")])
    messages.check("no ready pod", message)
    assert abort_reasons([away], [pod("b")], deadline=None) == []
    assert abort_reasons([away, pod("c")], [pod("b")]) == []
    assert abort_reasons([pod("a", serves=False, since=timedelta(minutes=29))], [pod("b")]) == []
    assert abort_reasons([away, pod("c", serves=False, since=timedelta(minutes=3))], [pod("b")]) == [], "one served 3 minutes ago"
