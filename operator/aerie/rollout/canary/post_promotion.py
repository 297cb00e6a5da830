"""Post-promotion monitoring: pods of the previous revision are retained for a while, as the promoted revision is monitored.

    Monitoring   the retained pods get no requests. Blocks of the promoted pods are compared with the acceptance level at the
                 promotion (aerie.analysis.post_promotion)
    Verifying    that level has regressed, perhaps because of the traffic. The retained pods get requests again, and both are
                 compared in pairs

Either phase ends by time, which removes the retained pods, or with a rollback of the promotion: by a user, by a hard failure or
by the comparison. After a rollback the previous revision is stable again, and its pods immediately serve as many requests as they
can. The promoted pods are scaled down as more of its pods become ready, as in any other rollback.

Guarantees: pure. The returned `PreviousArm` and `AnalysisStatus` contain all that must survive a crash. Only pods left by a
promotion are retained, within the capacity that the rollout had: no pod is started to be retained. Not guaranteed: that there are
pods to retain; with capacity Reuse there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from aerie.analysis import messages, post_promotion
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.analysis.state import AnalysisState
from aerie.analysis.verdict import Verdict
from aerie.api import SpeculativeDeployment
from aerie.api.status import AnalysisStatus, Arm, CanaryArm, PreviousArm, Status
from aerie.rollout.canary.abort_rules import find_abort_reasons
from aerie.rollout.canary.analysis_run.phases import close_analysis
from aerie.rollout.canary.analysis_run.run import AnalysisRun, status_comparisons
from aerie.rollout.canary.messages import build_retention_message
from aerie.rollout.canary.observation import read_manual_action
from aerie.rollout.canary.rollback import roll_back_canary
from aerie.rollout.canary.state_machine import CanaryObservation, CanaryPolicy, CanaryState, advance_state
from aerie.rollout.canary.transition import CanaryTransition, OutcomeResult, build_outcome
from aerie.rollout.capacity import replica_counts, traffic_weights
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.capacity.replica_counts import ArmReplicas, PodCounts
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.facts import hardware, pod_failures
from aerie.rollout.facts.route_status import route_rejection_message
from aerie.rollout.facts.snapshot import Snapshot


@dataclass(frozen=True)
class PostPromotionTransition:
    """State of the post-promotion monitoring after this reconcile."""

    previous: PreviousArm | None
    """The retained arm; None: the monitoring is over."""
    analysis: AnalysisStatus | None
    weights: Mapping[str, int]
    """Share of the traffic by arm, in parts of traffic_weights.TOTAL_WEIGHT."""
    progressing: ConditionUpdate
    rollback: CanaryTransition | None = None
    """The rollback, where the promotion is rolled back."""
    rollback_revision: str | None = None
    """The revision that is stable again after the rollback."""
    requeue_after: timedelta | None = None


def start_monitoring(
    snapshot: Snapshot, old_stable: Arm, promoted: CanaryArm, analysis: AnalysisStatus | None, now: datetime
) -> PostPromotionTransition:
    """Return the monitoring that begins now: a revision has just been promoted and replaces `old_stable`."""
    rollout, fleet = (
        snapshot.resource.spec.rollout,
        RolloutPods.from_snapshot(snapshot, old_stable.revision, promoted.revision, now),
    )
    count = min(replica_counts.max_retained_replicas(fleet.capacity), fleet.stable.counts.requested)
    if not count or not fleet.stable.counts.ready or rollout.canary.scale_down_delay <= timedelta(0):
        return _finish_monitoring(promoted, analysis)
    previous = PreviousArm(
        **dict(old_stable.model_copy(update={"replicas": count})),
        phase_start_time=now,
        change=promoted.change,
        start_time=promoted.start_time,
    )
    analysis_run = _read_analysis_run(analysis)
    analysis = _store_analysis_run(analysis, analysis_run and analysis_run.reset_guard(now))
    return _continue_monitoring(snapshot.resource, promoted, previous, fleet, analysis, rollout.canary.scale_down_delay)


def read_reference_acceptance_length(analysis: AnalysisStatus | None) -> float | None:
    """Return the acceptance length with which a canary was promoted, rounded for the status; None without one."""
    analysis_run = _read_analysis_run(analysis)
    length = (
        post_promotion.compute_reference_acceptance_length(analysis_run.state, analysis_run.plan)
        if analysis_run is not None
        else None
    )
    return None if length is None else round(length, 2)


def advance_monitoring(snapshot: Snapshot, stable: Arm, previous: PreviousArm, now: datetime) -> PostPromotionTransition:
    """Return the monitoring after this reconcile. The spec asks for the stable revision."""
    resource, status = snapshot.resource, snapshot.resource.status or Status()
    fleet = RolloutPods.from_snapshot(snapshot, previous.revision, stable.revision, now)
    required = min(previous.replicas, count_required_previous_pods(fleet))
    count = max(required, min(replica_counts.max_retained_replicas(fleet.capacity), previous.replicas))
    if not count:
        return _finish_monitoring(stable, status.analysis)
    previous = previous.model_copy(update={"replicas": count})
    state = CanaryState(previous.phase, previous.start_time, previous.phase_start_time, step_started_at=previous.phase_start_time)
    progress_deadline = resource.spec.rollout.progress_deadline
    abort_reasons = list(
        find_abort_reasons(
            fleet.canary, fleet.stable, snapshot.engines.invalid_metrics, progress_deadline, snapshot.cluster.last_log_lines, now
        )
    )
    analysis_run = _with_restarts(_read_analysis_run(status.analysis), fleet)
    analysis_run, verdict, regression = _evaluate_blocks(
        snapshot, previous, analysis_run, len(fleet.canary.live_pods), abort_reasons, now
    )
    abort_message = " ".join(abort_reasons)
    if not abort_message and analysis_run and analysis_run.guard_state:
        abort_message = post_promotion.abort_message(analysis_run.guard_state, analysis_run.plan)
    observation = CanaryObservation(
        ready=True,
        abort_message=abort_message,
        regression_message=regression,
        has_suspicious_crashes=bool(_crash_message(analysis_run)),
        verdict="Rollback" if verdict and verdict.outcome == "Rollback" else "Continue",
        verdict_message=verdict.message if verdict else "",
        manual_action=read_manual_action(resource, stable.revision),
    )
    analysis_spec = status.analysis.parameters if status.analysis else resource.spec.rollout.analysis
    state_transition = advance_state(
        state, observation, CanaryPolicy(resource.spec.rollout.canary, analysis_spec, progress_deadline), now
    )
    analysis = _store_analysis_run(status.analysis, analysis_run)
    if state_transition.end_state == "Completed" and required:
        return _continue_monitoring(
            snapshot.resource, stable, previous, fleet, analysis, _time_until_next_late_pod(fleet, now), required
        )
    if state_transition.end_state == "Completed":
        return _finish_monitoring(stable, _with_verification_result(analysis, previous))
    if state_transition.end_state is not None:
        analysis = _with_rollback_verdict(analysis, verdict, state_transition.message)
        return revert_promotion(snapshot, stable, previous, state_transition.message, analysis, now)
    if state_transition.state.phase != state.phase:
        previous = previous.model_copy(update={"phase": state_transition.state.phase, "phase_start_time": now})
        analysis = _store_analysis_run(analysis, analysis_run and analysis_run.reset_guard(now))
        analysis = analysis and analysis.model_copy(update={"message": state_transition.message})
    return _continue_monitoring(
        snapshot.resource,
        stable,
        previous,
        fleet,
        analysis,
        state_transition.requeue_after,
        crash_message=_crash_message(analysis_run),
    )


def _with_verification_result(analysis: AnalysisStatus | None, previous: PreviousArm) -> AnalysisStatus | None:
    """Return the analysis with the result of a phase Verifying that has ended without a rollback."""
    if analysis is None or previous.phase != "Verifying":
        return analysis
    message = f"{analysis.message} Pods of previous revision {previous.revision} were not significantly better at the same time."
    return analysis.model_copy(update={"message": message})


def _with_rollback_verdict(analysis: AnalysisStatus | None, verdict: Verdict | None, message: str) -> AnalysisStatus | None:
    """Return the analysis with the comparisons in pairs that led to the rollback, where there are any."""
    if analysis is None or verdict is None or not verdict.comparisons:
        return analysis
    comparisons = status_comparisons(verdict.comparisons)
    return analysis.model_copy(
        update={"design": "BetweenPods", "comparisons": comparisons, "verdict": "Rollback", "message": message}
    )


def count_required_previous_pods(fleet: RolloutPods) -> int:
    """Return the number of retained pods that clients need, because too few promoted pods are ready."""
    return max(0, fleet.capacity.min_ready_pods - fleet.canary.counts.ready_or_tolerated) if fleet.stable.counts.ready else 0


def revert_promotion(
    snapshot: Snapshot,
    stable: Arm,
    previous: PreviousArm,
    reason: str,
    analysis: AnalysisStatus | None,
    now: datetime,
    result: OutcomeResult = "RolledBack",
) -> PostPromotionTransition:
    """Return the rollback of a promotion: the previous revision is stable again, and its successor is a canary that is rolled
    back."""
    status = snapshot.resource.status or Status()
    restored_stable = Arm(**{name: getattr(previous, name) for name in Arm.model_fields})
    leaving_canary = CanaryArm(
        **dict(stable),
        change=previous.change,
        phase="RollingBack",
        start_time=previous.start_time,
        ready_time=previous.start_time,
        step_start_time=previous.phase_start_time,
    )
    restored_status = status.model_copy(update={"stable": restored_stable})
    outcome = build_outcome(leaving_canary, result, f"Rolled back after promotion. {reason}", restored_status, analysis, now)
    rollback = roll_back_canary(snapshot, restored_stable, leaving_canary, close_analysis(analysis), outcome, now)
    # Traffic first: the pods are scaled down by the next reconcile, once the status contains that.
    requested = RolloutPods.from_snapshot(
        snapshot, restored_stable.revision, leaving_canary.revision, now
    ).canary.counts.requested
    rollback = replace(rollback, arms=replace(rollback.arms, canary=max(rollback.arms.canary, requested)))
    return PostPromotionTransition(
        None,
        rollback.analysis,
        rollback.weights,
        rollback.progressing,
        rollback,
        restored_stable.revision,
        rollback.requeue_after,
    )


# --------------------------------------------------------------------------------------------------------------------- helpers
def _continue_monitoring(
    resource: SpeculativeDeployment,
    stable: Arm,
    previous: PreviousArm,
    fleet: RolloutPods,
    analysis: AnalysisStatus | None,
    requeue_after: timedelta | None,
    unready_pods: int = 0,
    crash_message: str = "",
) -> PostPromotionTransition:
    condition = ConditionUpdate(
        PROGRESSING,
        "True",
        previous.phase,
        build_retention_message(resource, stable, previous, analysis, unready_pods, crash_message),
    )
    weights = {"stable": traffic_weights.TOTAL_WEIGHT}
    if previous.phase == "Monitoring" and fleet.stable.counts.ready and not fleet.canary.counts.ready:
        weights = {"stable": 0, "previous": traffic_weights.TOTAL_WEIGHT}
    if previous.phase == "Verifying":
        arms = ArmReplicas(resource.spec.replicas, previous.replicas)
        replica_weights = traffic_weights.weights_by_replicas(arms, fleet.canary.counts, fleet.stable.counts, PodCounts())
        weights = {"stable": replica_weights["stable"], "previous": replica_weights["canary"]}
    return PostPromotionTransition(previous, analysis, weights, condition, requeue_after=requeue_after)


def _time_until_next_late_pod(fleet: RolloutPods, now: datetime) -> timedelta | None:
    """Return the time until the next promoted pod is late, and may be tolerated; None without one."""
    late_at = fleet.canary.late_pods.next_late_at
    return max(timedelta(0), late_at - now) if late_at is not None else None


def _finish_monitoring(stable: Arm, analysis: AnalysisStatus | None) -> PostPromotionTransition:
    condition = ConditionUpdate(PROGRESSING, "False", "Complete", f"Revision {stable.revision} is rolled out.")
    return PostPromotionTransition(
        None, close_analysis(analysis), {"stable": traffic_weights.TOTAL_WEIGHT}, condition, requeue_after=timedelta(0)
    )


def _evaluate_blocks(
    snapshot: Snapshot,
    previous: PreviousArm,
    analysis_run: AnalysisRun | None,
    pod_count: int,
    abort_reasons: list[str],
    now: datetime,
) -> tuple[AnalysisRun | None, Verdict | None, str]:
    """Return the run with the new blocks, the verdict of the comparison in pairs, and the message about a regression."""
    if analysis_run is None:
        return None, None, ""
    if route_rejection_message(snapshot):
        return analysis_run.skip_blocks(snapshot.engines.blocks), None, ""
    if previous.phase == "Verifying":
        analysis_run = analysis_run.with_hardware_difference(hardware.compared_hardware_difference(snapshot), now).with_blocks(
            snapshot.engines.blocks
        )
        analysis_run, verdict = analysis_run.check_guardrails(now, abort_reasons)
        return analysis_run, verdict, ""
    reference_level = post_promotion.compute_reference_level(analysis_run.state, analysis_run.plan)
    if reference_level is None:
        return analysis_run, None, ""
    analysis_run = _with_promoted_blocks(analysis_run, snapshot.engines.blocks, reference_level, now)
    return (
        analysis_run,
        None,
        post_promotion.regression_message(
            analysis_run.guard_state or AnalysisState(0.0), reference_level, analysis_run.plan, pod_count
        ),
    )


def _crash_message(analysis_run: AnalysisRun | None) -> str:
    """Return that engines of the promoted revision have crashed, and that it is unknown whether by accident; empty without
    crashes."""
    crashes = analysis_run.guard_state.crashes if analysis_run is not None and analysis_run.guard_state is not None else None
    return messages.suspicious_crashes_message(crashes) if crashes is not None and crashes.is_suspicious else ""


def _with_restarts(analysis_run: AnalysisRun | None, fleet: RolloutPods) -> AnalysisRun | None:
    """Return the run with the engines that have ended since the analysis began."""
    if analysis_run is None:
        return None
    since = datetime.fromtimestamp(analysis_run.state.start_time, tz=UTC)
    return analysis_run.with_restarts(
        *(pod_failures.count_restarts_since(arm_pods.live_pods, since) for arm_pods in (fleet.canary, fleet.stable))
    )


def _with_promoted_blocks(
    analysis_run: AnalysisRun, blocks: Iterable[ClosedBlock], reference_level: post_promotion.ReferenceLevel, now: datetime
) -> AnalysisRun:
    """Return the run with those blocks of the promoted pods added that are new."""
    for block in sorted(blocks, key=lambda block: block.start_time):
        if block.start_time >= analysis_run.counted_until:
            guard_state = post_promotion.add_promoted_block(
                analysis_run.guard_state or AnalysisState(now.timestamp()), block, reference_level, analysis_run.plan
            )
            analysis_run = replace(analysis_run, guard_state=guard_state, counted_until=block.end_time)
    return analysis_run


def _read_analysis_run(analysis: AnalysisStatus | None) -> AnalysisRun | None:
    return AnalysisRun.unpack(analysis.state) if analysis is not None and analysis.state else None


def _store_analysis_run(analysis: AnalysisStatus | None, analysis_run: AnalysisRun | None) -> AnalysisStatus | None:
    """Return the status with the packed run. Verdict and comparisons of the promotion stay readable."""
    return (
        analysis.model_copy(update={"state": analysis_run.pack()})
        if analysis is not None and analysis_run is not None
        else analysis
    )
