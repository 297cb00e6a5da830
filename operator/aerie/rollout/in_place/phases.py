"""A rollout in place that continues: the calls, the condition and the next reconcile of its phase.

Guarantees: pure. A pod that is not on trial gets only what brings it to the stable drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from aerie.api.status import InPlacePhase
from aerie.engine.drafter_endpoint.calls import DrafterCall
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.in_place import messages, trial_pods
from aerie.rollout.in_place.deadline import time_until, time_until_deadline
from aerie.rollout.in_place.evaluation import plan_evaluation_calls
from aerie.rollout.in_place.evidence import build_cursor, compute_close_time
from aerie.rollout.in_place.return_pods import plan_return, plan_returns
from aerie.rollout.in_place.staging import check_preparation, order_for_trial
from aerie.rollout.in_place.step import Step, compute_growth_step, compute_return_deadline, find_unreturned, with_trial_state
from aerie.rollout.in_place.transition import InPlaceTransition, find_candidate
from aerie.rollout.in_place.trial import Trial
from aerie.rollout.in_place.turns import plan_turn
from aerie.rollout.plan import PodDrafterPlan, ScheduledCall

PHASES_WITHOUT_PROMOTION: frozenset[InPlacePhase] = frozenset({"Staging", "Evaluating", "Analyzing"})
"""Phases before any decision to promote: without pods they restart."""
MEASUREMENT_INTERVAL = timedelta(seconds=2)
"""Delay of the next reconcile while a start waits for a rate of requests: no event shows that it is known."""


def continue_rollout(step: Step, *, is_new_phase: bool = False) -> InPlaceTransition:
    """Return the transition of a rollout that has not ended: the calls and the condition of its phase."""
    if step.snapshot.resource.spec.replicas == 0 and step.rollout.phase in PHASES_WITHOUT_PROMOTION:
        return _wait_for_pods(step)
    if step.progress is not None and step.progress.has_closed_pair and not is_new_phase:
        step = with_trial_state(step)
    rollout = step.rollout
    condition, drafters, requeue_after = _plan_phase(step)
    return InPlaceTransition(
        rollout,
        condition,
        step.analysis or step.status.analysis,
        step.stable.in_place,
        # Only once the status has the phase: else a pod that restarts could come to it, and nobody would know.
        find_candidate(rollout) if rollout.phase == "Promoting" and not is_new_phase else step.stable.in_place,
        drafters,
        requeue_after=timedelta(0) if is_new_phase else requeue_after,
    )


def _plan_phase(step: Step) -> tuple[ConditionUpdate, tuple[PodDrafterPlan, ...], timedelta | None]:
    """Return the condition of a phase, the plans of its pods, and the delay until something changes without an event."""
    rollout, now, phase = step.rollout, step.now, step.rollout.phase
    deadline_delay = time_until_deadline(rollout.phase_start_time, step.spec.progress_deadline, now)
    match phase:
        case "Staging":
            staging = step.staging
            assert staging is not None
            calls = {item.pod.name: item.call for item in staging.preparations if item.call is not None}
            condition = messages.build_staging_condition(rollout, staging)
            requeue_after = MEASUREMENT_INTERVAL if staging.is_measuring else deadline_delay
            return condition, _plan_drafters(step, calls, {}, None), requeue_after
        case "Evaluating":
            evaluation = step.evaluation
            assert evaluation is not None
            trial = step.progress.trial if step.progress is not None else None
            condition = messages.build_evaluation_condition(rollout, evaluation, step.analysis)
            drafters = _plan_drafters(step, *plan_evaluation_calls(rollout, step.source, evaluation, trial, now), trial)
            requeue_after = _time_until_next_turn(trial, now) if trial is not None else MEASUREMENT_INTERVAL
            return condition, drafters, requeue_after
        case "Analyzing":
            trial = step.progress.trial if step.progress is not None else None
            condition = messages.build_analysis_condition(rollout, step.analysis)
            drafters = _plan_drafters(step, *_plan_trial_calls(step, trial), trial)
            return condition, drafters, _time_until_next_turn(trial, now)
        case "Promoting":
            condition = messages.build_promotion_condition(rollout, step.promotion)
            due_calls = step.promotion.calls if step.promotion is not None else {}
            drafters = tuple(
                PodDrafterPlan(pod.name, due_calls.get(pod.name), build_cursor(pod.state, None)) for pod in step.pods
            )
            slow_at = step.promotion.next_slow_at if step.promotion is not None else None
            slow_delay = None if slow_at is None else time_until(slow_at, now)
            delays = [delay for delay in (slow_delay, deadline_delay) if delay is not None]
            return condition, drafters, min(delays, default=None)
        case "AwaitingApproval" | "Held":
            condition = messages.build_waiting_condition(step.snapshot.resource, rollout, step.analysis)
            return condition, *plan_returns(step.pods, step.stable.in_place, now)
        case "RollingBack":
            condition = messages.build_return_condition(rollout, find_unreturned(step))
            drafters, _ = plan_returns(step.pods, step.stable.in_place, now)
            return condition, drafters, time_until(compute_return_deadline(rollout), now)


def _wait_for_pods(step: Step) -> InPlaceTransition:
    """Return the transition at zero replicas: without pods nothing can be judged, except by a user."""
    message = f"spec.replicas is 0: the trial of revision {step.rollout.revision} restarts once pods are requested."
    update: dict[str, object] = {
        **dict.fromkeys(("files", "digest", "kind", "replaced"), None),
        **dict.fromkeys(("trial_start_time", "first_window_seconds", "carryover_seconds", "evaluation"), None),
        "phase": "Staging",
        "pods": [],
        "state": "",
        "growth_step": 0,
    }
    return InPlaceTransition(
        step.rollout.model_copy(update=update),
        ConditionUpdate(PROGRESSING, "False", "ScaledToZero", message),
        step.status.analysis,
        step.stable.in_place,
        step.stable.in_place,
        plan_returns(step.pods, step.stable.in_place, step.now)[0],
    )


def _plan_trial_calls(step: Step, trial: Trial | None) -> tuple[Mapping[str, DrafterCall], Mapping[str, ScheduledCall]]:
    """Return the turns of the pods on trial and the preparations of those that join next, and the turns of the next window."""
    calls: dict[str, DrafterCall] = {}
    next_calls: dict[str, ScheduledCall] = {}
    if trial is None:
        return calls, next_calls
    rollout, pods_by_name = step.rollout, {pod.name: pod for pod in step.pods}
    for trial_pod in rollout.pods:
        pod = pods_by_name.get(trial_pod.name)
        if pod is None or pod.uid != trial_pod.uid or not pod.is_ready:
            continue
        call, next_call = plan_turn(trial, rollout, step.source, trial_pod, pod, step.now)
        if call is not None:
            calls[pod.name] = call
        if next_call is not None:
            next_calls[pod.name] = next_call
    desired_count = trial_pods.count_desired_pods(
        step.spec, step.snapshot.resource.spec.replicas, compute_growth_step(step, trial)
    )
    missing = desired_count - len(rollout.pods)
    members = {pod.name for pod in rollout.pods}
    served = rollout.replaced.digest if rollout.replaced is not None else None
    for pod in order_for_trial(step.pods, served) if missing > 0 else ():
        if pod.name in members or not pod.is_ready:
            continue
        preparation = check_preparation(pod, step.source, served, rollout.phase_start_time)
        if preparation.problem:
            continue
        if preparation.call is not None:
            calls[pod.name] = preparation.call
        missing -= 1
        if missing == 0:
            break
    return calls, next_calls


def _plan_drafters(
    step: Step, calls: Mapping[str, DrafterCall], next_calls: Mapping[str, ScheduledCall], trial: Trial | None
) -> tuple[PodDrafterPlan, ...]:
    """Return the plans of all pods: these calls, and for pods that are not on trial what brings them to the stable drafter."""
    served, is_evaluation = step.stable.in_place, step.rollout.phase == "Evaluating"
    members = {(pod.name, pod.uid) for pod in step.rollout.pods} if trial is not None or is_evaluation else set()
    measured = step.staging.measured_pods if step.staging is not None else ()
    if is_evaluation and trial is None:
        measured = tuple(pod.name for pod in step.rollout.pods)
    return tuple(
        PodDrafterPlan(
            pod.name,
            calls.get(pod.name) or (None if (pod.name, pod.uid) in members else plan_return(pod, served, step.now)),
            build_cursor(pod.state, trial),
            next_calls.get(pod.name),
            is_measured=pod.name in measured,
        )
        for pod in step.pods
    )


def _time_until_next_turn(trial: Trial | None, now: datetime) -> timedelta | None:
    """Return the delay until the next window, the end of a wait for the last pair, or the end of the trial."""
    if trial is None:
        return None
    moments = [
        trial.started_at + timedelta(seconds=trial.window_at(now).end_seconds),
        compute_close_time(trial, now),
        trial.started_at + timedelta(seconds=trial.plan.max_duration_seconds),
    ]
    return min(time_until(moment, now) for moment in moments if moment is not None and moment > now)
