"""One canary in progress, advanced by one reconcile: its observation, the transition of the state machine, and the result.

    snapshot ─► pods of the arms ─┐
    blocks ───► AnalysisRun ──────┼─► CanaryObservation ─► advance_state ─► pods and weights of each arm, status, outcome
    pairs ────► shadow evaluation ┤
    a user's annotation ──────────┘

Guarantees: pure. Where no stable pod is ready and none will recover automatically, there is nothing to compare with and nothing
to protect. The new revision then replaces the stable one as soon as it is ready. A canary for which the cluster has no capacity
is not rejected: it is tried again, at growing intervals. While spec.replicas is 0 nothing is judged; the canary restarts with the
first pods. Not guaranteed: that every canary ends; one that is held waits for a user.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import datetime, timedelta

from aerie.api import SpeculativeDeployment
from aerie.api.status import AnalysisStatus, Arm, CanaryArm, CanaryEvaluation, Status
from aerie.api.types import duration
from aerie.rollout.canary.analysis_run.phases import (
    build_accepted_analysis_status,
    build_analysis_status,
    build_promoted_analysis_status,
    close_analysis,
    evaluate_blocks,
    evaluate_counts,
    resume_analysis_run,
    start_phase_analysis,
    time_until_analysis_limit,
)
from aerie.rollout.canary.analysis_run.run import AnalysisRun
from aerie.rollout.canary.evaluation import (
    advance_evaluation,
    begin_evaluation,
    build_evaluation_analysis,
    plan_evaluation,
    skip_evaluation,
)
from aerie.rollout.canary.messages import build_progressing_condition
from aerie.rollout.canary.observation import (
    build_observation,
    collect_abort_reasons,
    find_most_severe_failure,
    is_stable_broken,
    read_manual_action,
)
from aerie.rollout.canary.rollback import roll_back_canary
from aerie.rollout.canary.state_machine import (
    MANUAL_PROMOTION_MESSAGE,
    MANUAL_ROLLBACK_MESSAGE,
    CanaryPolicy,
    CanaryState,
    StateMachinePhase,
    StateTransition,
    advance_state,
)
from aerie.rollout.canary.transition import CanaryTransition, build_awaited_readiness, build_outcome, read_stalled_since
from aerie.rollout.capacity import replica_counts, traffic_weights
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.facts.route_status import route_rejection_message
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.revision.desired import DesiredRevision

MAX_CAPACITY_RETRY_DELAY = timedelta(hours=6)
"""Maximum time between two attempts to find capacity for a canary."""
_PHASES_BEFORE_VERDICT = ("Starting", "Evaluating", "WarmingUp", "Analyzing")


def start_canary(snapshot: Snapshot, desired: DesiredRevision, stable: Arm, now: datetime) -> CanaryTransition:
    """Return the transition that starts a canary now."""
    spec, status = snapshot.resource.spec, snapshot.resource.status or Status()
    is_only_arm = is_stable_broken(snapshot.cluster, stable)
    arm = CanaryArm(
        **dict(desired.arm),
        change=desired.describe_change(status),
        phase="Promoting" if is_only_arm else "Starting",
        start_time=now,
        step_start_time=now if is_only_arm else None,
        evaluation=None if is_only_arm else plan_evaluation(snapshot, desired, stable),
    )
    fleet = RolloutPods.from_snapshot(snapshot, stable.revision, arm.revision, now)
    by_pods = spec.rollout.traffic.gateway is None
    arms = fleet.target_replicas(arm.phase, spec.rollout.canary.step_weights, None, by_pods=by_pods)
    condition = build_progressing_condition(snapshot.resource, arm, fleet, arms, None, None)
    weights = traffic_weights.single_arm_weights(fleet.stable.counts, fleet.canary.counts, fleet.control.counts)
    return CanaryTransition(arm, arms, weights, condition, None, requeue_after=spec.rollout.progress_deadline)


def advance_canary(
    snapshot: Snapshot, desired: DesiredRevision, stable: Arm, canary_arm: CanaryArm, now: datetime
) -> CanaryTransition:
    """Return the transition of the canary, whose revision is the desired one, in this reconcile."""
    resource = snapshot.resource
    spec, status = resource.spec, resource.status or Status()
    fleet = RolloutPods.from_snapshot(snapshot, stable.revision, canary_arm.revision, now, read_stalled_since(canary_arm))
    if spec.replicas == 0 and canary_arm.phase in _PHASES_BEFORE_VERDICT and not canary_arm.is_extended:
        return _handle_zero_replicas(snapshot, stable, canary_arm, fleet, now)
    state = _read_state(canary_arm)
    abort_reasons = collect_abort_reasons(snapshot, state.phase, fleet, now)
    analysis_run = resume_analysis_run(snapshot, desired, stable, canary_arm, state, fleet, now)
    analysis_run, verdict = evaluate_blocks(state, analysis_run, snapshot, abort_reasons, now)
    progress = advance_evaluation(snapshot, stable, canary_arm, now)
    observation = build_observation(snapshot, canary_arm, state, fleet, abort_reasons, verdict, progress, now)
    policy = _build_policy(snapshot.resource, desired, canary_arm)
    state_transition = advance_state(state, observation, policy, now)
    analysis_before = status.analysis if canary_arm.ready_time else None
    analysis = build_analysis_status(analysis_before, analysis_run, verdict, policy.analysis)
    if state.phase == "Evaluating":
        analysis = build_evaluation_analysis(status.analysis, spec.rollout, progress)
    if state_transition.end_state is not None:
        return _end_canary(snapshot, stable, canary_arm, fleet, state_transition, analysis, now)
    phase = state_transition.state.phase
    evaluation = _with_phase(progress.evaluation, phase, snapshot, stable, canary_arm, now)
    canary_arm = canary_arm.model_copy(update={"evaluation": evaluation})
    if phase != state.phase:
        is_accepted = state.phase == "Evaluating" and observation.verdict == "Promote"
        if state.phase == "Evaluating" and not is_accepted:
            analysis = None  # it restarts under the traffic of users; the canary has the result
        analysis_run = start_phase_analysis(phase, state.phase, analysis_run, snapshot, desired, stable, canary_arm, fleet, now)
        if phase == "Analyzing":
            analysis_run, verdict = evaluate_counts(state_transition.state, analysis_run, (), now)
        if is_accepted and analysis is not None:
            analysis = build_accepted_analysis_status(analysis, analysis_run)
        else:
            analysis = build_analysis_status(analysis, analysis_run, verdict, policy.analysis)
    transition = _continue_canary(snapshot, stable, canary_arm, fleet, state_transition, analysis, analysis_run, now)
    if phase != "Evaluating" or not progress.problem:
        return transition
    condition = transition.progressing
    return replace(transition, progressing=replace(condition, message=f"{condition.message} {progress.problem}"))


def _continue_canary(
    snapshot: Snapshot,
    stable: Arm,
    canary_arm: CanaryArm,
    fleet: RolloutPods,
    state_transition: StateTransition,
    analysis: AnalysisStatus | None,
    analysis_run: AnalysisRun | None,
    now: datetime,
) -> CanaryTransition:
    """Return the transition of a canary that has not ended: its pods, weights and condition in the state that it has now."""
    resource = snapshot.resource
    by_pods = resource.spec.rollout.traffic.gateway is None
    canary = _with_state(canary_arm, state_transition.state)
    arms = fleet.target_replicas(canary.phase, resource.spec.rollout.canary.step_weights, canary.step_index, by_pods=by_pods)
    weights = _compute_weights(resource, canary, fleet, arms)
    canary = canary.model_copy(update={"readiness": build_awaited_readiness(canary_arm, canary, fleet, arms, now)})
    pod_failure = find_most_severe_failure(snapshot.cluster, stable, canary_arm)
    condition = build_progressing_condition(resource, canary, fleet, arms, analysis, pod_failure)
    if route_rejection := route_rejection_message(snapshot):
        condition = replace(condition, message=f"{condition.message.rstrip('.')}. The canary does not advance: {route_rejection}")
    requeue_after = _earliest(state_transition.requeue_after, time_until_analysis_limit(canary, analysis_run, now))
    return CanaryTransition(canary, arms, weights, condition, analysis, requeue_after=requeue_after)


def _end_canary(
    snapshot: Snapshot,
    stable: Arm,
    canary_arm: CanaryArm,
    fleet: RolloutPods,
    state_transition: StateTransition,
    analysis: AnalysisStatus | None,
    now: datetime,
) -> CanaryTransition:
    """Return the transition that ends the canary: it is promoted, or its rollback begins."""
    resource, reason = snapshot.resource, state_transition.message
    status, progress_deadline = resource.status or Status(), resource.spec.rollout.progress_deadline
    assert state_transition.end_state is not None, "it has ended"
    assert state_transition.end_state != "Completed", "that is how post-promotion monitoring ends, not a canary"
    if state_transition.end_state == "Promoted":
        analysis = build_promoted_analysis_status(analysis, fleet.canary.counts.ready)
        outcome = build_outcome(
            canary_arm, "Promoted", _promotion_reason(canary_arm, analysis, state_transition), status, analysis, now
        )
        condition = ConditionUpdate(PROGRESSING, "False", "Complete", f"Revision {canary_arm.revision} is rolled out.")
        # The post-promotion monitoring (post_promotion.py) continues from here.
        arms = ArmReplicas(fleet.stable.counts.requested)
        return CanaryTransition(None, arms, {}, condition, analysis, outcome, timedelta(0))
    pod_failure = find_most_severe_failure(snapshot.cluster, stable, canary_arm)
    if state_transition.end_state == "Failed" and fleet.waits_only_for_control:
        reason = f"{reason} The canary's pods are ready; those of its control, of stable revision {stable.revision}, are not."
    if state_transition.end_state == "Failed" and pod_failure is not None:
        reason = f"{reason} {pod_failure.message[:1].upper()}{pod_failure.message[1:].rstrip('.')}."
    elif state_transition.end_state == "Failed" and (route_rejection := route_rejection_message(snapshot)):
        reason = (
            f"{route_rejection} This lasted for spec.rollout.progressDeadline ({duration.format_duration(progress_deadline)})."
        )
    outcome = build_outcome(canary_arm, state_transition.end_state, reason, status, analysis, now)
    if state_transition.end_state == "Failed" and fleet.waits_only_for_resources():
        outcome = outcome.model_copy(update={"retry_time": now + _capacity_retry_delay(canary_arm, status, progress_deadline)})
    return roll_back_canary(snapshot, stable, canary_arm, close_analysis(analysis), outcome, now)


def _handle_zero_replicas(
    snapshot: Snapshot, stable: Arm, canary_arm: CanaryArm, fleet: RolloutPods, now: datetime
) -> CanaryTransition:
    """Return the transition at zero replicas: without pods nothing can be judged, except by a user."""
    status, action = snapshot.resource.status or Status(), read_manual_action(snapshot.resource, canary_arm.revision)
    if action is not None:
        is_promotion = action == "promote"
        reason = MANUAL_PROMOTION_MESSAGE if is_promotion else MANUAL_ROLLBACK_MESSAGE
        state_transition = StateTransition(_read_state(canary_arm), "Promoted" if is_promotion else "RolledBack", reason)
        return _end_canary(snapshot, stable, canary_arm, fleet, state_transition, status.analysis, now)
    message = f"spec.replicas is 0: the canary of revision {canary_arm.revision} restarts once pods are requested."
    condition = ConditionUpdate(PROGRESSING, "False", "ScaledToZero", message)
    update = {
        "phase": "Starting",
        "ready_time": None,
        "step_index": None,
        "step_start_time": None,
        "extension_end_time": None,
        "readiness": None,
    }
    evaluation = CanaryEvaluation() if canary_arm.is_isolated else canary_arm.evaluation
    return CanaryTransition(
        canary_arm.model_copy(update={**update, "evaluation": evaluation}),
        ArmReplicas(0),
        {"stable": TOTAL_WEIGHT},
        condition,
        close_analysis(status.analysis),
    )


def _with_phase(
    evaluation: CanaryEvaluation | None,
    phase: StateMachinePhase,
    snapshot: Snapshot,
    stable: Arm,
    canary_arm: CanaryArm,
    now: datetime,
) -> CanaryEvaluation | None:
    """Return the shadow evaluation in the phase that the canary has now: it begins with its phase, and ends before users are
    served by the canary."""
    if phase == "Evaluating" and evaluation is not None and evaluation.start_time is None:
        return begin_evaluation(snapshot, stable, canary_arm, evaluation, now)
    if phase not in ("Starting", "Evaluating"):
        return skip_evaluation(evaluation, MANUAL_PROMOTION_MESSAGE)
    return evaluation


def _read_state(canary: CanaryArm) -> CanaryState:
    assert canary.phase != "RollingBack"
    return CanaryState(
        canary.phase,
        canary.start_time,
        canary.ready_time,
        canary.step_index,
        canary.step_start_time,
        canary.extension_end_time,
    )


def _with_state(canary: CanaryArm, state: CanaryState) -> CanaryArm:
    update = {
        "phase": state.phase,
        "ready_time": state.ready_at,
        "step_index": state.step,
        "step_start_time": state.step_started_at,
        "extension_end_time": state.extension_ends_at,
    }
    return canary.model_copy(update=update)


def _build_policy(resource: SpeculativeDeployment, desired: DesiredRevision, canary_arm: CanaryArm) -> CanaryPolicy:
    """Return the rollout part of the spec; its analysis is that with which the current analysis began. A trial waits for no
    user."""
    spec, status = resource.spec, resource.status or Status()
    analysis_spec = status.analysis.parameters if status.analysis and canary_arm.ready_time else spec.rollout.analysis
    exploration_duration = None
    if desired.trial is not None:
        analysis_spec = analysis_spec.model_copy(update={"on_inconclusive": "Rollback"})
        exploration_duration = spec.speculation.tuning.decision_interval if desired.trial.purpose == "Explore" else None
    return CanaryPolicy(spec.rollout.canary, analysis_spec, spec.rollout.progress_deadline, exploration_duration)


def _capacity_retry_delay(canary_arm: CanaryArm, status: Status, progress_deadline: timedelta) -> timedelta:
    """Return the delay until a canary without capacity is tried again: it doubles with each attempt."""
    attempts = list(
        itertools.takewhile(
            lambda outcome: outcome.revision == canary_arm.revision and outcome.retry_time, status.rollout_history
        )
    )
    delay: timedelta = progress_deadline * 2 ** len(attempts)
    return min(MAX_CAPACITY_RETRY_DELAY, delay)


def _promotion_reason(canary: CanaryArm, analysis: AnalysisStatus | None, state_transition: StateTransition) -> str:
    """Return why the canary is promoted."""
    if analysis is not None and analysis.verdict == "Promote":
        return analysis.message
    return MANUAL_PROMOTION_MESSAGE if canary.ready_time else f"Revision {canary.revision}: {state_transition.message}"


def _compute_weights(resource: SpeculativeDeployment, canary: CanaryArm, fleet: RolloutPods, arms: ArmReplicas) -> dict[str, int]:
    stable_counts, canary_counts, control_counts = fleet.stable.counts, fleet.canary.counts, fleet.control.counts
    ramp = resource.spec.rollout.canary.step_weights
    if canary.phase in ("Starting", "Evaluating") or not (stable_counts.ready or canary_counts.ready):
        return traffic_weights.single_arm_weights(stable_counts, canary_counts, control_counts)
    match canary.phase:
        case "Ramping":
            percent = replica_counts.ramp_step_percent(ramp, canary.step_index)
            return traffic_weights.capped_canary_weights(
                TOTAL_WEIGHT * percent // 100, resource.spec.replicas, arms, stable_counts, canary_counts
            )
        case "Promoting":
            return traffic_weights.capped_canary_weights(TOTAL_WEIGHT, resource.spec.replicas, arms, stable_counts, canary_counts)
        case _:
            return traffic_weights.weights_by_replicas(arms, stable_counts, canary_counts, control_counts)


def _earliest(first: timedelta | None, second: timedelta | None) -> timedelta | None:
    return min((delay for delay in (first, second) if delay is not None), default=None)
