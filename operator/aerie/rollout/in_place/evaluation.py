"""Shadow evaluation: both drafters answer the same requests in a pod that users do not reach, before users meet the new one.

    Staging ─► one pod is isolated: not ready ─► it has finished its requests ─► windows ─┬─► worse ─► RollingBack
                                                                                          └─► Staging, and then turns

It is a trial by turns (trial.py) in that one pod. The evaluator (aerie.evaluator) sends it requests in the first window of a
pair, and the same requests in the second one. So the score of a pair contains the drafters' difference and hardly that of the
requests.

Guarantees: pure. No window begins before the pod is not ready and has finished the requests of users. Every change is made only
while the pod is isolated. An isolation that is not renewed ends with the pod's own drafter, before users reach the pod. A shadow
evaluation that cannot be carried out, or has no verdict in time, does not end the rollout. Not guaranteed: that all requests of a
pair end in their window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from aerie.analysis.switchback.design import WindowSchedule
from aerie.api.rollout import RolloutSpec
from aerie.api.status import InPlaceRollout, ShadowEvaluation, TrialPod
from aerie.api.types import duration
from aerie.engine.drafter_endpoint.calls import DrafterCall, DrafterSource, IsolatePod
from aerie.manifests.engine_key import find_engine_key
from aerie.rollout.conditions import truncate_message
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.observation import TrialProgress
from aerie.rollout.in_place.trial import Trial, begin_trial_at, measure_request_seconds
from aerie.rollout.in_place.turns import plan_turn
from aerie.rollout.plan import ScheduledCall

MIN_READY_PODS, MIN_READY_PODS_BY_DEFAULT = 2, 4
"""Ready pods without which no pod is isolated: users need at least one. An evaluation that the spec does not ask for takes no
more than a quarter of the capacity."""
MIN_WINDOW_SECONDS, MAX_WINDOW_SECONDS, REQUEST_DURATIONS_PER_WINDOW = 8.0, 60.0, 3.0
"""Bounds of the windows, and their length as a multiple of the mean duration of a request."""
WASHOUT_SECONDS = 2.0
"""Seconds of a window in which a change may be late; the evaluator sends nothing in them."""
MIN_ISOLATION = timedelta(seconds=10)
"""Minimum time from the isolation to the first window: load balancers take some seconds to leave a pod out."""
MAX_ISOLATION = timedelta(minutes=10)
"""Time after which an isolated pod that has not finished its requests is given back."""
ISOLATION_LEASE_SECONDS, RENEWAL_SECONDS = 120.0, 40.0
"""Seconds of an isolation, and the remaining seconds below which it is renewed although no change is due."""


@dataclass(frozen=True)
class EvaluationProgress:
    """How far a shadow evaluation is."""

    pod: EnginePod | None
    """The pod that it is in; None if the pod has ended."""
    waiting: str = ""
    """What it waits for before the first window, as a clause; empty once it can begin or has begun."""
    ended: ShadowEvaluation | None = None
    """Its result; None while it lasts, and where the drafter is rolled back."""


def explain_skip(spec: RolloutSpec, pods: Sequence[EnginePod], selected: Sequence[EnginePod]) -> str:
    """Return why no shadow evaluation is possible, as a sentence; empty where it is, or where none is requested.

    `selected`: the pods that have prepared the drafter.
    """
    if spec.shadow_source == "None":
        return ""
    ready, is_default = sum(pod.is_ready for pod in pods), spec.analysis.shadow.source is None
    needed = MIN_READY_PODS_BY_DEFAULT if is_default else MIN_READY_PODS
    if ready < needed:
        advice = " To evaluate with 2 pods too, set spec.rollout.analysis.shadow.source." if is_default else ""
        verb = "is" if ready == 1 else "are"
        return f"It needs {needed} ready pods, because one of them gets no requests of users, and {ready} {verb} ready.{advice}"
    state = selected[0].state
    if state is None or not state.can_isolate:
        return f"Pod {selected[0].name} has an earlier release of the plugin: renew the pods with the annotation aerie.dev/renew."
    return find_engine_key(selected[0].document).problem


def begin_evaluation(rollout: InPlaceRollout, pod: EnginePod) -> InPlaceRollout:
    """Return the rollout whose shadow evaluation begins with the isolation of this pod."""
    schedule = schedule_evaluation(measure_request_seconds(pod))
    update = {
        "pods": [TrialPod(name=pod.name, uid=pod.uid, index=0)],
        "first_window_seconds": schedule.first_window_seconds,
        "carryover_seconds": schedule.carryover_seconds,
    }
    return rollout.model_copy(update=update)


def schedule_evaluation(request_seconds: float) -> WindowSchedule:
    """Return the windows for requests with this mean duration."""
    seconds = min(max(MIN_WINDOW_SECONDS, REQUEST_DURATIONS_PER_WINDOW * request_seconds), MAX_WINDOW_SECONDS)
    return WindowSchedule(float(round(seconds)), WASHOUT_SECONDS)


def end_evaluation(rollout: InPlaceRollout, result: ShadowEvaluation) -> InPlaceRollout:
    """Return the rollout after its shadow evaluation, before the trial under users' traffic."""
    update: dict[str, object] = {
        **dict.fromkeys(("files", "digest", "kind", "replaced"), None),
        **dict.fromkeys(("trial_start_time", "first_window_seconds", "carryover_seconds"), None),
        "pods": [],
        "state": "",
        "evaluation": result,
    }
    return rollout.model_copy(update=update)


def start_windows(rollout: InPlaceRollout, pod: EnginePod, now: datetime) -> InPlaceRollout:
    """Return the rollout whose shadow evaluation has its first window now."""
    assert rollout.first_window_seconds is not None
    assert rollout.carryover_seconds is not None
    return begin_trial_at(rollout, WindowSchedule(rollout.first_window_seconds, rollout.carryover_seconds), (pod,), now)


def observe_evaluation(
    rollout: InPlaceRollout,
    pods: Sequence[EnginePod],
    progress: TrialProgress | None,
    now: datetime,
    route_rejection: str = "",
) -> EvaluationProgress:
    """Return the progress of the shadow evaluation. `progress`: that of its windows; None before the first one.
    `route_rejection`: why no gateway accepts the route that copies requests, as a sentence. It ends the evaluation, because
    users' requests may fail while the route has a filter that its gateway does not support."""
    trial_pod = rollout.pods[0]
    pod = next((pod for pod in pods if (pod.name, pod.uid) == (trial_pod.name, trial_pod.uid)), None)
    end = _skip if progress is None else _end_without_verdict
    if pod is None:
        return EvaluationProgress(None, ended=end(f"Pod {trial_pod.name} has ended."))
    if route_rejection:
        return EvaluationProgress(pod, ended=end(route_rejection))
    if progress is None:
        isolation = pod.state.isolation if pod.state is not None else None
        if isolation is not None and isolation.unfinished_requests is None:
            return EvaluationProgress(pod, ended=_skip(f"Pod {pod.name} does not report whether it still serves users."))
        waiting = _describe_wait(pod, rollout, now)
        if waiting and now >= rollout.phase_start_time + MAX_ISOLATION:
            return EvaluationProgress(pod, ended=_skip(f"Pod {pod.name} {waiting} after {_format(MAX_ISOLATION)}."))
        return EvaluationProgress(pod, waiting)
    state = pod.state
    if state is not None and pod.observation.failed_reads == 0 and _has_left_isolation(pod, progress.trial):
        return EvaluationProgress(pod, ended=_end_without_verdict(f"The isolation of pod {pod.name} has ended early."))
    message = truncate_message(progress.analysis.message)
    if progress.analysis.verdict == "Promote":
        return EvaluationProgress(pod, ended=ShadowEvaluation(result="Accepted", message=message))
    if progress.analysis.verdict == "Inconclusive":
        return EvaluationProgress(pod, ended=_end_without_verdict(message))
    return EvaluationProgress(pod)


def plan_evaluation_calls(
    rollout: InPlaceRollout, source: DrafterSource, evaluation: EvaluationProgress, trial: Trial | None, now: datetime
) -> tuple[Mapping[str, DrafterCall], Mapping[str, ScheduledCall]]:
    """Return the call of the isolated pod, and that of its next window."""
    pod = evaluation.pod
    if pod is None or pod.state is None:
        return {}, {}
    call, next_call = None, None
    if trial is not None:
        call, next_call = plan_turn(trial, rollout, source, rollout.pods[0], pod, now, isolated=True)
    isolation = pod.state.isolation
    if call is None and (isolation is None or isolation.remaining_seconds < RENEWAL_SECONDS):
        call = IsolatePod(ISOLATION_LEASE_SECONDS)  # before the first window, or changes have been late
    return {pod.name: call} if call is not None else {}, {pod.name: next_call} if next_call is not None else {}


def _describe_wait(pod: EnginePod, rollout: InPlaceRollout, now: datetime) -> str:
    """Return what the first window waits for, as a clause; empty if it can begin."""
    isolation = pod.state.isolation if pod.state is not None else None
    if isolation is None:
        return "is about to be isolated"
    if pod.is_ready:
        return "is isolated, and not yet left out by the Services"
    if isolation.unfinished_requests:
        return "is isolated, and still serves requests of users"
    if now < rollout.phase_start_time + MIN_ISOLATION:
        return "is isolated, and about to be left out by load balancers"
    return ""


def _has_left_isolation(pod: EnginePod, trial: Trial) -> bool:
    """Return whether a pod was read after the trial began, and reports no isolation."""
    read_at = pod.observation.state_read_at
    return pod.state is not None and pod.state.isolation is None and read_at is not None and read_at > trial.started_at


def _end_without_verdict(message: str) -> ShadowEvaluation:
    """Return the result of an evaluation that has begun, and so has spent its part of the errors."""
    return ShadowEvaluation(result="Inconclusive", message=truncate_message(message))


def _skip(message: str) -> ShadowEvaluation:
    return ShadowEvaluation(result="Skipped", message=truncate_message(message))


def _format(period: timedelta) -> str:
    return duration.format_duration(period)
