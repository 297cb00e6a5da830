"""The call of a pod on trial in each window."""

from __future__ import annotations

from datetime import timedelta

import pytest

from aerie.analysis.switchback.design import drafter_in_window
from aerie.api.rollout import AnalysisSpec
from aerie.api.status import TrialPod
from aerie.engine.drafter_endpoint.calls import DrafterCall, DrafterFiles, LoadDrafter, PrepareDrafter
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.trial import Trial, resume_trial
from aerie.rollout.in_place.turns import compute_lease_seconds, plan_turn
from aerie.rollout.plan import ScheduledCall
from tests.unit.rollout.in_place import reports
from tests.unit.rollout.in_place.fleet import digest_of, drafter_files, folder_of

ROLLOUT = reports.rollout()
TURN = f"{reports.START.timestamp():.0f}"


def trial() -> Trial:
    resumed = resume_trial(ROLLOUT, AnalysisSpec())
    assert resumed is not None
    return resumed


def plan_both(pod: EnginePod, seconds: float, first_pair: int = 0) -> tuple[DrafterCall | None, ScheduledCall | None]:
    trial_pod = TrialPod(name="a", uid="uid-a", index=0, first_pair=first_pair)
    return plan_turn(trial(), ROLLOUT, reports.SOURCE, trial_pod, pod, reports.START + timedelta(seconds=seconds))


def plan(pod: EnginePod, seconds: float, first_pair: int = 0) -> DrafterCall | None:
    return plan_both(pod, seconds, first_pair)[0]


@pytest.mark.parametrize("number", range(6))
def test_each_window_has_a_load_with_lease_turn_and_expected_drafter(number: int) -> None:
    call = plan(reports.pod(report=reports.state()), 6.0 * number + 0.5)
    name = {"canary": "better", "stable": "eagle3"}[drafter_in_window("seed", 0, number)]
    folder = folder_of("better") if name == "better" else None
    files = DrafterFiles(drafter_files(name), folder)
    assert call == LoadDrafter(files, 60.0, digest_of("eagle3"), f"{TURN}/{number}", settle_seconds=2.0)


def test_call_stays_the_same_until_the_end_of_the_wash_out() -> None:
    pod = reports.pod(report=reports.state())
    assert plan(pod, 0.0) == plan(pod, 1.99) is not None
    assert plan(pod, 2.0) is None


def test_begun_window_needs_no_call() -> None:
    begun = reports.window(2, "eagle3", f"{TURN}/0", 0.0, None, 2.0)
    assert plan(reports.pod(report=reports.state(windows=(begun,))), 1.0) is None


@pytest.mark.parametrize(
    "pod",
    [
        reports.pod(report=None),
        reports.pod(report=reports.state(own="worse")),
        reports.pod(report=reports.state(loaded="better", prepared=reports.prepared("worse"))),
    ],
)
def test_pod_with_other_files_gets_no_drafter(pod: EnginePod) -> None:
    assert plan(pod, 0.5) is None


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("is_begun", [True, False])
def test_next_window_has_the_call_that_it_will_have_then(number: int, is_begun: bool) -> None:
    """So a reconcile that comes in time, and repeats it, changes nothing."""
    now, following = (
        {"canary": "better", "stable": "eagle3"}[drafter_in_window("seed", 0, each)] for each in (number, number + 1)
    )
    begun = (reports.window(2, now, f"{TURN}/{number}", 6.0 * number, None, 2.0),) if is_begun else ()
    call, next_call = plan_both(reports.pod(report=reports.state(loaded=now, windows=begun)), 6.0 * number + 0.5)
    assert (call is None) == is_begun
    assert next_call is not None
    assert isinstance(next_call.call, LoadDrafter)
    assert next_call.due_at == reports.START + timedelta(seconds=6.0 * number + 6.0)
    assert next_call.call == plan(reports.pod(report=reports.state(loaded=now)), 6.0 * number + 6.0)
    assert next_call.call.drafter == DrafterFiles(
        drafter_files(following), folder_of("better") if following == "better" else None
    )


def test_next_window_replaces_the_drafter_of_a_window_that_is_lost() -> None:
    pod = reports.pod(report=reports.state())
    for number in range(6):
        _, next_call = plan_both(pod, 6.0 * number + 3.0)
        assert next_call is not None
        assert isinstance(next_call.call, LoadDrafter)
        assert next_call.call.expected_digest == digest_of("eagle3")


def test_no_window_begins_after_the_end_of_the_trial() -> None:
    resumed = trial()
    last = resumed.window_at(reports.START + timedelta(seconds=resumed.plan.max_duration_seconds - 0.5))
    assert plan_both(reports.pod(report=reports.state()), last.start_seconds + 0.1)[1] is None


def test_pod_that_joins_later_waits_for_its_first_pair() -> None:
    pod = reports.pod(report=reports.state())
    assert plan(pod, 6.5, first_pair=1) is None
    assert plan(pod, 12.5, first_pair=1) is not None
    assert plan_both(pod, 0.5, first_pair=1)[1] is None
    assert plan_both(pod, 6.5, first_pair=1)[1] is not None


def test_restarted_process_prepares_again() -> None:
    assert plan(reports.pod(report=reports.state(prepared=None)), 0.5) == PrepareDrafter(reports.SOURCE)


@pytest.mark.parametrize(("window", "lease"), [(4.0, 60.0), (20.0, 60.0), (60.0, 180.0), (240.0, 720.0), (1000.0, 900.0)])
def test_lease(window: float, lease: float) -> None:
    assert compute_lease_seconds(window) == lease
