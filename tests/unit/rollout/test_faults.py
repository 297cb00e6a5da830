"""Faults of a canary that need no statistics, and what is none of its own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from aerie.rollout.faults import stops

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
PATIENCE = timedelta(minutes=30)


def pod(name: str, *, serves: bool = True, since: timedelta = timedelta(), restarts: int = 0) -> dict[str, Any]:
    condition = {"type": "Ready", "status": str(serves), "lastTransitionTime": (NOW - since).isoformat()}
    state = {"terminated": {"exitCode": 1}} if restarts else {}
    engine = {"name": "engine", "ready": serves, "restartCount": restarts, "lastState": state}
    return {"metadata": {"name": name}, "status": {"conditions": [condition], "containerStatuses": [engine]}}


def found(canary: list[Any], others: list[Any], patience: timedelta | None = PATIENCE, **unreadable: str) -> list[str]:
    return list(stops(canary, others, unreadable, patience, {}, NOW))


def test_pods_that_serve_are_no_fault() -> None:
    assert found([pod("a")], [pod("b")]) == []
    assert found([pod("a", restarts=9)], [pod("b")]) == [], "whatever it was, it is over"


def test_a_canary_that_crashes_alone() -> None:
    (said,) = found([pod("a", serves=False, restarts=3)], [pod("b")])
    assert said == "It crashes again and again: container engine of pod a ended with status 1."
    assert found([pod("a", serves=False, restarts=2)], [pod("b")]) == []
    assert found([pod("a", serves=False, restarts=3)], [pod("b", serves=False, restarts=3)]) == []


def test_figures_that_are_none() -> None:
    (said,) = found([pod("a")], [pod("b")], a="a counter is NaN.")
    assert said == "The metrics of pod a cannot be believed: a counter is NaN."
    assert found([pod("a")], [pod("b")], a="a counter is NaN", b="a counter is NaN") == []
    assert found([pod("a")], [pod("b")], b="a counter is NaN") == []


def test_a_canary_that_is_away_for_long() -> None:
    away = pod("a", serves=False, since=timedelta(minutes=31))
    (said,) = found([away], [pod("b")])
    assert said == "None of its pods has served since 11:29:00."
    assert found([away], [pod("b")], patience=None) == []
    assert found([away, pod("c")], [pod("b")]) == []
    assert found([pod("a", serves=False, since=timedelta(minutes=29))], [pod("b")]) == []
