"""The comparison by turns of one rollout in place: its plan, its counts, and how the status keeps both.

Windows begin at whole seconds, because the kubelet reports the end of a process in whole seconds: an engine that ends at a change
has ended in the window that begins with it.

Guarantees: a trial that is stored and resumed is the same one. A turn has one name in all trials of a pod, so a window of an
earlier trial is never taken for one of this trial. Not guaranteed: counts that an earlier release has stored in another form;
they are read again from the pods, as far as those keep their windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from aerie.analysis.measurement import codec
from aerie.analysis.switchback.design import MIN_WINDOW_SECONDS, Window, WindowSchedule, schedule_windows
from aerie.analysis.switchback.plan import SwitchbackPlan
from aerie.analysis.switchback.state import SwitchbackState, start_trial
from aerie.api.rollout import AnalysisSpec
from aerie.api.status import InPlaceRollout
from aerie.engine.metrics.sample import CounterReset, Counters, Gauges, Sample, diff_samples
from aerie.rollout.facts import pod_failures
from aerie.rollout.in_place.engine_pods import EnginePod

SECONDS_PER_POD = 0.004
"""Seconds that each pod of the fleet adds to the shortest possible windows. Reconciles are 3 ms for each object apart
(controller/reconciler.py), and each of them plans the calls of one window ahead."""
P90_PER_MEAN = math.log(10)
"""90th percentile of exponentially distributed durations, as a multiple of their mean."""
MIN_MEASURED_SECONDS = 10.0
"""Seconds below which a rate of requests counts as unknown."""


@dataclass(frozen=True)
class Trial:
    """A comparison by turns."""

    plan: SwitchbackPlan
    state: SwitchbackState
    started_at: datetime
    clock_offsets: Mapping[str, int] = field(default_factory=dict)
    """Whole seconds by which the clock of a pod's node is ahead of the operator's, by index of the pod, where that was seen."""

    def elapsed_seconds(self, now: datetime) -> float:
        """Return the seconds since the start; 0 for a clock that was set back."""
        return max(0.0, (now - self.started_at).total_seconds())

    def window_at(self, now: datetime) -> Window:
        """Return the present window."""
        return self.plan.schedule.window_at(self.elapsed_seconds(now))

    def name_turn(self, window_number: int) -> str:
        """Return the name of a window in calls."""
        return f"{self.started_at.timestamp():.0f}/{window_number}"

    def pack_state(self) -> str:
        """Return the counts as one word of text."""
        clock_offsets = {"clock_offsets": dict(self.clock_offsets)} if self.clock_offsets else {}
        return codec.pack({**self.state.to_dict(), **clock_offsets})


def resume_trial(rollout: InPlaceRollout, analysis: AnalysisSpec) -> Trial | None:
    """Return the trial of the status; None before it has begun. `analysis`: the parameters with which it began.

    A shadow evaluation and the trial after it share the errors that are allowed.
    """
    if rollout.trial_start_time is None or rollout.first_window_seconds is None or rollout.carryover_seconds is None:
        return None
    schedule = WindowSchedule(rollout.first_window_seconds, rollout.carryover_seconds)
    is_evaluation, result = rollout.phase == "Evaluating", rollout.evaluation.result if rollout.evaluation is not None else None
    plan = SwitchbackPlan(
        rollout.seed,
        schedule,
        analysis.goal,
        analysis.margin,
        max_duration_seconds=analysis.max_duration.total_seconds(),
        is_isolated=is_evaluation,
        error_share=0.5 if is_evaluation or result in ("Accepted", "Inconclusive") else 1.0,
        is_accepted=not is_evaluation and result == "Accepted" and analysis.shadow.only,
    )
    try:
        document = dict(codec.unpack(rollout.state))
        clock_offsets = document.pop("clock_offsets", {})
        state = SwitchbackState.from_dict(document)
    except (ValueError, KeyError, TypeError):
        state, clock_offsets = SwitchbackState(), {}
    return Trial(plan, state, rollout.trial_start_time, clock_offsets)


def begin_trial(rollout: InPlaceRollout, pods: Iterable[EnginePod], fleet_size: int, now: datetime) -> InPlaceRollout:
    """Return the rollout whose trial begins now, with windows for the requests that these pods had until now."""
    pods = tuple(pods)
    return begin_trial_at(rollout, schedule_trial(pods, fleet_size), pods, now)


def begin_trial_at(rollout: InPlaceRollout, schedule: WindowSchedule, pods: Sequence[EnginePod], now: datetime) -> InPlaceRollout:
    """Return the rollout whose trial begins now in these pods, with these windows."""
    started_at = now.replace(microsecond=0)
    hours = sum((now - (pod.placed_at or now)).total_seconds() for pod in pods) / 3600
    state = start_trial(hours, sum(pod_failures.read_restart_count(pod.document) for pod in pods))
    update = {
        "trial_start_time": started_at,
        "first_window_seconds": schedule.first_window_seconds,
        "carryover_seconds": schedule.carryover_seconds,
        "growth_step": 0,
        "state": codec.pack(state.to_dict()),
    }
    return rollout.model_copy(update=update)


def schedule_trial(pods: Iterable[EnginePod], fleet_size: int) -> WindowSchedule:
    """Return the windows for the mean rate and duration of these pods' requests, in whole seconds. Without requests, or where
    their rate is unknown, windows are the longest."""
    measured = [measurement for pod in pods if (measurement := _measure_requests(pod)) is not None]
    rate = sum(rate for rate, _ in measured) / max(1, len(measured))
    seconds = sum(rate * seconds for rate, seconds in measured) / (rate * len(measured)) if rate > 0 else 0.0
    return schedule_requests(rate, seconds, fleet_size)


def schedule_requests(requests_per_second: float, request_seconds: float, fleet_size: int) -> WindowSchedule:
    """Return the windows for pods with this rate of requests each, and this mean duration of requests, in whole seconds."""
    schedule = schedule_windows(requests_per_second, P90_PER_MEAN * request_seconds)
    shortest = max(schedule.first_window_seconds, MIN_WINDOW_SECONDS + SECONDS_PER_POD * fleet_size)
    return WindowSchedule(float(round(shortest)), float(round(schedule.carryover_seconds)))


def build_sample(counters: Counters) -> Sample:
    """Return a window's counters as a sample."""
    return Sample(counters, Gauges(None, None, None, None), frozenset())


def is_being_measured(pod: EnginePod) -> bool:
    """Return whether the rate of requests in the pod's open window is not known yet, and will be after further reads."""
    windows = pod.state.windows if pod.state is not None else ()
    return bool(windows) and windows[-1].ended is None and _count_between_reads(pod) is None


def measure_request_seconds(pod: EnginePod) -> float:
    """Return the mean duration of a pod's requests in seconds; 0 where that is unknown."""
    measurement = _measure_requests(pod)
    return 0.0 if measurement is None else measurement[1]


def _measure_requests(pod: EnginePod) -> tuple[float, float] | None:
    """Return a pod's finished requests per second, and their mean duration in seconds: between two reads, by the operator's
    clock; for a pod that was idle then, since its last change of the drafter, by its own clock and the operator's."""
    for seconds, counters in filter(None, (_count_between_reads(pod), _count_since_change(pod))):
        finished, first_token = sum(counters.finished.values()), counters.time_to_first_token
        if seconds >= MIN_MEASURED_SECONDS and finished > 0:
            first_token_seconds = first_token.sum / first_token.count if first_token.count > 0 else 0.0
            return finished / seconds, counters.step_seconds / finished + first_token_seconds
    return None


def _count_between_reads(pod: EnginePod) -> tuple[float, Counters] | None:
    """Return the seconds between two reads of a pod's open window, and what it counted meanwhile; None where there are none that
    are far enough apart."""
    earlier, latest = pod.observation.earlier_read, pod.observation.read_open_window()
    if earlier is None or latest is None or earlier.window.counters is None or latest.window.counters is None:
        return None
    seconds = (latest.read_at - earlier.read_at).total_seconds()
    counters = diff_samples(build_sample(earlier.window.counters), build_sample(latest.window.counters))
    return None if seconds < MIN_MEASURED_SECONDS or isinstance(counters, CounterReset) else (seconds, counters)


def _count_since_change(pod: EnginePod) -> tuple[float, Counters] | None:
    """Return the seconds that the counters of a pod's open window cover, and these counters."""
    latest = pod.observation.read_open_window()
    if latest is None or latest.window.counters is None or latest.window.settled is None:
        return None
    return latest.read_at.timestamp() - latest.window.settled, latest.window.counters
