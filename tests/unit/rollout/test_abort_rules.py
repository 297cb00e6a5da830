"""Faults of a canary that need no statistics, and what is none of its own."""

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
PATIENCE = timedelta(minutes=30)


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


def found(canary: list[Any], others: list[Any], patience: timedelta | None = PATIENCE, **unreadable: str) -> list[str]:
    return list(find_abort_reasons(group(canary), group(others), unreadable, patience, {}, NOW))


def test_pods_that_serve_are_no_fault() -> None:
    assert found([pod("a")], [pod("b")]) == []
    assert found([pod("a", restarts=9)], [pod("b")]) == [], "whatever it was, it is over"


def test_a_canary_that_crashes_alone(messages: Messages) -> None:
    (said,) = found([pod("a", serves=False, restarts=3)], [pod("b")])
    messages.check("crash loop", said)
    assert found([pod("a", serves=False, restarts=2)], [pod("b")]) == []
    assert found([pod("a", serves=False, restarts=3)], [pod("b", serves=False, restarts=3)]) == []


def test_a_sidecar_that_crashes_says_nothing_of_the_engine() -> None:
    assert found([pod("a", serves=False, restarts=9, container="log-shipper")], [pod("b")]) == []


def test_restarts_of_days_do_not_add_up() -> None:
    assert found([pod("a", serves=False, restarts=3, ran=timedelta(hours=20))], [pod("b")]) == []
    assert found([pod("a", serves=False, restarts=4, ran=timedelta(minutes=20))], [pod("b")]) != []


@pytest.mark.parametrize(
    ("size", "crashing", "stopped"), [(2, 1, True), (4, 1, False), (4, 2, True), (40, 2, False), (40, 3, True)]
)
def test_one_pod_does_not_decide_over_a_fleet(size: int, crashing: int, stopped: bool) -> None:
    bad = [pod(f"bad-{number}", serves=False, restarts=5) for number in range(crashing)]
    good = [pod(f"good-{number}") for number in range(size - crashing)]
    assert bool(found(bad + good, [pod("stable")])) == stopped
    pages: dict[str, Any] = dict.fromkeys((crashed["metadata"]["name"] for crashed in bad), "a counter is NaN")
    serving = [pod(name) for name in pages] + good
    assert bool(found(serving, [pod("stable")], **pages)) == stopped


def test_one_pod_of_a_large_stable_arm_does_not_hide_a_canary_that_crashes() -> None:
    others = [pod(f"stable-{number}", serves=number > 0, restarts=5) for number in range(100)]
    assert found([pod("a", serves=False, restarts=5)], others) != []


def test_pods_that_are_evicted_again_and_again(messages: Messages) -> None:
    dead = [evicted(f"a-{number}", timedelta(minutes=10 * number)) for number in range(3)]
    canary, others = group([pod("a", serves=False)], dead), group([pod("b")])
    (said,) = find_abort_reasons(canary, others, {}, PATIENCE, {}, NOW)
    messages.check("evicted repeatedly", said)
    assert list(find_abort_reasons(canary, group([pod("b")], dead), {}, PATIENCE, {}, NOW)) == [], "the cluster's fault"
    old = [evicted(f"a-{number}", timedelta(hours=10 * number)) for number in range(3)]
    assert list(find_abort_reasons(group([pod("a", serves=False)], old), others, {}, PATIENCE, {}, NOW)) == []


def test_figures_that_are_none(messages: Messages) -> None:
    (said,) = found([pod("a")], [pod("b")], a="a counter is NaN.")
    messages.check("invalid metrics", said)
    assert found([pod("a")], [pod("b")], a="a counter is NaN", b="a counter is NaN") == []
    assert found([pod("a")], [pod("b")], b="a counter is NaN") == []


def test_a_canary_that_is_away_for_long(messages: Messages) -> None:
    away = pod("a", serves=False, since=timedelta(minutes=31))
    (said,) = found([away], [pod("b")])
    messages.check("no ready pod", said)
    assert found([away], [pod("b")], patience=None) == []
    assert found([away, pod("c")], [pod("b")]) == []
    assert found([pod("a", serves=False, since=timedelta(minutes=29))], [pod("b")]) == []
    assert found([away, pod("c", serves=False, since=timedelta(minutes=3))], [pod("b")]) == [], "one served 3 minutes ago"
