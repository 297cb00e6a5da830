"""Analysis of a canary over its phases: it starts, resumes from the status, counts blocks, and is stored in the status.

    status, or a new analysis ─► AnalysisRun ─► blocks since the last reconcile ─► verdict ─► status

Guarantees: pure. The returned `AnalysisStatus` contains all that must survive a crash. Where a gateway rejects the route, blocks
are skipped and not counted. Not guaranteed: that an analysis continues after a rollback or at zero replicas; it is
closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from aerie.analysis.verdict import Verdict
from aerie.api.rollout import AnalysisSpec
from aerie.api.status import TRAFFIC_SHIFT_PHASES, AnalysisStatus, Arm, CanaryArm, Status
from aerie.rollout.canary.analysis_run import calibration_record
from aerie.rollout.canary.analysis_run.equivalence_probe import find_probe_skip_reason
from aerie.rollout.canary.analysis_run.run import AnalysisRun, start_analysis, status_comparisons
from aerie.rollout.canary.state_machine import CanaryState, StateMachinePhase
from aerie.rollout.capacity import replica_counts
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.facts import hardware, pod_failures
from aerie.rollout.facts.route_status import route_rejection_message
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.revision.desired import DesiredRevision

FAILED_ATTEMPT_WINDOW = timedelta(hours=24)
"""Time for which analyses of a revision that ended without a promotion make the next analysis of it stricter."""
LOST_COUNTS_MESSAGE = "The counts of the analysis cannot be read by this release of Aerie, so its extension ends."


def resume_analysis_run(
    snapshot: Snapshot,
    desired: DesiredRevision,
    stable: Arm,
    canary_arm: CanaryArm,
    state: CanaryState,
    fleet: RolloutPods,
    now: datetime,
) -> AnalysisRun | None:
    """Return the run of the status, or a new one where an analysis without one is in progress; with current goal, hardware and
    restarts. An extension never begins a new one, which would test everything once more."""
    analysis = (snapshot.resource.status or Status()).analysis
    analysis_run = AnalysisRun.unpack(analysis.state) if analysis and analysis.state else None
    if analysis_run is None and state.phase == "Analyzing" and not state.is_extended:
        analysis_run = _start_analysis_run(snapshot, desired, stable, canary_arm, fleet, now)
    if analysis_run is None:
        return None
    hardware_difference = hardware.compared_hardware_difference(snapshot)
    analysis_run = analysis_run.with_goal(desired.goal).with_hardware_difference(hardware_difference, now)
    return _with_restarts(analysis_run, state.phase, fleet)


def start_phase_analysis(
    phase: StateMachinePhase,
    previous_phase: StateMachinePhase,
    analysis_run: AnalysisRun | None,
    snapshot: Snapshot,
    desired: DesiredRevision,
    stable: Arm,
    canary_arm: CanaryArm,
    fleet: RolloutPods,
    now: datetime,
) -> AnalysisRun | None:
    """Return the analysis run with which a phase begins. `canary_arm`: with its shadow evaluation as it is in that phase."""
    if previous_phase == "Held" and phase == "Analyzing":
        return _begin_extension(analysis_run, canary_arm, now)
    if phase == "Analyzing":
        return _start_analysis_run(snapshot, desired, stable, canary_arm, fleet, now)
    if phase in ("Evaluating", "WarmingUp") or previous_phase == "Ramping":
        return analysis_run
    if phase == "Held" and (analysis_run is None or analysis_run.extended_since is not None):
        return analysis_run.end_extension() if analysis_run is not None else None
    if analysis_run is None:  # the shadow evaluation has replaced the analysis, or a user has skipped it
        analysis_run = _start_analysis_run(snapshot, desired, stable, canary_arm, fleet, now)
    return analysis_run.reset_guard(now)


def evaluate_blocks(
    state: CanaryState, analysis_run: AnalysisRun | None, snapshot: Snapshot, abort_reasons: Sequence[str], now: datetime
) -> tuple[AnalysisRun | None, Verdict | None]:
    """Return the run with the new blocks, and its verdict; no verdict before the analysis."""
    if analysis_run is None and state.is_extended:
        return None, Verdict("Inconclusive", LOST_COUNTS_MESSAGE, ())
    if analysis_run is None or state.phase in ("Starting", "WarmingUp"):
        return analysis_run, None
    analysis_run = (
        analysis_run.skip_blocks(snapshot.engines.blocks)
        if route_rejection_message(snapshot)
        else analysis_run.with_blocks(snapshot.engines.blocks)
    )
    if state.phase == "Analyzing" and not state.is_extended:
        analysis_run = analysis_run.with_probe_result(snapshot.engines.equivalence_result)
    return evaluate_counts(state, analysis_run, abort_reasons, now)


def evaluate_counts(
    state: CanaryState, analysis_run: AnalysisRun | None, abort_reasons: Sequence[str], now: datetime
) -> tuple[AnalysisRun, Verdict]:
    """Return the run, which must exist, with its verdict in this phase."""
    assert analysis_run is not None
    if state.phase != "Analyzing":
        return analysis_run.check_guardrails(now, abort_reasons)
    if state.extension_ends_at is None:
        return analysis_run.evaluate(now, abort_reasons)
    return analysis_run.evaluate_extension(now, state.extension_ends_at, abort_reasons)


def build_analysis_status(
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
    is_guarded = analysis_run.guard_state is not None and analysis_run.extended_since is None
    if is_guarded and verdict.outcome != "Rollback":
        # The status keeps the comparisons of the promotion.
        return previous.model_copy(update={"state": state, "hardware_mismatch": hardware_difference})
    comparisons = status_comparisons(verdict.comparisons) or previous.comparisons
    design = "BetweenPods" if verdict.comparisons else previous.design
    update = {"design": design, "verdict": verdict.outcome, "message": verdict.message, "comparisons": comparisons}
    return previous.model_copy(update={**update, "state": state, "hardware_mismatch": hardware_difference})


def build_accepted_analysis_status(evaluation: AnalysisStatus, analysis_run: AnalysisRun | None) -> AnalysisStatus:
    """Return the analysis of a canary that its shadow evaluation has accepted: the evaluation, and the guardrails that follow."""
    return evaluation if analysis_run is None else evaluation.model_copy(update={"state": analysis_run.pack()})


def build_promoted_analysis_status(analysis: AnalysisStatus | None, canary_pods: int) -> AnalysisStatus | None:
    """Return the analysis of a canary that is promoted with this number of pods: post-promotion monitoring continues from it."""
    analysis_run = AnalysisRun.unpack(analysis.state) if analysis is not None and analysis.state else None
    if analysis is None or analysis_run is None:
        return analysis
    return analysis.model_copy(update={"state": analysis_run.adopt_guard_counts(canary_pods).pack()})


def close_analysis(analysis: AnalysisStatus | None) -> AnalysisStatus | None:
    """Return the status of an analysis that will not continue."""
    return analysis.model_copy(update={"state": ""}) if analysis is not None else None


def time_until_analysis_limit(canary: CanaryArm, analysis_run: AnalysisRun | None, now: datetime) -> timedelta | None:
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


def _begin_extension(analysis_run: AnalysisRun | None, canary_arm: CanaryArm, now: datetime) -> AnalysisRun:
    """Return the run whose inconclusive analysis continues. `canary_arm`: as it was while Held."""
    assert analysis_run is not None, "without counts there is no extension"
    assert analysis_run.guard_state is not None, "it was Held"
    first_held_since = datetime.fromtimestamp(analysis_run.guard_state.start_time, tz=UTC)
    return analysis_run.begin_extension(canary_arm.extension_end_time or first_held_since, now)


def _start_analysis_run(
    snapshot: Snapshot, desired: DesiredRevision, stable: Arm, canary_arm: CanaryArm, fleet: RolloutPods, now: datetime
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
    has_begun_evaluation = canary_arm.evaluation is not None and canary_arm.evaluation.start_time is not None
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
        failed_attempts + has_begun_evaluation,  # it has spent a part of the errors that are allowed
        calibration_record.find_calibration(snapshot, stable),
        now,
        skip_reason,
        goal,
    )
    return analysis_run.with_hardware_difference(hardware.compared_hardware_difference(snapshot), now)


def _with_restarts(analysis_run: AnalysisRun | None, phase: StateMachinePhase, fleet: RolloutPods) -> AnalysisRun | None:
    """Return the run with the engines that have ended."""
    if analysis_run is None:
        return None
    reference = fleet.stable if phase in TRAFFIC_SHIFT_PHASES or not fleet.control.live_pods else fleet.control
    since = datetime.fromtimestamp(analysis_run.state.start_time, tz=UTC)
    return analysis_run.with_restarts(
        *(pod_failures.count_restarts_since(arm_pods.live_pods, since) for arm_pods in (fleet.canary, reference))
    )
