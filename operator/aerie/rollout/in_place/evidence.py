"""The counts of windows that have ended, from the pods' own reports to the state of the test.

A pair of windows is closed as soon as both are read from all pods on trial, and GRACE_SECONDS after the next wash-out at the
latest. What has not been read by then is lost.

Guarantees: pure. A window counts only if its name and its drafter are right, and the time that it counted is about that of the
plan; so a change that came too late, or a pod that returned earlier, never counts for the other drafter. Windows are measured by
the pod's own clock, whatever the operator's is. The end of an engine is by the clock of its node, which is the pod's; its
difference to the operator's follows from the windows that the pod reports, and is stored with each pair. Each pair is closed
once, and its counts are in the state.

A pod's pair is lost if it began a window whose counts cannot be used, its engine ended, a change failed or lasts on, or the pod
does not answer: each may be due to a drafter. It is late, and not lost, if the pod answers and did not begin the first
window: the operator did not send the call in time, was away, or the rollout paused. That was so before either drafter of the pair
was loaded, and the coin of a pair depends on nothing before it. So late pairs cannot hide a harmful drafter. A first window that
was begun and lasts on, because the call of the second was late, is lost: its drafter may have delayed that call.

Not guaranteed: that an engine which ended had the drafter of its window, where that change had failed just before. The order is
drawn, so this favours neither drafter. Nor that an engine's end is counted, where the node's clock differs and no window of
the pod has been read with an earlier pair. Nor that a failed change is found, where the pod's clock is behind
by more than a window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from aerie.analysis.measurement.counts import SampleProjection, read_counters
from aerie.analysis.switchback.design import Window, drafter_in_window
from aerie.analysis.switchback.plan import WindowCounts
from aerie.analysis.switchback.state import add_window, close_pair
from aerie.api.speculation import MAX_SPECULATIVE_TOKENS
from aerie.api.status import InPlaceRollout
from aerie.engine.drafter_endpoint.calls import LoadDrafter
from aerie.engine.drafter_endpoint.state import DrafterState, DrafterWindow, WindowCursor
from aerie.engine.metrics.sample import Counters
from aerie.rollout.facts import pod_failures
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.trial import Trial, build_sample

GRACE_SECONDS = 5.0
"""Seconds after the wash-out of the next window in which the last counts of a pair can be read."""
MAX_OPEN_PAIRS = 64
"""Pairs that are looked for after an absence of the operator: those that pods still report."""


@dataclass(frozen=True)
class _PodWindow:
    """What is known of one window of one pod."""

    counts: WindowCounts | None = None
    is_final: bool = False
    """Whether a later report can add nothing."""
    is_begun: bool = False
    """Whether the pod has begun it."""
    restarts: int = 0
    """Whether its engine has failed in it: 1, or 0."""


def count_pairs(trial: Trial, rollout: InPlaceRollout, pods: Mapping[str, EnginePod], now: datetime) -> Trial:
    """Return the trial with all pairs that have ended and are read, or wait no longer. The same state: there is none."""
    current_pair = trial.window_at(now).number // 2
    for pair in range(max(trial.state.closed_pair_count, current_pair - MAX_OPEN_PAIRS), current_pair):
        closed = _close_pair(trial, rollout, pods, pair, now)
        if closed is None:
            break
        trial = closed
    return trial


def compute_close_time(trial: Trial, now: datetime) -> datetime | None:
    """Return until when the pair before the present one is waited for; None if it is closed."""
    pair = trial.window_at(now).number // 2 - 1  # every earlier one is closed by now
    if pair < trial.state.closed_pair_count:
        return None
    return trial.started_at + timedelta(seconds=_close_seconds(trial, pair))


def build_cursor(state: DrafterState | None, trial: Trial | None) -> WindowCursor | None:
    """Return up to where a pod's windows are not read again: up to the last that has ended, or that an open pair still needs."""
    if state is None or not state.windows:
        return None
    first_turn = None if trial is None else 2 * trial.state.closed_pair_count
    for window in state.windows:
        if window.ended is None or (first_turn is not None and trial is not None and _is_needed(window, trial, first_turn)):
            return WindowCursor(state.process_id, window.number - 1)
    return WindowCursor(state.process_id, state.windows[-1].number)


def _is_needed(window: DrafterWindow, trial: Trial, first_turn: int) -> bool:
    prefix, _, number = (window.turn or "").rpartition("/")
    return prefix == trial.name_turn(0).rpartition("/")[0] and number.isdecimal() and int(number) >= first_turn


def _close_seconds(trial: Trial, pair: int) -> float:
    """Return the seconds since the start after which a pair is closed in any case."""
    following = trial.plan.schedule.window(2 * pair + 2)
    return following.start_seconds + following.washout_seconds + GRACE_SECONDS


def _close_pair(trial: Trial, rollout: InPlaceRollout, pods: Mapping[str, EnginePod], pair: int, now: datetime) -> Trial | None:
    """Return the trial with a pair closed; None while it is waited for."""
    numbers = (2 * pair, 2 * pair + 1)
    trial = _with_clock_offsets(trial, rollout, pods, numbers)
    members = [trial_pod for trial_pod in rollout.pods if trial_pod.first_pair <= pair]
    present = {item.index: pod for item in members if (pod := pods.get(item.name)) is not None and pod.uid == item.uid}
    results = {
        item.index: [_read_window(trial, rollout, item.index, present.get(item.index), number) for number in numbers]
        for item in members
    }
    windows = [window for pod_windows in results.values() for window in pod_windows]
    if not all(window.is_final for window in windows) and trial.elapsed_seconds(now) < _close_seconds(trial, pair):
        return None
    has_begun = any(window.is_begun or window.restarts for window in windows)
    state, indexes, late_pairs = trial.state, [], 0
    for index, pod_windows in results.items():
        pod = present.get(index)
        is_unread = pod is None or (pod.state is None and pod.observation.failed_reads == 0)
        if is_unread and not has_begun:  # the operator was away
            continue
        if pod is not None and _is_late(trial, pod, pair, pod_windows):
            late_pairs += 1
            continue
        indexes.append(index)
        for number, window in zip(numbers, pod_windows, strict=True):
            state = add_window(state, index, number, window.counts, window.restarts)
    return replace(trial, state=close_pair(state, trial.plan, pair, indexes, late_pairs))


def _is_late(trial: Trial, pod: EnginePod, pair: int, windows: Sequence[_PodWindow]) -> bool:
    """Return whether a pod did not begin the first window of a pair, and neither the pod nor a drafter can be the reason."""
    first, second = windows
    if first.is_begun or first.restarts or second.restarts or (second.is_begun and second.counts is None):
        return False
    is_answering = pod.state is not None and pod.observation.failed_reads == 0
    return is_answering and not _has_delayed(trial, pod, pair)


def _has_delayed(trial: Trial, pod: EnginePod, pair: int) -> bool:
    """Return whether a pod itself has delayed a change of the pair: one of its changes has failed since, or still lasts."""
    call, state = pod.observation.call, pod.state
    if isinstance(call, LoadDrafter) and call.turn in (trial.name_turn(2 * pair), trial.name_turn(2 * pair + 1)):
        return True
    begun_at = trial.started_at.timestamp() + trial.plan.schedule.window(2 * pair).start_seconds
    failed = (state.last_failure, state.last_rejection) if state is not None else ()
    return any(change is not None and change.time >= begun_at for change in failed)


def _read_window(trial: Trial, rollout: InPlaceRollout, index: int, pod: EnginePod | None, number: int) -> _PodWindow:
    """Return what is known of a pod's window. `pod`: None if it was removed."""
    if pod is None:
        return _PodWindow(is_final=True)
    window = trial.plan.schedule.window(number)
    restarts = _count_restarts(trial, index, pod, window)
    reported = [item for item in (pod.state.windows if pod.state else ()) if item.turn == trial.name_turn(number)]
    if not reported:
        return _PodWindow(restarts=restarts)
    is_canary = drafter_in_window(trial.plan.seed, index, number) == "canary"
    replaced_digest = rollout.replaced.digest if rollout.replaced is not None else None
    digest = rollout.digest if is_canary else replaced_digest
    counts = _read_counts(reported, digest, window)
    return _PodWindow(counts, is_final=reported[-1].ended is not None, is_begun=True, restarts=restarts)


def _with_clock_offsets(trial: Trial, rollout: InPlaceRollout, pods: Mapping[str, EnginePod], numbers: tuple[int, int]) -> Trial:
    """Return the trial with the differences of the pods' clocks that these windows show: containers have their node's clock.

    A window begins up to a wash-out late, so a smaller delay is not the clock's.
    """
    offsets = dict(trial.clock_offsets)
    for item in rollout.pods:
        pod = pods.get(item.name)
        reported = pod.state.windows if pod is not None and pod.uid == item.uid and pod.state is not None else ()
        planned = {trial.name_turn(number): trial.plan.schedule.window(number) for number in numbers}
        delays = [
            (entry.started - trial.started_at.timestamp() - window.start_seconds, window.washout_seconds)
            for entry in reported
            if (window := planned.get(entry.turn or "")) is not None
        ]
        if delays:
            delay, washout_seconds = min(delays)
            offsets[str(item.index)] = 0 if 0 <= delay <= washout_seconds else math.floor(delay)
    return replace(trial, clock_offsets=offsets)


def _count_restarts(trial: Trial, index: int, pod: EnginePod, window: Window) -> int:
    """Return whether the pod's engine has failed in a window: the time is of the clock of the pod's node."""
    failed_at = pod_failures.read_engine_failure_time(pod.document)
    if failed_at is None:
        return 0
    seconds = (failed_at - trial.started_at).total_seconds() - trial.clock_offsets.get(str(index), 0)
    return int(window.start_seconds <= seconds < window.end_seconds)


def _read_counts(reported: Sequence[DrafterWindow], digest: str | None, window: Window) -> WindowCounts | None:
    """Return the counts of a window; None if they are lost. A window that a pod has begun twice was interrupted."""
    (item, *others) = reported
    if others or item.digest != digest or item.counters is None or item.settled is None or item.ended is None:
        return None
    is_as_planned = abs(item.ended - item.settled - window.counted_seconds) <= window.washout_seconds
    return convert_counters(item.counters) if is_as_planned and item.started <= item.settled else None


def convert_counters(counters: Counters) -> WindowCounts:
    """Return what the test needs of a window's counters."""
    snapshot = read_counters(build_sample(counters), SampleProjection(MAX_SPECULATIVE_TOKENS))
    return WindowCounts.from_engine_counts(snapshot.counts)
