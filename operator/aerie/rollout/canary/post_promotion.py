"""After a promotion: pods of the revision before stay for a while, and what is promoted is watched with them at hand.

    Watching     they get no requests. Blocks of the promoted pods are held against the level of the acceptance (analysis/drift)
    Rechecking   that has fallen, which may be the traffic's doing: they get requests again, and both are compared in pairs

Either ends by time, which takes them away; or with the promotion taken back, by a person, by a fault or by the comparison: then
they are the stable revision again, serve at once as many requests as they can, and the promoted pods go as more of them serve,
as in any other rollback.

Guarantees: pure; all that must survive a crash is in the `PreviousArm` and the `AnalysisStatus` that come back. Kept is what a
promotion has left, within the places that the rollout had: nothing is started to be kept. Not guaranteed: that there is anything
to keep; with capacity Reuse there is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from aerie.analysis import messages, post_promotion
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.analysis.state import AnalysisState
from aerie.analysis.verdict import Verdict
from aerie.api.status import AnalysisStatus, Arm, CanaryArm, PreviousArm, Status
from aerie.rollout.canary import transition
from aerie.rollout.canary.abort_rules import find_abort_reasons
from aerie.rollout.canary.analysis_run import AnalysisRun
from aerie.rollout.canary.messages import build_retention_message
from aerie.rollout.canary.state_machine import CanaryObservation, CanaryPolicy, CanaryState, advance_state
from aerie.rollout.canary.transition import CanaryTransition, build_outcome
from aerie.rollout.capacity import replica_counts, traffic_weights
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.capacity.replica_counts import ArmReplicas, PodCounts
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.facts import hardware, pod_failures
from aerie.rollout.facts.route_status import route_rejection_message
from aerie.rollout.facts.snapshot import Snapshot


@dataclass(frozen=True)
class PostPromotionTransition:
    """Where the watch is after this look."""

    previous: PreviousArm | None
    """None: it is over."""
    analysis: AnalysisStatus | None
    weights: Mapping[str, int]
    """Share of the traffic by arm, in parts of traffic.ALL."""
    progressing: ConditionUpdate
    rollback: CanaryTransition | None = None
    """The way back, where the promotion is taken back."""
    rollback_revision: str | None = None
    """The revision that is stable again then."""
    requeue_after: timedelta | None = None


def start_monitoring(
    snapshot: Snapshot, old_stable: Arm, promoted: CanaryArm, analysis: AnalysisStatus | None, now: datetime
) -> PostPromotionTransition:
    """A revision has been promoted just now over the old one."""
    rollout, fleet = (
        snapshot.resource.spec.rollout,
        RolloutPods.from_snapshot(snapshot, old_stable.revision, promoted.revision, now),
    )
    count = min(replica_counts.max_retained_replicas(fleet.capacity), fleet.stable.counts.requested)
    if not count or not fleet.stable.counts.ready or rollout.canary.scale_down_delay <= timedelta(0):
        return _finish_monitoring(promoted, analysis)
    previous = PreviousArm(
        **dict(old_stable.model_copy(update={"replicas": count})),
        since=now,
        change=promoted.change,
        started_at=promoted.started_at,
    )
    evidence = _read_analysis_run(analysis)
    analysis = _store_analysis_run(analysis, evidence and evidence.reset_guard(now))
    return _continue_monitoring(snapshot, promoted, previous, fleet, analysis, rollout.canary.scale_down_delay)


def read_reference_acceptance_length(analysis: AnalysisStatus | None) -> float | None:
    """The acceptance length with which a canary was accepted, as the status shows it."""
    evidence = _read_analysis_run(analysis)
    length = post_promotion.compute_reference_acceptance_length(evidence.state, evidence.plan) if evidence is not None else None
    return None if length is None else round(length, 2)


def advance_monitoring(snapshot: Snapshot, stable: Arm, previous: PreviousArm, now: datetime) -> PostPromotionTransition:
    """The watch, one look later; the spec asks for the stable revision."""
    resource, status = snapshot.resource, snapshot.resource.status or Status()
    fleet = RolloutPods.from_snapshot(snapshot, previous.revision, stable.revision, now)
    needed = min(previous.replicas, count_required_previous_pods(fleet))
    count = max(needed, min(replica_counts.max_retained_replicas(fleet.capacity), previous.replicas))
    if not count:
        return _finish_monitoring(stable, status.analysis)
    previous = previous.model_copy(update={"replicas": count})
    stage = CanaryState(previous.phase, previous.started_at, previous.since, step_started_at=previous.since)
    patience = resource.spec.rollout.progress_deadline
    faults = list(
        find_abort_reasons(fleet.canary, fleet.stable, snapshot.invalid_metrics, patience, snapshot.last_log_lines, now)
    )
    evidence = _with_restarts(_read_analysis_run(status.analysis), fleet)
    evidence, judgement, fallen = _evaluate_blocks(snapshot, previous, evidence, len(fleet.canary.live_pods), faults, now)
    looks = CanaryObservation(
        ready=True,
        abort_message=" ".join(faults)
        or (post_promotion.abort_message(evidence.guard_state, evidence.plan) if evidence and evidence.guard_state else ""),
        regression_message=fallen,
        has_suspicious_crashes=bool(_crash_message(evidence)),
        verdict="Rollback" if judgement and judgement.outcome == "Rollback" else "Continue",
        verdict_message=judgement.message if judgement else "",
        manual_action=transition.read_manual_action(resource, stable.revision),
    )
    frozen = status.analysis.parameters if status.analysis else resource.spec.rollout.analysis
    step = advance_state(stage, looks, CanaryPolicy(resource.spec.rollout.canary, frozen, patience), now)
    analysis = _store_analysis_run(status.analysis, evidence)
    if step.end_state == "Over" and needed:
        return _continue_monitoring(snapshot, stable, previous, fleet, analysis, _time_until_next_late_pod(fleet, now), needed)
    if step.end_state == "Over":
        if analysis is not None and previous.phase == "Rechecking":
            said = f"{analysis.reason} Pods of revision {previous.revision} were not certainly better at the same time."
            analysis = analysis.model_copy(update={"reason": said})
        return _finish_monitoring(stable, analysis)
    if step.end_state is not None:
        comparisons = list(judgement.comparisons) if judgement and judgement.comparisons else None
        if analysis is not None and comparisons:
            analysis = analysis.model_copy(update={"comparisons": comparisons, "verdict": "Rollback", "reason": step.message})
        return revert_promotion(snapshot, stable, previous, step.message, analysis, now)
    if step.state.phase != stage.phase:
        previous = previous.model_copy(update={"phase": step.state.phase, "since": now})
        analysis = _store_analysis_run(analysis, evidence and evidence.reset_guard(now))
        analysis = analysis and analysis.model_copy(update={"reason": step.message})
    return _continue_monitoring(
        snapshot, stable, previous, fleet, analysis, step.requeue_after, suspicion=_crash_message(evidence)
    )


def count_required_previous_pods(fleet: RolloutPods) -> int:
    """Kept pods that clients cannot do without, because so many promoted ones do not serve."""
    return max(0, fleet.capacity.min_ready_pods - fleet.canary.counts.ready_or_tolerated) if fleet.stable.counts.ready else 0


def revert_promotion(
    snapshot: Snapshot,
    stable: Arm,
    previous: PreviousArm,
    reason: str,
    analysis: AnalysisStatus | None,
    now: datetime,
    result: transition.OutcomeResult = "RolledBack",
) -> PostPromotionTransition:
    """The promotion is taken back: the revision before is stable again, and its successor a canary on its way out."""
    status = snapshot.resource.status or Status()
    old = Arm(**{name: getattr(previous, name) for name in Arm.model_fields})
    leaving = CanaryArm(
        **dict(stable),
        change=previous.change,
        phase="RollingBack",
        started_at=previous.started_at,
        ready_at=previous.started_at,
        step_started_at=previous.since,
    )
    before = status.model_copy(update={"stable": old})
    outcome = build_outcome(leaving, result, f"Taken back after its promotion. {reason}", before, analysis, now)
    way = transition.roll_back_canary(snapshot, old, leaving, close_analysis(analysis), outcome, now)
    # Traffic first: its pods go with the next look, when it is written that they are to.
    asked = RolloutPods.from_snapshot(snapshot, old.revision, leaving.revision, now).canary.counts.requested
    way = replace(way, arms=replace(way.arms, canary=max(way.arms.canary, asked)))
    return PostPromotionTransition(None, way.analysis, way.weights, way.progressing, way, old.revision, way.requeue_after)


# --------------------------------------------------------------------------------------------------------------------- its parts
def _continue_monitoring(
    observed: Snapshot,
    stable: Arm,
    previous: PreviousArm,
    fleet: RolloutPods,
    analysis: AnalysisStatus | None,
    again: timedelta | None,
    needed: int = 0,
    suspicion: str = "",
) -> PostPromotionTransition:
    resource = observed.resource
    finding = ConditionUpdate(
        PROGRESSING, "True", previous.phase, build_retention_message(resource, stable, previous, analysis, needed, suspicion)
    )
    weights = {"stable": traffic_weights.TOTAL_WEIGHT}
    if previous.phase == "Watching" and fleet.stable.counts.ready and not fleet.canary.counts.ready:
        weights = {"stable": 0, "previous": traffic_weights.TOTAL_WEIGHT}
    if previous.phase == "Rechecking":
        arms = ArmReplicas(resource.spec.replicas, previous.replicas)
        found = traffic_weights.weights_by_replicas(arms, fleet.canary.counts, fleet.stable.counts, PodCounts())
        weights = {"stable": found["stable"], "previous": found["canary"]}
    return PostPromotionTransition(previous, analysis, weights, finding, requeue_after=again)


def _time_until_next_late_pod(fleet: RolloutPods, now: datetime) -> timedelta | None:
    """When another promoted pod is late, and may be excused."""
    late_at = fleet.canary.late_pods.next_late_at
    return max(timedelta(0), late_at - now) if late_at is not None else None


def _finish_monitoring(stable: Arm, analysis: AnalysisStatus | None) -> PostPromotionTransition:
    done = ConditionUpdate(PROGRESSING, "False", "Complete", f"revision {stable.revision} is rolled out")
    return PostPromotionTransition(
        None, close_analysis(analysis), {"stable": traffic_weights.TOTAL_WEIGHT}, done, requeue_after=timedelta(0)
    )


def _evaluate_blocks(
    observed: Snapshot, previous: PreviousArm, evidence: AnalysisRun | None, count: int, faults: list[str], now: datetime
) -> tuple[AnalysisRun | None, Verdict | None, str]:
    """The evidence with the blocks that are new; the verdict of the comparison in pairs; and what is to be said of a fall."""
    if evidence is None:
        return None, None, ""
    if route_rejection_message(observed):
        return evidence.skip_blocks(observed.blocks), None, ""
    if previous.phase == "Rechecking":
        evidence = evidence.with_hardware_difference(hardware.compared_hardware_difference(observed), now).with_blocks(
            observed.blocks
        )
        evidence, judgement = evidence.check_guardrails(now, faults)
        return evidence, judgement, ""
    level = post_promotion.compute_reference_level(evidence.state, evidence.plan)
    if level is None:
        return evidence, None, ""
    evidence = _with_promoted_blocks(evidence, observed.blocks, level, now)
    return (
        evidence,
        None,
        post_promotion.regression_message(evidence.guard_state or AnalysisState(0.0), level, evidence.plan, count),
    )


def _crash_message(evidence: AnalysisRun | None) -> str:
    """That engines of the promoted revision have ended, and it is not known whether by accident; empty where none has."""
    crashes = evidence.guard_state.crashes if evidence is not None and evidence.guard_state is not None else None
    return messages.suspicious_crashes_message(crashes) if crashes is not None and crashes.is_suspicious else ""


def _with_restarts(evidence: AnalysisRun | None, fleet: RolloutPods) -> AnalysisRun | None:
    """With the engines that have ended since the analysis began."""
    if evidence is None:
        return None
    since = datetime.fromtimestamp(evidence.state.began, tz=UTC)
    return evidence.with_restarts(
        *(pod_failures.count_restarts_since(group.live_pods, since) for group in (fleet.canary, fleet.stable))
    )


def _with_promoted_blocks(
    evidence: AnalysisRun, blocks: Iterable[ClosedBlock], level: post_promotion.ReferenceLevel, now: datetime
) -> AnalysisRun:
    """With those blocks of the promoted pods that are new."""
    for block in sorted(blocks, key=lambda one: one.start_time):
        if block.start_time >= evidence.counted_until:
            watched = post_promotion.add_promoted_block(
                evidence.guard_state or AnalysisState(now.timestamp()), block, level, evidence.plan
            )
            evidence = replace(evidence, guard_state=watched, counted_until=block.end_time)
    return evidence


def _read_analysis_run(analysis: AnalysisStatus | None) -> AnalysisRun | None:
    return AnalysisRun.unpack(analysis.state) if analysis is not None and analysis.state else None


def _store_analysis_run(analysis: AnalysisStatus | None, evidence: AnalysisRun | None) -> AnalysisStatus | None:
    """What the revision was accepted with stays to be read."""
    return analysis.model_copy(update={"state": evidence.pack()}) if analysis is not None and evidence is not None else analysis


def close_analysis(analysis: AnalysisStatus | None) -> AnalysisStatus | None:
    """The analysis when nothing goes on from it."""
    return analysis.model_copy(update={"state": ""}) if analysis is not None else None
