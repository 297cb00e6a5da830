"""The start of a rollout in place: what pods wait for, and what ends it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from aerie.engine.drafter_endpoint.calls import PrepareDrafter
from aerie.engine.drafter_endpoint.response import ChangeDurations, EndpointProblem
from aerie.engine.drafter_endpoint.state import PreparedDrafter, Problem
from aerie.rollout.facts.drafters import CallResult, DrafterObservation, with_state
from aerie.rollout.in_place.staging import check_staging
from tests.unit.rollout.in_place import reports
from tests.unit.rollout.in_place.fleet import digest_of

PREPARE = PrepareDrafter(reports.SOURCE)
FAILED = PreparedDrafter(reports.SOURCE, "Failed", 1.0, None, "", None, Problem("WrongShape", "fc has another shape."))
RUNNING = PreparedDrafter(reports.SOURCE, "Running", 1.0, None, "", None, None)


def result(outcome: Any, seconds: float = 1.0) -> CallResult:
    return CallResult(PREPARE, outcome, reports.START + timedelta(seconds=seconds), 1)


def check(*pods: Any, count: int = 5, served: str | None = None, seconds: float = 1.0) -> Any:
    now = reports.START + timedelta(seconds=seconds)
    return check_staging(pods, count, reports.SOURCE, served, reports.START, now)


def test_start_is_complete_when_all_pods_have_the_same_files() -> None:
    staging = check(reports.pod("a", reports.state()), reports.pod("b", reports.state()))
    assert staging.is_complete
    assert staging.prepared.drafter.digest == digest_of("better")
    assert staging.own.digest == digest_of("eagle3")


def read_pod(name: str, *seconds: float, settled: float | None = 0.0, prepared_at: float = 0.0) -> Any:
    """Return a prepared pod whose open window was read at these seconds."""
    window = replace(reports.window(2, "eagle3", None, reports.START.timestamp(), None, 0.0), settled=settled)
    observation = DrafterObservation()
    for moment in seconds:
        prepared = reports.prepared() if moment >= prepared_at else None
        state = reports.state(windows=(window,), prepared=prepared)
        observation = with_state(observation, state, reports.START + timedelta(seconds=moment))
    return replace(reports.pod(name), observation=observation)


@pytest.mark.parametrize(
    ("pod", "seconds", "complete"),
    [
        (read_pod("b", 0.0), 5.0, False),
        (read_pod("b", 0.0, 9.0), 9.0, False),
        (read_pod("b", 0.0, 10.0), 10.0, True),
        (read_pod("b", 0.0, 10.0, settled=None), 10.0, False),
        (read_pod("b", 0.0, 29.0, settled=None), 29.0, False),
        (read_pod("b", 0.0, 30.0, settled=None), 30.0, True),
        (read_pod("b", 600.0), 629.0, False),
        (read_pod("b", 600.0), 630.0, True),
        (read_pod("b", 600.0, 605.0, 607.0, prepared_at=605.0), 634.0, False),
        (read_pod("b", 600.0, 605.0, 607.0, prepared_at=605.0), 635.0, True),
    ],
)
def test_windows_follow_from_a_measured_rate(pod: Any, seconds: float, complete: bool) -> None:
    """A start waits for the rate of requests for half a minute from the first report of the prepared pod on, however late that
    is: windows for an unknown rate are the longest."""
    staging = check(reports.pod("a", reports.state()), pod, seconds=seconds)
    assert (staging.is_complete, staging.is_measuring) == (complete, not complete)
    assert staging.measured_pods == (() if complete else ("b",))
    assert complete == (not any(item.waiting for item in staging.preparations))


def test_only_the_first_ready_pods_are_selected() -> None:
    pods = [reports.pod("a", ready=False), *(reports.pod(name, reports.state()) for name in "bcd")]
    assert [pod.name for pod in check(*pods, count=2).pods] == ["b", "c"]
    assert not check(reports.pod("a", ready=False)).is_complete


@pytest.mark.parametrize(
    "other",
    [
        reports.pod("a", failed_reads=1),
        reports.pod("a", reports.state(), failed_reads=1),
        reports.pod("a", reports.state(own="worse")),
        reports.pod("a", replace(reports.state(), own=None)),
        reports.pod("a", reports.state(problem=Problem("Starting", "it starts."))),
    ],
)
def test_pod_that_cannot_be_on_trial_yet_holds_no_place(other: Any) -> None:
    pods = [other, reports.pod("b"), reports.pod("c", reports.state())]
    assert [pod.name for pod in check(*pods, count=2, served=digest_of("eagle3")).pods] == ["b", "c"]
    assert [pod.name for pod in check(*pods, count=3, served=digest_of("eagle3")).pods] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("pod", "call", "waiting"),
    [
        (reports.pod(), None, "has not answered: it has not been read yet"),
        (reports.pod(problem=EndpointProblem("Timeout", "no answer within 5 s.")), None, "no answer within 5 s"),
        (reports.pod(report=replace(reports.state(), own=None)), None, "is not ready"),
        (reports.pod(report=reports.state(prepared=None)), PREPARE, "is about to read"),
        (reports.pod(report=reports.state(prepared=RUNNING)), None, "reads the drafter's files"),
        (reports.pod(report=reports.state(prepared=FAILED)), PREPARE, "is about to read"),
        (reports.pod(report=reports.state(prepared=FAILED), result=result(ChangeDurations(0, 0, 0), -1)), PREPARE, "is about"),
        (
            reports.pod(report=reports.state(prepared=None), result=result(EndpointProblem("NoToken", "no token.", 401))),
            PREPARE,
            "is about to read",
        ),
    ],
)
def test_pod_that_is_waited_for(pod: Any, call: object, waiting: str) -> None:
    staging = check(pod)
    assert not staging.problem
    assert not staging.is_complete
    assert staging.preparations[0].call == call
    assert waiting in staging.preparations[0].waiting


@pytest.mark.parametrize(
    ("pod", "problem"),
    [
        (reports.pod(report=reports.state(unfit=Problem("Pipeline", "pipeline stages."))), "pipeline stages"),
        (reports.pod(report=reports.state(is_counting=False)), "--disable-log-stats"),
        (reports.pod(report=reports.state(prepared=FAILED), result=result(ChangeDurations(0, 0, 0))), "fc has another shape"),
        (
            reports.pod(
                report=reports.state(prepared=None), result=result(EndpointProblem("FolderOutsideRoots", "outside.", 403))
            ),
            "rejects the call: outside.",
        ),
    ],
)
def test_pod_that_ends_the_rollout_in_place(pod: Any, problem: str) -> None:
    assert problem in check(reports.pod("b", reports.state()), pod).problem


def test_pod_comes_to_the_served_drafter_first() -> None:
    staging = check(reports.pod("a", reports.state(own="worse")), served=digest_of("eagle3"))
    assert not staging.is_complete
    assert not staging.problem


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (reports.state(prepared=reports.prepared("worse")), "read different files"),
        (reports.state(own="worse"), "different files of the stable drafter"),
    ],
)
def test_pods_with_different_files(other: Any, problem: str) -> None:
    assert problem in check(reports.pod("a", reports.state()), reports.pod("b", other)).problem


@pytest.mark.parametrize(
    ("problem", "failed_reads", "is_over"),
    [
        (EndpointProblem("NoToken", "no right to create Secrets."), 3, True),
        (EndpointProblem("NoToken", "no right to create Secrets."), 2, False),
        (EndpointProblem("NoToken", "the pod has no token yet.", 503), 30, False),
        (EndpointProblem("NoEndpoint", "there is no plugin.", 404), 3, True),
        (EndpointProblem("Timeout", "no answer within 5 s."), 30, False),
    ],
)
def test_pod_that_can_never_be_called_is_not_waited_for(problem: EndpointProblem, failed_reads: int, is_over: bool) -> None:
    pod = reports.pod(problem=problem)
    staging = check(replace(pod, observation=replace(pod.observation, failed_reads=failed_reads)))
    assert bool(staging.problem) == is_over
    assert problem.message in (staging.problem or staging.preparations[0].waiting)
