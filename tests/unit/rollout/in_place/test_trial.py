"""Windows for the requests of a fleet, and the trial in the status."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from aerie.analysis.switchback.design import WindowSchedule
from aerie.api.rollout import AnalysisSpec
from aerie.engine.drafter_endpoint.state import DrafterWindow
from aerie.rollout.facts.drafters import DrafterObservation, with_state
from aerie.rollout.in_place.trial import begin_trial, is_being_measured, resume_trial, schedule_trial
from tests.unit.rollout.in_place import reports
from tests.unit.rollout.in_place.fleet import digest_of

NOW = reports.START + timedelta(hours=1)


def pod(requests: float, seconds: float = 3600.0) -> Any:
    began = NOW.timestamp() - seconds
    item = DrafterWindow(1, digest_of("eagle3"), None, began, began, None, reports.counters(requests))
    return reports.pod(report=reports.state(windows=(item,)), state_read_at=NOW)


@pytest.mark.parametrize(
    ("pods", "fleet_size", "first"),
    [
        ([pod(3600.0)], 1, 12.0),
        ([pod(36000.0)], 1, 4.0),
        ([pod(36000.0)], 1000, 8.0),
        ([pod(36000.0), pod(36000.0 * 3)], 2, 4.0),
        ([pod(36.0)], 1, 120.0),
        ([pod(0.0)], 1, 120.0),
        ([pod(100.0, seconds=5.0)], 1, 120.0),
        ([reports.pod()], 1, 120.0),
        ([], 0, 120.0),
    ],
)
def test_windows(pods: list[Any], fleet_size: int, first: float) -> None:
    assert schedule_trial(pods, fleet_size) == WindowSchedule(first, 30.0)


def read_pod(*reads: tuple[float, float], clock: float = 0.0) -> Any:
    """Return a pod that was read at these seconds with these numbers of finished requests; its clock is ahead by `clock`."""
    began, observation = NOW.timestamp() - 24 * 3600.0 + clock, DrafterObservation()
    for seconds, requests in reads:
        item = DrafterWindow(1, digest_of("eagle3"), None, began, began, None, reports.counters(requests))
        observation = with_state(observation, reports.state(windows=(item,)), NOW + timedelta(seconds=seconds))
    return replace(reports.pod(), observation=observation)


@pytest.mark.parametrize("clock", [0.0, 300.0, -3600.0, 1e6])
def test_windows_follow_from_the_present_rate_whatever_the_pods_clock_is(clock: float) -> None:
    busy_now, idle_now = read_pod((0.0, 10.0), (10.0, 210.0), clock=clock), read_pod((0.0, 1e6), (10.0, 1e6 + 2), clock=clock)
    assert schedule_trial([busy_now], 1).first_window_seconds == 4.0
    assert schedule_trial([idle_now], 1).first_window_seconds == 60.0


def test_rate_is_that_of_the_last_minute() -> None:
    reads = [(15.0 * number, 0.0) for number in range(40)]
    reads += [(600.0 + 15 * number, 300.0 * (number + 1)) for number in range(6)]
    assert schedule_trial([read_pod(*reads)], 1).first_window_seconds == 4.0


def test_pod_without_a_request_between_two_reads_has_the_rate_since_its_last_change() -> None:
    assert schedule_trial([read_pod((0.0, 24 * 3600.0), (10.0, 24 * 3600.0))], 1).first_window_seconds == 12.0


def test_counters_that_fall_are_no_rate() -> None:
    assert is_being_measured(read_pod((0.0, 100.0), (10.0, 50.0)))


def test_long_requests_have_long_windows() -> None:
    slow = pod(3600.0)
    counters = replace(slow.state.windows[0].counters, step_seconds=3600.0 * 40)
    state = replace(slow.state, windows=(replace(slow.state.windows[0], counters=counters),))
    schedule = schedule_trial([replace(slow, observation=replace(slow.observation, state=state))], 1)
    assert schedule == WindowSchedule(92.0, 92.0)


def test_trial_is_resumed_as_it_was_stored() -> None:
    rollout = begin_trial(reports.rollout(), [pod(3600.0)], 1, NOW + timedelta(milliseconds=700))
    assert rollout.trial_start_time == NOW
    trial = resume_trial(rollout, AnalysisSpec())
    assert trial is not None
    assert trial.pack_state() == rollout.state
    assert trial.state.crashes.control_pod_hours == pytest.approx(1.0, abs=0.01)
    assert trial.name_turn(3) == f"{NOW.timestamp():.0f}/3"
    assert trial.elapsed_seconds(NOW - timedelta(hours=1)) == 0.0


@pytest.mark.parametrize("state", ["", "unreadable", "e30="])
def test_state_of_another_release_is_counted_again(state: str) -> None:
    trial = resume_trial(reports.rollout(state=state), AnalysisSpec())
    assert trial is not None
    assert trial.state.closed_pair_count == 0


def test_no_trial_before_its_start() -> None:
    assert resume_trial(reports.rollout(trial_start_time=None), AnalysisSpec()) is None
