"""The canary under way, one look further: what it shows, which row of the machine's table that is, and what follows from it.

    observed ─► pods of the arms ─┐
    blocks ───► evidence ─────────┼─► Looks ─► machine.advance ─► pods and weights of each arm, status, outcome
    a person's annotation ────────┘

Guarantees: pure; all that must survive a crash is in the `CanaryArm` and the `AnalysisStatus` that come back. A canary that has
ended stays, with phase RollingBack, until the stable arm has as many serving pods as it is owed. Where no stable pod serves, nor
will by itself, there is nothing to compare with and nothing to protect: the new revision takes its place as soon as it serves. A
canary for which the cluster has no room is not rejected: it is tried again, later and later. While spec.replicas is 0 nothing is
judged; the canary starts anew with the first pods.
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
from aerie.rollout.canary.analysis_run import AnalysisRun, start_analysis
from aerie.rollout.canary.equivalence_probe import find_probe_skip_reason
from aerie.rollout.canary.messages import (
    PROMOTE_ANNOTATION,
    ROLLBACK_ANNOTATION,
    build_blocked_rollback_message,
    build_progress_message,
    build_progressing_condition,
)
from aerie.rollout.canary.state_machine import (
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
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.revision.desired import DesiredRevision

FAILED_ATTEMPT_WINDOW = timedelta(hours=24)
"""For so long, analyses of a revision that ended without a promotion make the next one of it stricter."""
MAX_CAPACITY_RETRY_DELAY = timedelta(hours=6)
"""Between two attempts to find room for a canary."""
_PHASES_WITHOUT_POD_DEADLINE = ("WarmingUp", "Analyzing", "AwaitingApproval", "Held")
_PHASES_BEFORE_VERDICT = ("Starting", "WarmingUp", "Analyzing")
OutcomeResult = Literal["Promoted", "RolledBack", "Superseded", "Failed", "Explored"]


@dataclass(frozen=True)
class CanaryTransition:
    """Where the canary is after this look."""

    canary: CanaryArm | None
    """None: it is promoted, or gone."""
    arms: ArmReplicas
    """Pods to ask for."""
    weights: Mapping[str, int]
    """Share of the traffic by arm, in parts of traffic.ALL."""
    progressing: ConditionUpdate
    analysis: AnalysisStatus | None
    outcome: RolloutOutcome | None = None
    requeue_after: timedelta | None = None


# ------------------------------------------------------------------------------------------------------------------- the way on
def start_canary(snapshot: Snapshot, desired: DesiredRevision, stable: Arm, now: datetime) -> CanaryTransition:
    """A canary that begins now."""
    spec, status = snapshot.resource.spec, snapshot.resource.status or Status()
    alone = is_stable_broken(snapshot, stable)
    arm = CanaryArm(
        **dict(desired.arm),
        change=desired.describe_change(status),
        phase="Promoting" if alone else "Starting",
        started_at=now,
        step_started_at=now if alone else None,
    )
    fleet = RolloutPods.from_snapshot(snapshot, stable.revision, arm.revision, now)
    by_pods = spec.rollout.traffic.gateway is None
    arms = fleet.target_replicas(arm.phase, spec.rollout.canary.ramp, None, by_pods=by_pods)
    finding = ConditionUpdate(PROGRESSING, "True", arm.phase, build_progress_message(snapshot.resource, arm, fleet, arms, None))
    weights = traffic_weights.single_arm_weights(fleet.stable.counts, fleet.canary.counts, fleet.control.counts)
    return CanaryTransition(arm, arms, weights, finding, None, requeue_after=spec.rollout.progress_deadline)


def advance_canary(
    snapshot: Snapshot, desired: DesiredRevision, stable: Arm, canary_arm: CanaryArm, now: datetime
) -> CanaryTransition:
    """The canary, of the revision that is wanted, one look later."""
    resource = snapshot.resource
    spec, status = resource.spec, resource.status or Status()
    fleet = RolloutPods.from_snapshot(snapshot, stable.revision, canary_arm.revision, now, read_stalled_since(canary_arm))
    if spec.replicas == 0 and canary_arm.phase in _PHASES_BEFORE_VERDICT:
        return _handle_zero_replicas(snapshot, stable, canary_arm, fleet, now)
    ramp, by_pods = spec.rollout.canary.ramp, spec.rollout.traffic.gateway is None
    stage = _read_state(canary_arm)
    evidence = AnalysisRun.unpack(status.analysis.state) if status.analysis and status.analysis.state else None
    if evidence is None and stage.phase == "Analyzing":
        evidence = _start_analysis_run(snapshot, desired, stable, fleet, now)
    evidence = (
        evidence.with_goal(desired.goal).with_hardware_difference(hardware.compared_hardware_difference(snapshot), now)
        if evidence is not None
        else None
    )
    faults = _collect_abort_reasons(snapshot, stage.phase, fleet, now)
    evidence = _with_restarts(evidence, stage.phase, fleet)
    evidence, judgement = _evaluate_blocks(stage.phase, evidence, snapshot, faults, now)
    unrouted, limit = route_rejection_message(snapshot), _route_deadline(snapshot, canary_arm)
    looks = CanaryObservation(
        ready=fleet.has_ready_pods(stage.phase, ramp, stage.step, by_pods=by_pods)
        and (not unrouted or stage.phase == "Promoting"),
        deadline_exceeded=fleet.exceeds_deadline(stage.phase) or (limit is not None and now >= limit),
        next_deadline_at=fleet.next_late_at(stage.phase)
        if limit is None
        else min(limit, fleet.next_late_at(stage.phase) or limit),
        abort_message=" ".join(faults),
        verdict=judgement.outcome if judgement else "Continue",
        verdict_message=judgement.message if judgement else "",
        manual_action=read_manual_action(resource, canary_arm.revision),
    )
    terms = _build_policy(snapshot, desired, canary_arm)
    step = advance_state(stage, looks, terms, now)
    frozen = terms.analysis
    analysis = _build_analysis_status(status.analysis if canary_arm.ready_at else None, evidence, judgement, frozen)
    if step.end_state is not None:
        return _end_canary(snapshot, stable, canary_arm, fleet, step, analysis, now)
    if step.state.phase != stage.phase:
        evidence = _start_phase_analysis(step.state.phase, stage.phase, evidence, snapshot, desired, stable, fleet, now)
        if step.state.phase == "Analyzing":
            assert evidence is not None
            evidence, judgement = evidence.evaluate(now, ())
        analysis = _build_analysis_status(analysis, evidence, judgement, frozen)
    canary = _with_state(canary_arm, step.state)
    arms = fleet.target_replicas(canary.phase, ramp, canary.step, by_pods=by_pods)
    weights = _compute_weights(resource, canary, fleet, arms)
    canary = canary.model_copy(update={"waiting": _build_waiting(canary_arm, canary, fleet, arms, now)})
    trouble = _most_severe_failure(snapshot, stable, canary_arm)
    finding = build_progressing_condition(resource, canary, fleet, arms, analysis, trouble)
    if unrouted:
        finding = replace(finding, message=f"{finding.message.rstrip('.')}. Nothing is decided: {unrouted}")
    return CanaryTransition(
        canary,
        arms,
        weights,
        finding,
        analysis,
        requeue_after=_earliest(step.requeue_after, _time_until_analysis_limit(canary, evidence, now)),
    )


def _end_canary(
    observed: Snapshot,
    stable: Arm,
    known: CanaryArm,
    fleet: RolloutPods,
    step: StateTransition,
    analysis: AnalysisStatus | None,
    now: datetime,
) -> CanaryTransition:
    """The canary is promoted, or on its way out from now on."""
    resource, why = observed.resource, step.message
    status, patience = resource.status or Status(), resource.spec.rollout.progress_deadline
    assert step.end_state is not None, "it has ended"
    assert step.end_state != "Over", "that is how a watch ends, not a canary"
    if step.end_state == "Promoted":
        outcome = build_outcome(known, "Promoted", _promotion_reason(known, analysis, step), status, analysis, now)
        done = ConditionUpdate(PROGRESSING, "False", "Complete", f"revision {known.revision} is rolled out")
        return CanaryTransition(
            None, ArmReplicas(fleet.stable.counts.requested), {}, done, analysis, outcome, timedelta(0)
        )  # watch.py goes on with it
    trouble = _most_severe_failure(observed, stable, known)
    if step.end_state == "Failed" and fleet.waits_only_for_control:
        why = f"{why} Its own serve; those of its control, which are of the stable revision {stable.revision}, do not."
    if step.end_state == "Failed" and trouble is not None:
        why = f"{why} {trouble.message[:1].upper()}{trouble.message[1:]}"
    elif step.end_state == "Failed" and (unrouted := route_rejection_message(observed)):
        why = f"{unrouted} So it was for spec.rollout.progressDeadline ({duration.format_duration(patience)})."
    outcome = build_outcome(known, step.end_state, why, status, analysis, now)
    if step.end_state == "Failed" and fleet.waits_only_for_resources():
        outcome = outcome.model_copy(update={"retry_at": now + _capacity_retry_delay(known, status, patience)})
    return roll_back_canary(observed, stable, known, _close_analysis(analysis), outcome, now)


def roll_back_canary(
    snapshot: Snapshot,
    stable: Arm,
    canary_arm: CanaryArm,
    analysis: AnalysisStatus | None,
    outcome: RolloutOutcome | None,
    now: datetime,
) -> CanaryTransition:
    """The canary on its way out. With an outcome it has ended just now: its traffic goes first, its pods with the next look."""
    resource = snapshot.resource
    since = read_stalled_since(canary_arm) if canary_arm.phase == "RollingBack" else None
    fleet = RolloutPods.from_snapshot(snapshot, stable.revision, canary_arm.revision, now, since, growing_arm="stable")
    replicas, groups = resource.spec.replicas, (fleet.stable.counts, fleet.canary.counts, fleet.control.counts)
    arms = replica_counts.replicas_during_rollback(fleet.capacity, *groups)
    weights = traffic_weights.rollback_weights(replicas, arms, *groups)
    if outcome is not None and canary_arm.step_started_at is None:  # traffic first
        arms = replace(arms, canary=fleet.canary.counts.requested)
    if outcome is None and arms.canary == arms.control == 0:
        done = ConditionUpdate(PROGRESSING, "False", "RolledBack", f"revision {canary_arm.revision} is gone")
        return CanaryTransition(None, arms, weights, done, analysis, requeue_after=timedelta(0))
    said = outcome or next((one for one in (resource.status or Status()).history if one.revision == canary_arm.revision), None)
    why = f"{said.reason} " if said else ""
    message = f"{why}{fleet.stable.counts.ready} of {replicas} pods of revision {stable.revision} serve."
    if outcome is None and fleet.is_rollback_blocked:
        message = f"{message} {build_blocked_rollback_message(resource, stable, canary_arm)}"
    finding = ConditionUpdate(PROGRESSING, "True", "RollingBack", message)
    arm = canary_arm.model_copy(update={"phase": "RollingBack"})
    arm = arm.model_copy(update={"waiting": _build_waiting(canary_arm, arm, fleet, arms, now)})
    return CanaryTransition(arm, arms, weights, finding, analysis, outcome, timedelta(0) if outcome else timedelta(seconds=5))


def build_outcome(
    canary: CanaryArm, result: OutcomeResult, reason: str, status: Status, analysis: AnalysisStatus | None, now: datetime
) -> RolloutOutcome:
    """How it has ended, with what was known of it."""
    return RolloutOutcome(
        revision=canary.revision,
        change=canary.change,
        result=result,
        reason=truncate_message(reason),
        started_at=canary.started_at,
        ended_at=now,
        drafter=canary.drafter,
        against=status.stable.drafter if status.stable else None,
        comparisons=analysis.comparisons if analysis and canary.ready_at else [],
    )


# --------------------------------------------------------------------------------------------------------------------- its parts
def _read_state(canary: CanaryArm) -> CanaryState:
    assert canary.phase != "RollingBack"
    return CanaryState(canary.phase, canary.started_at, canary.ready_at, canary.step, canary.step_started_at)


def _with_state(canary: CanaryArm, stage: CanaryState) -> CanaryArm:
    update = {"phase": stage.phase, "ready_at": stage.ready_at, "step": stage.step, "step_started_at": stage.step_started_at}
    return canary.model_copy(update=update)


def _build_policy(observed: Snapshot, wanted: DesiredRevision, known: CanaryArm) -> CanaryPolicy:
    """What the spec says of the rollout; of the analysis, what it said when this one began. A trial waits for nobody's word."""
    spec, status = observed.resource.spec, observed.resource.status or Status()
    frozen = status.analysis.parameters if status.analysis and known.ready_at else spec.rollout.analysis
    explore = None
    if wanted.trial is not None:
        frozen = frozen.model_copy(update={"on_inconclusive": "Rollback"})
        explore = spec.speculation.tuning.interval if wanted.trial.purpose == "Explore" else None
    return CanaryPolicy(spec.rollout.canary, frozen, spec.rollout.progress_deadline, explore)


def _evaluate_blocks(
    phase: StateMachinePhase, evidence: AnalysisRun | None, observed: Snapshot, faults: Sequence[str], now: datetime
) -> tuple[AnalysisRun | None, Verdict | None]:
    if evidence is None or phase in ("Starting", "WarmingUp"):
        return evidence, None
    evidence = (
        evidence.skip_blocks(observed.blocks) if route_rejection_message(observed) else evidence.with_blocks(observed.blocks)
    )
    if phase == "Analyzing":
        return evidence.with_probe_result(observed.equivalence_result).evaluate(now, faults)
    return evidence.check_guardrails(now, faults)


def _with_restarts(evidence: AnalysisRun | None, phase: StateMachinePhase, fleet: RolloutPods) -> AnalysisRun | None:
    """With the engines that have ended."""
    if evidence is None:
        return None
    others = fleet.stable if phase in TRAFFIC_SHIFT_PHASES or not fleet.control.live_pods else fleet.control
    since = datetime.fromtimestamp(evidence.state.began, tz=UTC)
    return evidence.with_restarts(
        *(pod_failures.count_restarts_since(group.live_pods, since) for group in (fleet.canary, others))
    )


def _start_phase_analysis(
    phase: StateMachinePhase,
    left: StateMachinePhase,
    evidence: AnalysisRun | None,
    observed: Snapshot,
    wanted: DesiredRevision,
    stable: Arm,
    fleet: RolloutPods,
    now: datetime,
) -> AnalysisRun | None:
    """The evidence when a phase begins."""
    if phase == "Analyzing":
        return _start_analysis_run(observed, wanted, stable, fleet, now)
    if phase == "WarmingUp" or left == "Ramping":
        return evidence
    if evidence is None:  # a person has passed the analysis over
        evidence = _start_analysis_run(observed, wanted, stable, fleet, now)
    return evidence.reset_guard(now)


def is_stable_broken(snapshot: Snapshot, stable: Arm) -> bool:
    """Whether no stable pod serves, each of them for a reason that does not pass by itself."""
    group = snapshot.live_pods(stable.revision)
    return bool(group) and all(map(pod_failures.is_pod_unrecoverable, group))


def _handle_zero_replicas(
    observed: Snapshot, stable: Arm, known: CanaryArm, fleet: RolloutPods, now: datetime
) -> CanaryTransition:
    """No pod is asked for, so nothing can be judged but by a person."""
    status, said = observed.resource.status or Status(), read_manual_action(observed.resource, known.revision)
    if said is not None:
        promoted = said == "promote"
        why = f"A person asked for the {'promotion' if promoted else 'rollback'}."
        step = StateTransition(_read_state(known), "Promoted" if promoted else "RolledBack", why)
        return _end_canary(observed, stable, known, fleet, step, status.analysis, now)
    message = f"spec.replicas is 0: the canary of revision {known.revision} starts anew with the first pods"
    finding = ConditionUpdate(PROGRESSING, "False", "ScaledToZero", message)
    update = {"phase": "Starting", "ready_at": None, "step": None, "step_started_at": None, "waiting": None}
    return CanaryTransition(
        known.model_copy(update=update), ArmReplicas(0), {"stable": TOTAL_WEIGHT}, finding, _close_analysis(status.analysis)
    )


def _capacity_retry_delay(known: CanaryArm, status: Status, patience: timedelta) -> timedelta:
    """Until a canary that has found no room is tried again: twice as long with each attempt."""
    attempts = list(itertools.takewhile(lambda ended: ended.revision == known.revision and ended.retry_at, status.history))
    doubled: timedelta = patience * 2 ** len(attempts)
    return min(MAX_CAPACITY_RETRY_DELAY, doubled)


def _route_deadline(observed: Snapshot, known: CanaryArm) -> datetime | None:
    """Until when a gateway is waited for that refuses the route; None where one takes it."""
    since = route_rejected_since(observed)
    if since is None:
        return None
    return max(since, known.step_started_at or known.started_at) + observed.resource.spec.rollout.progress_deadline


def _most_severe_failure(observed: Snapshot, stable: Arm, known: CanaryArm) -> pod_failures.PodFailure | None:
    """What keeps pods of canary and control from serving."""
    groups = (observed.pod_failure(known.revision), observed.pod_failure(stable.revision, control=True))
    return pod_failures.select_most_severe(*(trouble for trouble in groups if trouble is not None))


def read_stalled_since(canary_arm: CanaryArm) -> datetime | None:
    """Since when pods have been waited for without progress."""
    return canary_arm.waiting.since if canary_arm.waiting is not None else None


def _build_waiting(
    known: CanaryArm, after: CanaryArm, fleet: RolloutPods, arms: ArmReplicas, now: datetime
) -> ReadinessProgress | None:
    """What `after` waits for; since now, where the phase or the step is another one, or more pods serve than ever since."""
    groups = (fleet.stable,) if after.phase == "RollingBack" else (fleet.canary, fleet.control)
    serving = sum(group.counts.ready for group in groups)
    asked = arms.stable if after.phase == "RollingBack" else arms.canary + arms.control
    if serving >= asked or any(group.late_pods.has_resource_shortage for group in groups):
        return None
    before = known.waiting
    if before is None or serving > before.serving or (after.phase, after.step) != (known.phase, known.step):
        return ReadinessProgress(since=now, serving=serving)
    return before


def _start_analysis_run(
    observed: Snapshot, wanted: DesiredRevision, stable: Arm, fleet: RolloutPods, now: datetime
) -> AnalysisRun:
    spec, status = observed.resource.spec, observed.resource.status or Status()
    places = fleet.capacity
    attempt = sum(
        one.revision == wanted.revision
        and bool(one.comparisons)
        and one.result != "Promoted"
        and one.ended_at + FAILED_ATTEMPT_WINDOW > now
        for one in status.history
    )
    sizes = (places.canary_replicas, places.control_replicas or max(1, replica_counts.replicas_during_analysis(places).stable))
    why_not, goal = find_probe_skip_reason(observed, stable, wanted.arm), wanted.goal
    asked = (spec.rollout.analysis, (wanted.arm, stable), sizes, spec.speculation.tuning.slo, attempt)
    return start_analysis(
        *asked, calibration_record.find_calibration(observed, stable), now, why_not, goal
    ).with_hardware_difference(hardware.compared_hardware_difference(observed), now)


def _collect_abort_reasons(observed: Snapshot, phase: StateMachinePhase, fleet: RolloutPods, now: datetime) -> list[str]:
    others = fleet.control if fleet.control.live_pods else fleet.stable
    # Elsewhere the machine's own limit holds.
    patience = observed.resource.spec.rollout.progress_deadline if phase in _PHASES_WITHOUT_POD_DEADLINE else None
    found = list(find_abort_reasons(fleet.canary, others, observed.invalid_metrics, patience, observed.last_log_lines, now))
    refused = shorter_context_message(observed.context_lengths, observed.resource.spec.engine.args)
    return [*found, refused] if refused else found


def read_manual_action(resource: SpeculativeDeployment, revision: str) -> Literal["promote", "rollback"] | None:
    """What a person has said about this very revision."""
    said = resource.metadata.annotations
    if said.get(ROLLBACK_ANNOTATION) == revision:
        return "rollback"
    return "promote" if said.get(PROMOTE_ANNOTATION) == revision else None


def _build_analysis_status(
    before: AnalysisStatus | None, evidence: AnalysisRun | None, judgement: Verdict | None, frozen: AnalysisSpec
) -> AnalysisStatus | None:
    """The analysis as the status shows it; its sentence changes with a block or a verdict, and not with the clock."""
    if evidence is None:
        return before
    state, unlike = evidence.pack(), evidence.plan.unlike or None
    if before is None or judgement is None:
        return AnalysisStatus(
            parameters=frozen,
            verdict=judgement.outcome if judgement else "Continue",
            reason=judgement.message if judgement else "",
            started_at=datetime.fromtimestamp(evidence.state.began, tz=UTC),
            history_blocks=evidence.calibration_blocks,
            inflation=round(evidence.variance_inflation, 2),
            comparisons=list(judgement.comparisons) if judgement else [],
            unlike=unlike,
            state=state,
        )
    if before.state == state and before.verdict == judgement.outcome:
        return before
    if evidence.guard_state is not None and judgement.outcome != "Rollback":  # what it was accepted with stays to be read
        return before.model_copy(update={"state": state, "unlike": unlike})
    shown = list(judgement.comparisons or before.comparisons)
    found = {"verdict": judgement.outcome, "reason": judgement.message, "comparisons": shown}
    return before.model_copy(update={**found, "state": state, "unlike": unlike})


def _close_analysis(analysis: AnalysisStatus | None) -> AnalysisStatus | None:
    """The analysis when its canary has ended: nothing goes on from it."""
    return analysis.model_copy(update={"state": ""}) if analysis is not None else None


def _promotion_reason(canary: CanaryArm, analysis: AnalysisStatus | None, step: StateTransition) -> str:
    """Why it is promoted: what it was accepted for."""
    if analysis is not None and analysis.verdict == "Promote":
        return analysis.reason
    return "A person asked for the promotion." if canary.ready_at else f"Revision {canary.revision}: {step.message}"


def _compute_weights(resource: SpeculativeDeployment, canary: CanaryArm, fleet: RolloutPods, arms: ArmReplicas) -> dict[str, int]:
    stable, mine, control = fleet.stable.counts, fleet.canary.counts, fleet.control.counts
    ramp = resource.spec.rollout.canary.ramp
    if canary.phase == "Starting" or not (stable.ready or mine.ready):
        return traffic_weights.single_arm_weights(stable, mine, control)
    match canary.phase:
        case "Ramping":
            share = replica_counts.ramp_step_percent(ramp, canary.step)
            return traffic_weights.capped_canary_weights(TOTAL_WEIGHT * share // 100, resource.spec.replicas, arms, stable, mine)
        case "Promoting":
            return traffic_weights.capped_canary_weights(TOTAL_WEIGHT, resource.spec.replicas, arms, stable, mine)
        case _:
            return traffic_weights.weights_by_replicas(arms, stable, mine, control)


def _time_until_analysis_limit(canary: CanaryArm, evidence: AnalysisRun | None, now: datetime) -> timedelta | None:
    """When an analysis would go on without a block."""
    if canary.phase != "Analyzing" or evidence is None:
        return None
    passed = now.timestamp() - evidence.state.began
    left = [limit - passed for limit in (evidence.plan.soak, evidence.plan.deadline) if limit > passed]
    return timedelta(seconds=min(left)) if left else None


def _earliest(one: timedelta | None, other: timedelta | None) -> timedelta | None:
    return min((found for found in (one, other) if found is not None), default=None)
