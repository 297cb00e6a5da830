"""When the time of a start is over, and when the operator looks again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from aerie.engine.drafter_endpoint.calls import PrepareDrafter
from aerie.engine.drafter_endpoint.response import ChangeDurations
from aerie.engine.drafter_endpoint.state import PreparedDrafter
from aerie.rollout.facts.drafters import CallResult
from aerie.rollout.in_place.deadline import is_preparation_untried, is_time_over, time_until_deadline
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.staging import check_preparation
from tests.unit.rollout.in_place import reports

MINUTE = timedelta(minutes=1)
DEADLINE = 30 * MINUTE


def running(seconds: float) -> PreparedDrafter:
    return PreparedDrafter(reports.SOURCE, "Running", seconds, None, "", None, None)


def called(ended_after: timedelta) -> CallResult:
    return CallResult(PrepareDrafter(reports.SOURCE), ChangeDurations(0, 0, 0), reports.START + ended_after, 1)


@pytest.mark.parametrize(
    ("pod", "is_untried"),
    [
        (reports.pod(), True),
        (reports.pod(failed_reads=1), False),
        (reports.pod(report=reports.state(prepared=None)), True),
        (reports.pod(report=reports.state(prepared=None), result=called(-MINUTE)), True),
        (reports.pod(report=reports.state(prepared=None), result=called(MINUTE)), False),
        (reports.pod(report=reports.state(prepared=None), failed_reads=1), False),
        (reports.pod(report=reports.state(prepared=running(60.0))), True),
        (reports.pod(report=reports.state(prepared=running(1790.0))), False),
        (reports.pod(report=reports.state(prepared=running(60.0)), failed_reads=1), False),
        (reports.pod(report=replace(reports.state(), own=None)), False),
    ],
)
def test_pod_that_a_start_has_not_tried_yet(pod: EnginePod, is_untried: bool) -> None:
    item = check_preparation(pod, reports.SOURCE, None, reports.START)
    assert is_preparation_untried(item, reports.SOURCE, reports.START, DEADLINE) is is_untried


@pytest.mark.parametrize(
    ("minutes", "is_any_untried", "is_over"),
    [(29, False, False), (30, False, True), (30, True, False), (59, True, False), (60, True, True)],
)
def test_time_is_over(minutes: int, is_any_untried: bool, is_over: bool) -> None:
    now = reports.START + minutes * MINUTE
    assert is_time_over(reports.START, DEADLINE, now, is_any_untried=is_any_untried) is is_over


@pytest.mark.parametrize(("minutes", "delay"), [(0, 30), (30, 30), (45, 15)])
def test_operator_looks_again_at_each_deadline(minutes: int, delay: int) -> None:
    remaining = time_until_deadline(reports.START, DEADLINE, reports.START + minutes * MINUTE)
    assert remaining is not None
    assert timedelta(0) < remaining - delay * MINUTE < timedelta(seconds=1)
    assert time_until_deadline(reports.START, DEADLINE, reports.START + 60 * MINUTE) is None
