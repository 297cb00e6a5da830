"""One rollout in place, advanced by one reconcile: its observation, the transition of the state machine, and the result.

    pods' reports ─► staging, trial, promotion or return ─┐
    a user's annotation, the spec ────────────────────────┴─► InPlaceObservation ─► find_transition ─► status, calls, outcome

Guarantees: pure. The calls of a phase are planned with the status that names it, so they are sent only once it is stored. While
spec.replicas is 0 nothing is judged; the trial restarts with the first pods. The deadlines of Staging and Promoting restart
after a pause. Not guaranteed: that every rollout ends; one that is held waits for a user.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import datetime

from aerie.api.status import Arm, InPlacePhase, InPlaceRollout, PendingOutcome, ShadowEvaluation, Status
from aerie.rollout.canary.observation import read_manual_action
from aerie.rollout.canary.state_machine import MANUAL_ROLLBACK_MESSAGE
from aerie.rollout.conditions import PROGRESSING, truncate_message
from aerie.rollout.facts.route_status import route_rejection_message
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.in_place import messages, trial_pods
from aerie.rollout.in_place.deadline import is_preparation_untried, is_time_over
from aerie.rollout.in_place.endings import end_impossible, end_promoted, end_returned
from aerie.rollout.in_place.engine_pods import list_engine_pods
from aerie.rollout.in_place.evaluation import (
    begin_evaluation,
    end_evaluation,
    explain_skip,
    observe_evaluation,
    start_windows,
)
from aerie.rollout.in_place.observation import find_trial_failure, is_expectation_observed, observe_trial, start_analysis
from aerie.rollout.in_place.phases import PHASES_WITHOUT_PROMOTION, continue_rollout
from aerie.rollout.in_place.promotion import check_promotion
from aerie.rollout.in_place.staging import StagingProgress, check_staging
from aerie.rollout.in_place.state_machine import EndState, InPlaceObservation, Trigger, find_transition
from aerie.rollout.in_place.step import Step, compute_return_deadline, find_stable_location, find_unreturned, with_trial_state
from aerie.rollout.in_place.transition import InPlaceTransition, build_replaced_drafter, find_candidate
from aerie.rollout.in_place.trial import begin_trial
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.drafter_change import locate_drafter


def start_rollout(snapshot: Snapshot, desired: DesiredRevision, stable: Arm, now: datetime) -> InPlaceTransition:
    """Return the transition that starts a rollout in place now: its pods begin to read the drafter."""
    drafter = desired.resource.spec.drafter
    location = locate_drafter(drafter.source) if drafter is not None else None
    assert location is not None, "eligibility has checked the source"
    identity = f"{snapshot.resource.metadata.uid}/{desired.revision}/{now.isoformat()}"
    rollout = InPlaceRollout(
        revision=desired.revision,
        change=desired.describe_change(snapshot.resource.status or Status()),
        drafter=desired.arm.drafter or "",
        location=location,
        start_time=now,
        phase_start_time=now,
        seed=hashlib.sha256(identity.encode()).hexdigest()[:32],
    )
    step = Step(snapshot, desired, stable, rollout, list_engine_pods(snapshot, stable.revision), now)
    return continue_rollout(_observe_staging(step))


def advance_rollout(
    snapshot: Snapshot, desired: DesiredRevision, stable: Arm, rollout: InPlaceRollout, now: datetime
) -> InPlaceTransition:
    """Return the transition of the rollout in this reconcile."""
    step = _resume(Step(snapshot, desired, stable, rollout, list_engine_pods(snapshot, stable.revision), now))
    step, observation = _observe(step, rollout.phase_start_time)
    transition = find_transition(rollout.phase, observation, step.spec)
    if transition is None and _can_start_windows(step):
        return continue_rollout(_start_windows(step), is_new_phase=True)
    if transition is None:
        return continue_rollout(step)
    trigger, target = transition
    return _enter(step, trigger, target, observation)


def _resume(step: Step) -> Step:
    """Return the step whose phase restarts after a pause, or with the first pods: its deadline does not run meanwhile.

    The phase of a resource whose rollout is suspended is Paused, too.
    """
    phase, status = step.rollout.phase, step.status
    if phase not in ("Staging", "Promoting") or step.snapshot.resource.spec.replicas == 0:
        return step
    had_no_pods = any(item.type == PROGRESSING and item.reason == "ScaledToZero" for item in status.conditions)
    return step.in_phase(phase) if status.phase == "Paused" or had_no_pods else step


def _observe(step: Step, stored_start: datetime) -> tuple[Step, InPlaceObservation]:
    """Return the step with the progress of its phase, and what the state machine observes.

    `stored_start`: start of the phase by the status; it is earlier than the step's where the phase restarts.
    """
    rollout, now, phase = step.rollout, step.now, step.rollout.phase
    observation = InPlaceObservation(
        is_superseded=rollout.revision != step.desired.revision or bool(step.desired.problem),
        manual_action=read_manual_action(step.snapshot.resource, rollout.revision),
    )
    if step.snapshot.resource.spec.replicas == 0 and phase in PHASES_WITHOUT_PROMOTION:
        return step, observation
    match phase:
        case "Staging":
            step = _observe_staging(step)
            assert step.staging is not None
            return step, replace(
                observation,
                abort_message=step.staging.problem,
                is_complete=step.staging.is_complete,
                deadline_exceeded=_is_start_over(step, step.staging),
                needs_evaluation=_needs_evaluation(step, step.staging),
            )
        case "Evaluating":
            return _observe_evaluation(step, observation)
        case "Analyzing":
            step = replace(step, progress=observe_trial(step.snapshot, rollout, step.pods, now))
            verdict = step.progress.analysis.verdict if step.progress is not None else "Continue"
            return step, replace(observation, abort_message=find_trial_failure(rollout, step.pods), verdict=verdict)
        case "Promoting":
            candidate = find_candidate(rollout)
            if candidate is None or not is_expectation_observed(step.snapshot, step.stable.revision, candidate):
                return step, observation
            promotion = check_promotion(step.pods, candidate, stored_start, step.spec.progress_deadline, now)
            if stored_start < rollout.phase_start_time:  # pods that have failed during a pause count, and none is late
                promotion = replace(promotion, is_due=False)
            return replace(step, promotion=promotion), replace(
                observation,
                abort_message=messages.build_promotion_failure_message(promotion) if promotion.has_failed else "",
                is_complete=promotion.is_complete,
                deadline_exceeded=promotion.is_over,
            )
        case "RollingBack":
            return step, replace(
                observation, is_complete=not find_unreturned(step), deadline_exceeded=now >= compute_return_deadline(rollout)
            )
        case _:
            return step, observation


def _observe_evaluation(step: Step, observation: InPlaceObservation) -> tuple[Step, InPlaceObservation]:
    """Return the step with the progress of its shadow evaluation, and what the state machine observes."""
    rollout = step.rollout
    progress = observe_trial(step.snapshot, rollout, step.pods, step.now)
    route_rejection = route_rejection_message(step.snapshot) if step.spec.shadow_source == "Mirror" else ""
    evaluation = observe_evaluation(rollout, step.pods, progress, step.now, route_rejection)
    step = replace(step, progress=progress, evaluation=evaluation)
    is_worse = progress is not None and progress.analysis.verdict == "Rollback"
    return step, replace(
        observation,
        abort_message=find_trial_failure(rollout, step.pods),
        verdict="Rollback" if is_worse else "Continue",
        is_complete=evaluation.ended is not None,
    )


def _can_start_windows(step: Step) -> bool:
    """Return whether the first window of a shadow evaluation can begin."""
    evaluation = step.evaluation
    return evaluation is not None and evaluation.pod is not None and step.progress is None and not evaluation.waiting


def _start_windows(step: Step) -> Step:
    """Return the step in which the first window of the shadow evaluation begins."""
    assert step.evaluation is not None
    assert step.evaluation.pod is not None
    step = _with_new_analysis(replace(step, rollout=start_windows(step.rollout, step.evaluation.pod, step.now)))
    return replace(step, progress=observe_trial(step.snapshot, step.rollout, step.pods, step.now))


def _needs_evaluation(step: Step, staging: StagingProgress) -> bool:
    """Return whether a shadow evaluation comes before the turns under users' traffic."""
    is_due = step.spec.shadow_source != "None" and step.rollout.evaluation is None and staging.is_complete
    return is_due and not explain_skip(step.spec, step.pods, staging.pods)


def _observe_staging(step: Step) -> Step:
    served = step.stable.in_place
    desired_count = trial_pods.count_desired_pods(step.spec, step.snapshot.resource.spec.replicas, 0)
    staging = check_staging(
        step.pods, desired_count, step.source, served.digest if served else None, step.rollout.phase_start_time, step.now
    )
    if not staging.problem and served is None and find_stable_location(step) is None:
        staging = replace(
            staging,
            problem=f"The record of revision {step.stable.revision} is missing, so a rollback could not find its drafter.",
        )
    return replace(step, staging=staging)


def _is_start_over(step: Step, staging: StagingProgress) -> bool:
    """Return whether the time of the start is over."""
    began, deadline = step.rollout.phase_start_time, step.spec.progress_deadline
    is_any_untried = staging.is_measuring or any(
        is_preparation_untried(item, step.source, began, deadline) for item in staging.preparations
    )
    return is_time_over(began, deadline, step.now, is_any_untried=is_any_untried)


def _enter(step: Step, trigger: Trigger, target: InPlacePhase | EndState, observation: InPlaceObservation) -> InPlaceTransition:
    """Return the transition that enters a phase, or ends the rollout."""
    match target:
        case "Impossible":
            return end_impossible(step, trigger)
        case "Promoted":
            return end_promoted(step)
        case "Returned":
            return end_returned(step)
        case "Evaluating":
            return continue_rollout(_begin_evaluation(step), is_new_phase=True)
        case "Staging":
            assert step.evaluation is not None
            assert step.evaluation.ended is not None
            ended = end_evaluation(with_trial_state(step).rollout, step.evaluation.ended)
            step = replace(step, rollout=ended, progress=None, evaluation=None).in_phase("Staging")
            return continue_rollout(_observe_staging(step), is_new_phase=True)
        case "Analyzing":
            return continue_rollout(_begin_trial(step), is_new_phase=True)
        case "RollingBack":
            pending = _build_pending_outcome(step, trigger, observation.abort_message)
            if step.rollout.phase == "Promoting":  # pods that are late have to be found after the end, too
                step = replace(step, stable=step.stable.model_copy(update={"in_place": step.rollout.replaced}))
            return continue_rollout(with_trial_state(step).in_phase("RollingBack", pending_outcome=pending), is_new_phase=True)
        case phase:
            return continue_rollout(with_trial_state(step).in_phase(phase), is_new_phase=True)


def _begin_evaluation(step: Step) -> Step:
    """Return the step in which the shadow evaluation begins, with the first pod that has the drafter."""
    step = _with_drafters(step)
    assert step.staging is not None
    step = replace(step, rollout=begin_evaluation(step.rollout, step.staging.pods[0])).in_phase("Evaluating")
    return replace(step, evaluation=observe_evaluation(step.rollout, step.pods, None, step.now))


def _begin_trial(step: Step) -> Step:
    """Return the step in which the trial begins, because all pods of its start have the drafter."""
    step = _with_drafters(step)
    assert step.staging is not None
    rollout = step.rollout
    skip_reason = explain_skip(step.spec, step.pods, step.staging.pods)
    if rollout.evaluation is None and skip_reason:
        skipped = ShadowEvaluation(result="Skipped", message=truncate_message(skip_reason))
        rollout = rollout.model_copy(update={"evaluation": skipped})
    pods = trial_pods.update_trial_pods((), step.staging.pods, len(step.staging.pods), first_pair=0)
    rollout = begin_trial(rollout.model_copy(update={"pods": pods}), step.staging.pods, len(step.pods), step.now)
    step = _with_new_analysis(replace(step, rollout=rollout).in_phase("Analyzing"))
    return replace(step, progress=observe_trial(step.snapshot, step.rollout, step.pods, step.now))


def _with_new_analysis(step: Step) -> Step:
    """Return the step whose status has a new analysis."""
    status = step.status.model_copy(update={"analysis": start_analysis(step.rollout, step.spec.analysis)})
    resource = step.snapshot.resource.model_copy(update={"status": status})
    return replace(step, snapshot=replace(step.snapshot, resource=resource))


def _with_drafters(step: Step) -> Step:
    """Return the step whose rollout has the two drafters, as the pods of the start report them."""
    assert step.staging is not None
    prepared, own = step.staging.prepared, step.staging.own
    replaced, location = step.stable.in_place, find_stable_location(step)
    assert prepared.drafter is not None
    if replaced is None:
        assert location is not None
        replaced = build_replaced_drafter(step.stable, location, own.digest, dict(own.files))
    update = {
        "files": dict(prepared.drafter.files),
        "digest": prepared.drafter.digest,
        "kind": prepared.kind,
        "replaced": replaced,
    }
    return replace(step, rollout=step.rollout.model_copy(update=update))


def _build_pending_outcome(step: Step, trigger: Trigger, abort_message: str) -> PendingOutcome:
    """Return what a rollback ends with."""
    desired = step.desired
    match trigger:
        case Trigger.SUPERSEDED if desired.problem:
            return PendingOutcome(result="Failed", message=truncate_message(desired.problem))
        case Trigger.SUPERSEDED:
            is_reverted = step.stable.served_revision == desired.revision
            reason = "The spec was reverted to the stable revision." if is_reverted else "The spec has changed."
            return PendingOutcome(result="Superseded", message=reason)
        case Trigger.ROLLBACK_REQUESTED:
            return PendingOutcome(result="RolledBack", message=MANUAL_ROLLBACK_MESSAGE)
        case Trigger.ABORTED:
            return PendingOutcome(result="RolledBack", message=truncate_message(abort_message))
        case _:
            message = step.analysis.message if step.analysis is not None else ""
            return PendingOutcome(result="RolledBack", message=truncate_message(message))
