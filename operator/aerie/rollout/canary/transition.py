"""One canary in progress, advanced by one reconcile: its observation, the transition of the state machine, and the result.

    snapshot ─► pods of the arms ─┐
    blocks ───► AnalysisRun ──────┼─► CanaryObservation ─► advance_state ─► pods and weights of each arm, status, outcome
    a user's annotation ──────────┘

Guarantees: pure. The returned `CanaryArm` and `AnalysisStatus` contain all that must survive a crash. A canary that has ended
stays, with phase RollingBack, until the stable arm has as many ready pods as it is expected to have. Where no stable pod is ready
and none will recover automatically, there is nothing to compare with and nothing to protect. The new revision then replaces the
stable one as soon as it is ready. A canary for which the cluster has no capacity is not rejected: it is tried again, at growing
intervals. While spec.replicas is 0 nothing is judged; the canary restarts with the first pods.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Literal

from aerie.analysis.verdict import Verdict
from aerie.api import SpeculativeDeployment
from aerie.api.rollout import AnalysisSpec
from aerie.api.status import TRAFFIC_SHIFT_PHASES, AnalysisStatus, Arm, CanaryArm, ReadinessProgress, RolloutOutcome, Status
from aerie.api.types import duration
from aerie.rollout.canary import calibration_record
from aerie.rollout.canary.abort_rules import find_abort_reasons
from aerie.rollout.canary.analysis_run import AnalysisRun, start_analysis, status_comparisons
from aerie.rollout.canary.equivalence_probe import find_probe_skip_reason
from aerie.rollout.canary.messages import (
    PROMOTE_ANNOTATION,
    ROLLBACK_ANNOTATION,
    build_blocked_rollback_message,
    build_progress_message,
    build_progressing_condition,
)
from aerie.rollout.canary.state_machine import (
    MANUAL_PROMOTION_MESSAGE,
    MANUAL_ROLLBACK_MESSAGE,
    CanaryObservation,
    CanaryPolicy,
    CanaryState,
    StateMachinePhase,
    StateTransition,
    advance_state,
)
from aerie.rollout.capacity import replica_counts, traffic_weights
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate, truncate_message
from aerie.rollout.facts import hardware, pod_failures
from aerie.rollout.facts.context_length import shorter_context_message
from aerie.rollout.facts.route_status import route_rejected_since, route_rejection_message
from aerie.rollout.facts.snapshot import ClusterState, Snapshot
from aerie.rollout.revision.desired import DesiredRevision

FAILED_ATTEMPT_WINDOW = timedelta(hours=24)
"""Time for which analyses of a revision that ended without a promotion make the next analysis of it stricter."""
MAX_CAPACITY_RETRY_DELAY = timedelta(hours=6)
"""Maximum time between two attempts to find capacity for a canary."""
_PHASES_WITHOUT_POD_DEADLINE = ("WarmingUp", "Analyzing", "AwaitingApproval", "Held")
_PHASES_BEFORE_VERDICT = ("Starting", "WarmingUp", "Analyzing")
OutcomeResult = Literal["Promoted", "RolledBack", "Superseded", "Failed", "Explored"]


@dataclass(frozen=True)
class CanaryTransition:
    """State of the canary after this reconcile."""

    canary: CanaryArm | None
    """The canary; None: it is promoted, or removed."""
    arms: ArmReplicas
    """Pods to request."""
    weights: Mapping[str, int]
    """Share of the traffic by arm, in parts of traffic_weights.TOTAL_WEIGHT."""
    progressing: ConditionUpdate
    analysis: AnalysisStatus | None
    outcome: RolloutOutcome | None = None
    requeue_after: timedelta | None = None


# ---------------------------------------------------------------------------------------------------------------- transitions
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
    )
    fleet = RolloutPods.from_snapshot(snapshot, stable.revision, arm.revision, now)
    by_pods = spec.rollout.traffic.gateway is None
    arms = fleet.target_replicas(arm.phase, spec.rollout.canary.step_weights, None, by_pods=by_pods)
    condition = ConditionUpdate(PROGRESSING, "True", arm.phase, build_progress_message(snapshot.resource, arm, fleet, arms, None))
    weights = traffic_weights.single_arm_weights(fleet.stable.counts, fleet.canary.counts, fleet.control.counts)
    return CanaryTransition(arm, arms, weights, condition, None, requeue_after=spec.rollout.progress_deadline)


def advance_canary(
    snapshot: Snapshot, desired: DesiredRevision, stable: Arm, canary_arm: CanaryArm, now: datetime
) -> CanaryTransition:
    """Return the transition of the canary, whose revision is the desired one, in this reconcile."""
    resource = snapshot.resource
    spec, status = resource.spec, resource.status or Status()
    fleet = RolloutPods.from_snapshot(snapshot, stable.revision, canary_arm.revision, now, read_stalled_since(canary_arm))
    if spec.replicas == 0 and canary_arm.phase in _PHASES_BEFORE_VERDICT:
        return _handle_zero_replicas(snapshot, stable, canary_arm, fleet, now)
    state = _read_state(canary_arm)
    abort_reasons = _collect_abort_reasons(snapshot, state.phase, fleet, now)
    analysis_run = _resume_analysis_run(snapshot, desired, stable, state, fleet, now)
    analysis_run, verdict = _evaluate_blocks(state.phase, analysis_run, snapshot, abort_reasons, now)
    observation = _build_observation(snapshot, canary_arm, state, fleet, abort_reasons, verdict, now)
    policy = _build_policy(snapshot.resource, desired, canary_arm)
    state_transition = advance_state(state, observation, policy, now)
    analysis_before = status.analysis if canary_arm.ready_time else None
    analysis = _build_analysis_status(analysis_before, analysis_run, verdict, policy.analysis)
    if state_transition.end_state is not None:
        return _end_canary(snapshot, stable, canary_arm, fleet, state_transition, analysis, now)
    phase = state_transition.state.phase
    if phase != state.phase:
        analysis_run = _start_phase_analysis(phase, state.phase, analysis_run, snapshot, desired, stable, fleet, now)
        if phase == "Analyzing":
            assert analysis_run is not None
            analysis_run, verdict = analysis_run.evaluate(now, ())
        analysis = _build_analysis_status(analysis, analysis_run, verdict, policy.analysis)
    return _continue_canary(snapshot, stable, canary_arm, fleet, state_transition, analysis, analysis_run, now)


def _resume_analysis_run(
    snapshot: Snapshot, desired: DesiredRevision, stable: Arm, state: CanaryState, fleet: RolloutPods, now: datetime
) -> AnalysisRun | None:
    """Return the run of the status, or a new one where an analysis without one is in progress; with current goal, hardware and
    restarts."""
    analysis = (snapshot.resource.status or Status()).analysis
    analysis_run = AnalysisRun.unpack(analysis.state) if analysis and analysis.state else None
    if analysis_run is None and state.phase == "Analyzing":
        analysis_run = _start_analysis_run(snapshot, desired, stable, fleet, now)
    if analysis_run is None:
        return None
    hardware_difference = hardware.compared_hardware_difference(snapshot)
    analysis_run = analysis_run.with_goal(desired.goal).with_hardware_difference(hardware_difference, now)
    return _with_restarts(analysis_run, state.phase, fleet)


def _build_observation(
    snapshot: Snapshot,
    canary_arm: CanaryArm,
    state: CanaryState,
    fleet: RolloutPods,
    abort_reasons: Sequence[str],
    verdict: Verdict | None,
    now: datetime,
) -> CanaryObservation:
    spec = snapshot.resource.spec
    ramp, by_pods = spec.rollout.canary.step_weights, spec.rollout.traffic.gateway is None
    has_route = state.phase == "Promoting" or not route_rejection_message(snapshot)
    route_deadline, next_late_at = _route_deadline(snapshot, canary_arm), fleet.next_late_at(state.phase)
    return CanaryObservation(
        ready=fleet.has_ready_pods(state.phase, ramp, state.step, by_pods=by_pods) and has_route,
        deadline_exceeded=fleet.exceeds_deadline(state.phase) or (route_deadline is not None and now >= route_deadline),
        next_deadline_at=next_late_at if route_deadline is None else min(route_deadline, next_late_at or route_deadline),
        abort_message=" ".join(abort_reasons),
        verdict=verdict.outcome if verdict else "Continue",
        verdict_message=verdict.message if verdict else "",
        manual_action=read_manual_action(snapshot.resource, canary_arm.revision),
    )


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
    canary = canary.model_copy(update={"readiness": _build_waiting(canary_arm, canary, fleet, arms, now)})
    pod_failure = _most_severe_failure(snapshot.cluster, stable, canary_arm)
    condition = build_progressing_condition(resource, canary, fleet, arms, analysis, pod_failure)
    if route_rejection := route_rejection_message(snapshot):
        condition = replace(condition, message=f"{condition.message.rstrip('.')}. The canary does not advance: {route_rejection}")
    requeue_after = _earliest(state_transition.requeue_after, _time_until_analysis_limit(canary, analysis_run, now))
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
        outcome = build_outcome(
            canary_arm, "Promoted", _promotion_reason(canary_arm, analysis, state_transition), status, analysis, now
        )
        condition = ConditionUpdate(PROGRESSING, "False", "Complete", f"Revision {canary_arm.revision} is rolled out.")
        # The post-promotion monitoring (post_promotion.py) continues from here.
        arms = ArmReplicas(fleet.stable.counts.requested)
        return CanaryTransition(None, arms, {}, condition, analysis, outcome, timedelta(0))
    pod_failure = _most_severe_failure(snapshot.cluster, stable, canary_arm)
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
    return roll_back_canary(snapshot, stable, canary_arm, _close_analysis(analysis), outcome, now)


def roll_back_canary(
    snapshot: Snapshot,
    stable: Arm,
    canary_arm: CanaryArm,
    analysis: AnalysisStatus | None,
    outcome: RolloutOutcome | None,
    now: datetime,
) -> CanaryTransition:
    """Return the transition of a canary that is rolled back. With an outcome it has just ended: its traffic is removed first, its
    pods by the next reconcile."""
    resource = snapshot.resource
    stalled_since = read_stalled_since(canary_arm) if canary_arm.phase == "RollingBack" else None
    fleet = RolloutPods.from_snapshot(snapshot, stable.revision, canary_arm.revision, now, stalled_since, growing_arm="stable")
    replicas, pod_counts = resource.spec.replicas, (fleet.stable.counts, fleet.canary.counts, fleet.control.counts)
    arms = replica_counts.replicas_during_rollback(fleet.capacity, *pod_counts)
    weights = traffic_weights.rollback_weights(replicas, arms, *pod_counts)
    if outcome is not None and canary_arm.step_start_time is None:  # traffic is removed before pods
        arms = replace(arms, canary=fleet.canary.counts.requested)
    if outcome is None and arms.canary == arms.control == 0:
        condition = ConditionUpdate(PROGRESSING, "False", "RolledBack", f"Revision {canary_arm.revision} was removed.")
        return CanaryTransition(None, arms, weights, condition, analysis, requeue_after=timedelta(0))
    recorded_outcome = outcome or next(
        (
            past_outcome
            for past_outcome in (resource.status or Status()).rollout_history
            if past_outcome.revision == canary_arm.revision
        ),
        None,
    )
    reason = f"{recorded_outcome.message} " if recorded_outcome else ""
    message = f"{reason}Rolling back: {fleet.stable.counts.ready}/{replicas} pods of stable revision {stable.revision} ready."
    if outcome is None and fleet.is_rollback_blocked:
        message = f"{message} {build_blocked_rollback_message(resource, stable, canary_arm)}"
    condition = ConditionUpdate(PROGRESSING, "True", "RollingBack", message)
    rolling_back_arm = canary_arm.model_copy(update={"phase": "RollingBack"})
    rolling_back_arm = rolling_back_arm.model_copy(
        update={"readiness": _build_waiting(canary_arm, rolling_back_arm, fleet, arms, now)}
    )
    return CanaryTransition(
        rolling_back_arm, arms, weights, condition, analysis, outcome, timedelta(0) if outcome else timedelta(seconds=5)
    )


def build_outcome(
    canary: CanaryArm, result: OutcomeResult, reason: str, status: Status, analysis: AnalysisStatus | None, now: datetime
) -> RolloutOutcome:
    """Return how the canary has ended, with its comparisons."""
    return RolloutOutcome(
        revision=canary.revision,
        change=canary.change,
        result=result,
        message=truncate_message(reason),
        start_time=canary.start_time,
        completion_time=now,
        drafter=canary.drafter,
        replaced_drafter=status.stable.drafter if status.stable else None,
        comparisons=analysis.comparisons if analysis and canary.ready_time else [],
    )


# --------------------------------------------------------------------------------------------------------------------- helpers
def _read_state(canary: CanaryArm) -> CanaryState:
    assert canary.phase != "RollingBack"
    return CanaryState(canary.phase, canary.start_time, canary.ready_time, canary.step_index, canary.step_start_time)


def _with_state(canary: CanaryArm, state: CanaryState) -> CanaryArm:
    update = {
        "phase": state.phase,
        "ready_time": state.ready_at,
        "step_index": state.step,
        "step_start_time": state.step_started_at,
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


def _evaluate_blocks(
    phase: StateMachinePhase, analysis_run: AnalysisRun | None, snapshot: Snapshot, abort_reasons: Sequence[str], now: datetime
) -> tuple[AnalysisRun | None, Verdict | None]:
    if analysis_run is None or phase in ("Starting", "WarmingUp"):
        return analysis_run, None
    analysis_run = (
        analysis_run.skip_blocks(snapshot.engines.blocks)
        if route_rejection_message(snapshot)
        else analysis_run.with_blocks(snapshot.engines.blocks)
    )
    if phase == "Analyzing":
        return analysis_run.with_probe_result(snapshot.engines.equivalence_result).evaluate(now, abort_reasons)
    return analysis_run.check_guardrails(now, abort_reasons)


def _with_restarts(analysis_run: AnalysisRun | None, phase: StateMachinePhase, fleet: RolloutPods) -> AnalysisRun | None:
    """Return the run with the engines that have ended."""
    if analysis_run is None:
        return None
    reference = fleet.stable if phase in TRAFFIC_SHIFT_PHASES or not fleet.control.live_pods else fleet.control
    since = datetime.fromtimestamp(analysis_run.state.start_time, tz=UTC)
    return analysis_run.with_restarts(
        *(pod_failures.count_restarts_since(arm_pods.live_pods, since) for arm_pods in (fleet.canary, reference))
    )


def _start_phase_analysis(
    phase: StateMachinePhase,
    previous_phase: StateMachinePhase,
    analysis_run: AnalysisRun | None,
    snapshot: Snapshot,
    desired: DesiredRevision,
    stable: Arm,
    fleet: RolloutPods,
    now: datetime,
) -> AnalysisRun | None:
    """Return the analysis run with which a phase begins."""
    if phase == "Analyzing":
        return _start_analysis_run(snapshot, desired, stable, fleet, now)
    if phase == "WarmingUp" or previous_phase == "Ramping":
        return analysis_run
    if analysis_run is None:  # a user has skipped the analysis
        analysis_run = _start_analysis_run(snapshot, desired, stable, fleet, now)
    return analysis_run.reset_guard(now)


def is_stable_broken(cluster: ClusterState, stable: Arm) -> bool:
    """Return whether no stable pod is ready, and each of them for a reason that does not pass automatically."""
    stable_pods = cluster.live_pods(stable.revision)
    return bool(stable_pods) and all(map(pod_failures.is_pod_unrecoverable, stable_pods))


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
    update = {"phase": "Starting", "ready_time": None, "step_index": None, "step_start_time": None, "readiness": None}
    return CanaryTransition(
        canary_arm.model_copy(update=update),
        ArmReplicas(0),
        {"stable": TOTAL_WEIGHT},
        condition,
        _close_analysis(status.analysis),
    )


def _capacity_retry_delay(canary_arm: CanaryArm, status: Status, progress_deadline: timedelta) -> timedelta:
    """Return the delay until a canary without capacity is tried again: it doubles with each attempt."""
    attempts = list(
        itertools.takewhile(
            lambda outcome: outcome.revision == canary_arm.revision and outcome.retry_time, status.rollout_history
        )
    )
    delay: timedelta = progress_deadline * 2 ** len(attempts)
    return min(MAX_CAPACITY_RETRY_DELAY, delay)


def _route_deadline(snapshot: Snapshot, canary_arm: CanaryArm) -> datetime | None:
    """Return until when a gateway that rejects the route is waited for; None where a gateway accepts it."""
    since = route_rejected_since(snapshot)
    if since is None:
        return None
    return max(since, canary_arm.step_start_time or canary_arm.start_time) + snapshot.resource.spec.rollout.progress_deadline


def _most_severe_failure(cluster: ClusterState, stable: Arm, canary_arm: CanaryArm) -> pod_failures.PodFailure | None:
    """Return the failure that keeps pods of canary and control from being ready."""
    arm_failures = (
        cluster.pod_failure(canary_arm.revision),
        cluster.pod_failure(stable.revision, control=True),
    )
    return pod_failures.select_most_severe(*(pod_failure for pod_failure in arm_failures if pod_failure is not None))


def read_stalled_since(canary_arm: CanaryArm) -> datetime | None:
    """Return since when pods have been waited for without progress."""
    return canary_arm.readiness.start_time if canary_arm.readiness is not None else None


def _build_waiting(
    canary_before: CanaryArm, canary_after: CanaryArm, fleet: RolloutPods, arms: ArmReplicas, now: datetime
) -> ReadinessProgress | None:
    """Return the readiness that `canary_after` waits for. Its start time is now where the phase or the step has changed, or where
    more pods are ready than ever before."""
    awaited_arms = (fleet.stable,) if canary_after.phase == "RollingBack" else (fleet.canary, fleet.control)
    ready_pods = sum(arm_pods.counts.ready for arm_pods in awaited_arms)
    requested_pods = arms.stable if canary_after.phase == "RollingBack" else arms.canary + arms.control
    if ready_pods >= requested_pods or any(arm_pods.late_pods.has_resource_shortage for arm_pods in awaited_arms):
        return None
    progress_before = canary_before.readiness
    if (
        progress_before is None
        or ready_pods > progress_before.max_ready_replicas
        or (canary_after.phase, canary_after.step_index) != (canary_before.phase, canary_before.step_index)
    ):
        return ReadinessProgress(start_time=now, max_ready_replicas=ready_pods)
    return progress_before


def _start_analysis_run(
    snapshot: Snapshot, desired: DesiredRevision, stable: Arm, fleet: RolloutPods, now: datetime
) -> AnalysisRun:
    spec, status = snapshot.resource.spec, snapshot.resource.status or Status()
    capacity = fleet.capacity
    failed_attempts = sum(
        outcome.revision == desired.revision
        and bool(outcome.comparisons)
        and outcome.result != "Promoted"
        and outcome.completion_time + FAILED_ATTEMPT_WINDOW > now
        for outcome in status.rollout_history
    )
    pod_counts = (
        capacity.canary_replicas,
        capacity.control_replicas or max(1, replica_counts.replicas_during_analysis(capacity).stable),
    )
    skip_reason, goal = find_probe_skip_reason(snapshot, stable, desired.arm), desired.goal
    analysis_run = start_analysis(
        spec.rollout.analysis,
        (desired.arm, stable),
        pod_counts,
        spec.speculation.tuning.slo,
        failed_attempts,
        calibration_record.find_calibration(snapshot, stable),
        now,
        skip_reason,
        goal,
    )
    return analysis_run.with_hardware_difference(hardware.compared_hardware_difference(snapshot), now)


def _collect_abort_reasons(snapshot: Snapshot, phase: StateMachinePhase, fleet: RolloutPods, now: datetime) -> list[str]:
    reference = fleet.control if fleet.control.live_pods else fleet.stable
    # In other phases the deadline of the state machine applies.
    not_ready_timeout = snapshot.resource.spec.rollout.progress_deadline if phase in _PHASES_WITHOUT_POD_DEADLINE else None
    reasons = list(
        find_abort_reasons(
            fleet.canary, reference, snapshot.engines.invalid_metrics, not_ready_timeout, snapshot.cluster.last_log_lines, now
        )
    )
    context_message = shorter_context_message(snapshot.engines.context_lengths, snapshot.resource.spec.engine.args)
    return [*reasons, context_message] if context_message else reasons


def read_manual_action(resource: SpeculativeDeployment, revision: str) -> Literal["promote", "rollback"] | None:
    """Return the action that a user has requested for this very revision."""
    annotations = resource.metadata.annotations
    if annotations.get(ROLLBACK_ANNOTATION) == revision:
        return "rollback"
    return "promote" if annotations.get(PROMOTE_ANNOTATION) == revision else None


def _build_analysis_status(
    previous: AnalysisStatus | None, analysis_run: AnalysisRun | None, verdict: Verdict | None, analysis_spec: AnalysisSpec
) -> AnalysisStatus | None:
    """Return the analysis for the status. Its message changes with a block or a verdict, and not with the clock."""
    if analysis_run is None:
        return previous
    state, hardware_difference = analysis_run.pack(), analysis_run.plan.hardware_mismatch or None
    if previous is None or verdict is None:
        return AnalysisStatus(
            parameters=analysis_spec,
            verdict=verdict.outcome if verdict else "Continue",
            message=verdict.message if verdict else "",
            start_time=datetime.fromtimestamp(analysis_run.state.start_time, tz=UTC),
            calibration_blocks=analysis_run.calibration_blocks,
            variance_inflation=round(analysis_run.variance_inflation, 2),
            comparisons=status_comparisons(verdict.comparisons) if verdict else [],
            hardware_mismatch=hardware_difference,
            state=state,
        )
    if previous.state == state and previous.verdict == verdict.outcome:
        return previous
    if analysis_run.guard_state is not None and verdict.outcome != "Rollback":
        # The status keeps the comparisons of the promotion.
        return previous.model_copy(update={"state": state, "hardware_mismatch": hardware_difference})
    comparisons = status_comparisons(verdict.comparisons) or previous.comparisons
    update = {"verdict": verdict.outcome, "message": verdict.message, "comparisons": comparisons}
    return previous.model_copy(update={**update, "state": state, "hardware_mismatch": hardware_difference})


def _close_analysis(analysis: AnalysisStatus | None) -> AnalysisStatus | None:
    """Return the status of an analysis whose canary has ended, so that it will not continue."""
    return analysis.model_copy(update={"state": ""}) if analysis is not None else None


def _promotion_reason(canary: CanaryArm, analysis: AnalysisStatus | None, state_transition: StateTransition) -> str:
    """Return why the canary is promoted."""
    if analysis is not None and analysis.verdict == "Promote":
        return analysis.message
    return MANUAL_PROMOTION_MESSAGE if canary.ready_time else f"Revision {canary.revision}: {state_transition.message}"


def _compute_weights(resource: SpeculativeDeployment, canary: CanaryArm, fleet: RolloutPods, arms: ArmReplicas) -> dict[str, int]:
    stable_counts, canary_counts, control_counts = fleet.stable.counts, fleet.canary.counts, fleet.control.counts
    ramp = resource.spec.rollout.canary.step_weights
    if canary.phase == "Starting" or not (stable_counts.ready or canary_counts.ready):
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


def _time_until_analysis_limit(canary: CanaryArm, analysis_run: AnalysisRun | None, now: datetime) -> timedelta | None:
    """Return the time until an analysis continues even without a block."""
    if canary.phase != "Analyzing" or analysis_run is None:
        return None
    elapsed = now.timestamp() - analysis_run.state.start_time
    remaining = [
        limit - elapsed
        for limit in (analysis_run.plan.min_duration_seconds, analysis_run.plan.max_duration_seconds)
        if limit > elapsed
    ]
    return timedelta(seconds=min(remaining)) if remaining else None


def _earliest(first: timedelta | None, second: timedelta | None) -> timedelta | None:
    return min((delay for delay in (first, second) if delay is not None), default=None)
