"""Windows that count, windows that are lost, and pairs that are counted once."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.switchback.design import drafter_in_window
from aerie.api.rollout import AnalysisSpec
from aerie.engine.drafter_endpoint.calls import DrafterFiles, LoadDrafter
from aerie.engine.drafter_endpoint.response import EndpointProblem
from aerie.engine.drafter_endpoint.state import DrafterWindow, FailedChange, Problem, WindowCursor
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.evidence import build_cursor, compute_close_time, count_pairs
from aerie.rollout.in_place.trial import Trial, resume_trial
from tests.unit.rollout.in_place import reports
from tests.unit.rollout.in_place.fleet import digest_of, drafter_files

ROLLOUT = reports.rollout()
T0 = reports.START.timestamp()
PREFIX = f"{T0:.0f}"


def trial() -> Trial:
    resumed = resume_trial(ROLLOUT, AnalysisSpec())
    assert resumed is not None
    return resumed


def drafter_name(number: int) -> str:
    return {"canary": "better", "stable": "eagle3"}[drafter_in_window("seed", 0, number)]


def windows(count: int, offset: float = 0.1) -> list[DrafterWindow]:
    """Return the first windows of a pod, each begun a moment late, and the current one."""
    starts = [T0 + 6.0 * number + offset for number in range(count + 1)]
    return [
        reports.window(number + 1, drafter_name(number), f"{PREFIX}/{number}", start, end, start + 2)
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], None], strict=True))
    ]


def count(items: list[DrafterWindow], seconds: float, before: Trial | None = None) -> Trial:
    pods = {"a": reports.pod(report=reports.state(windows=tuple(items)))}
    return count_pairs(before or trial(), ROLLOUT, pods, reports.START + timedelta(seconds=seconds))


def test_pair_is_counted_once_when_both_windows_are_read() -> None:
    after = count(windows(2), 12.2)
    assert (after.state.counted_pairs, after.state.lost_pairs, after.state.closed_pair_count) == (1, 0, 1)
    assert after.state.open_windows == {}
    assert count(windows(2), 12.3, after) == after
    assert count(windows(4), 24.3, after).state.counted_pairs == 2


def test_pair_in_progress_is_not_counted() -> None:
    assert count(windows(1), 11.9) == trial()


def test_pair_waits_for_its_last_counts_and_not_longer() -> None:
    unread = windows(1)
    assert count(unread, 12.5) == trial()
    close_time = compute_close_time(trial(), reports.START + timedelta(seconds=12.5))
    assert close_time == reports.START + timedelta(seconds=12 + 2 + 5)
    assert count(unread, 19.0).state.lost_pairs == 1


def change(item: DrafterWindow, kind: str) -> DrafterWindow:
    assert item.settled is not None
    assert item.ended is not None
    match kind:
        case "other drafter":
            return replace(item, digest=digest_of("worse"))
        case "too short":
            return replace(item, ended=item.ended - 2.1)
        case "too long":
            return replace(item, ended=item.ended + 2.1)
        case "not settled":
            return replace(item, settled=None)
        case "backwards":
            return replace(item, started=item.settled + 1)
        case _:
            return replace(item, counters=None)


@pytest.mark.parametrize("kind", ["other drafter", "too short", "too long", "not settled", "backwards", "no counters"])
@pytest.mark.parametrize("number", [0, 1])
def test_window_that_is_not_as_planned_is_lost(kind: str, number: int) -> None:
    items = windows(2)
    items[number] = change(items[number], kind)
    after = count(items, 12.2)
    assert (after.state.counted_pairs, after.state.lost_pairs) == (0, 1)
    assert after.state.tests == {}


def test_window_that_was_begun_twice_is_lost() -> None:
    items = windows(2)
    items.insert(1, replace(items[0], number=2))
    assert count(items, 12.2).state.lost_pairs == 1


OWN_WINDOW = reports.window(1, "eagle3", None, T0 - 100, None, T0 - 100)


def outcomes(trial: Trial) -> tuple[int, int, int]:
    """Return the numbers of pairs that are counted, lost and late."""
    return trial.state.counted_pairs, trial.state.lost_pairs, trial.state.late_pairs


def close_first_pair(*items: DrafterWindow, observation: dict[str, Any] | None = None, **state: Any) -> Trial:
    """Return the trial when the first pair of a pod with these windows waits no longer."""
    pod = reports.pod(report=reports.state(windows=items, **state), **(observation or {}))
    return count_pairs(trial(), ROLLOUT, {"a": pod}, reports.START + timedelta(seconds=19))


def load_of(number: int) -> LoadDrafter:
    return LoadDrafter(DrafterFiles(drafter_files("better"), "/folder"), 60.0, turn=f"{PREFIX}/{number}")


def test_pair_that_was_not_begun_in_time_is_late() -> None:
    for items in ((OWN_WINDOW,), (OWN_WINDOW, windows(2)[1])):
        after = close_first_pair(*items)
        assert outcomes(after) == (0, 0, 1)
        assert after.state.closed_pair_count == 1
        assert after.state.crashes.canary_pod_hours == 0.0
    after = count([OWN_WINDOW], 100.0)
    assert outcomes(after) == (0, 0, after.state.closed_pair_count)


def test_pair_is_lost_where_a_drafter_may_be_the_reason() -> None:
    first, second, following = windows(2)
    assert outcomes(close_first_pair(first)) == (0, 1, 0), "the first window lasts on"
    assert outcomes(close_first_pair(OWN_WINDOW, change(second, "too short"), following)) == (0, 1, 0)
    silent = {"problem": EndpointProblem("Timeout", "The pod does not answer: wait."), "failed_reads": 1}
    assert outcomes(close_first_pair(OWN_WINDOW, observation=silent)) == (0, 1, 0)
    for number, is_late in ((0, False), (1, False), (2, True)):
        after = close_first_pair(OWN_WINDOW, observation={"call": load_of(number)})
        assert outcomes(after) == ((0, 0, 1) if is_late else (0, 1, 0)), "a load of this pair still lasts"


@pytest.mark.parametrize("name", ["last_failure", "last_rejection"])
def test_pair_in_which_a_change_failed_is_lost(name: str) -> None:
    for seconds, expected in ((-1.0, (0, 0, 1)), (0.5, (0, 1, 0)), (14.0, (0, 1, 0))):
        failed = FailedChange(Problem("SwapFailed", "Out of memory."), digest_of("better"), T0 + seconds)
        state: dict[str, Any] = {name: failed}
        assert outcomes(close_first_pair(OWN_WINDOW, windows(2)[1], **state)) == expected


def test_operator_without_reports_counts_nothing_at_all() -> None:
    after = count_pairs(trial(), ROLLOUT, {"a": reports.pod()}, reports.START + timedelta(seconds=19))
    assert (after.state.closed_pair_count, *outcomes(after)) == (1, 0, 0, 0)


def test_windows_of_another_trial_do_not_count() -> None:
    items = [replace(item, turn=f"{T0 - 1:.0f}/{number}") for number, item in enumerate(windows(2))]
    assert count(items, 30.0).state.counted_pairs == 0


@pytest.mark.parametrize("number", [0, 1])
def test_engine_that_failed_counts_for_the_drafter_of_its_window(number: int) -> None:
    finished = (reports.START + timedelta(seconds=6 * number + 1)).isoformat()
    ended = {"terminated": {"exitCode": 1, "finishedAt": finished}}
    pod = reports.pod(ready=False)
    containers = [{"name": "engine", "restartCount": 1, "lastState": ended}]
    document = {**pod.document, "status": {**pod.document["status"], "containerStatuses": containers}}
    pods = {"a": EnginePod("a", document, pod.observation)}
    after = count_pairs(trial(), ROLLOUT, pods, reports.START + timedelta(seconds=19.5))
    crashes = after.state.crashes
    expected = (1, 0) if drafter_name(number) == "better" else (0, 1)
    assert (crashes.canary_crashes, crashes.control_crashes) == expected
    assert after.state.lost_pairs == 1


@pytest.mark.parametrize("offset", [-300.0, -0.7, 0.0, 300.0])
@pytest.mark.parametrize("number", [2, 3])
def test_engine_that_failed_counts_whatever_the_clock_of_its_node_is(number: int, offset: float) -> None:
    items = [
        replace(
            item, started=item.started + offset, settled=(item.settled or 0) + offset, ended=item.ended and item.ended + offset
        )
        for item in windows(2)
    ]
    after = count(items, 12.2)
    assert after.state.counted_pairs == 1
    rollout = reports.rollout(state=after.pack_state())
    resumed = resume_trial(rollout, AnalysisSpec())
    assert resumed == after
    failed_at = reports.START + timedelta(seconds=6 * number + 0.1 + offset)  # at the change
    ended = {"terminated": {"exitCode": 1, "finishedAt": failed_at.replace(microsecond=0).isoformat()}}
    pod = reports.pod(ready=False)
    containers = [{"name": "engine", "restartCount": 1, "lastState": ended}]
    document = {**pod.document, "status": {**pod.document["status"], "containerStatuses": containers}}
    pods = {"a": EnginePod("a", document, pod.observation)}
    crashes = count_pairs(after, rollout, pods, reports.START + timedelta(seconds=31.5)).state.crashes
    expected = (1, 0) if drafter_name(number) == "better" else (0, 1)
    assert (crashes.canary_crashes, crashes.control_crashes) == expected


def test_pod_that_is_gone_loses_its_pair_and_no_other() -> None:
    after = count_pairs(trial(), ROLLOUT, {}, reports.START + timedelta(seconds=12.1))
    assert (after.state.closed_pair_count, after.state.lost_pairs) == (1, 0)


@given(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from(("", "other drafter", "too short", "no counters"))), max_size=5),
    st.lists(st.floats(0, 60), min_size=1, max_size=6),
)
def test_counts_do_not_depend_on_when_they_are_read(faults: list[tuple[int, str]], moments: list[float]) -> None:
    items = windows(8)
    for number, kind in faults:
        if kind and number < 8:
            items[number] = change(items[number], kind) if items[number].counters is not None else items[number]
    resumed = trial()
    for seconds in sorted(moments):
        visible = [item for item in items if item.started <= T0 + seconds]
        if visible:
            visible[-1] = replace(visible[-1], ended=None)
        resumed = count(visible, seconds, resumed)
    assert count(items, 60.0, resumed).state.to_dict() == count(items, 60.0).state.to_dict()


def test_cursor_keeps_what_open_pairs_need() -> None:
    items = windows(4)
    state = reports.state(windows=tuple(items))
    assert build_cursor(state, trial()) == WindowCursor(state.process_id, 0)
    assert build_cursor(state, count(items[:3], 12.2)) == WindowCursor(state.process_id, 2)
    assert build_cursor(state, None) == WindowCursor(state.process_id, 4)
    assert build_cursor(None, None) is None
