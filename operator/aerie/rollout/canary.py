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

from aerie.api import SpeculativeDeployment, duration
from aerie.api.rollout import Analysis
from aerie.api.status import AnalysisStatus, Arm, CanaryArm, Outcome, Status, Waiting
from aerie.rollout import capacity, hardware, history, pods, traffic
from aerie.rollout.analysis.judgement import Judgement
from aerie.rollout.capacity import Arms
from aerie.rollout.conditions import PROGRESSING, Finding, shortened
from aerie.rollout.context import shorter
from aerie.rollout.evidence import Evidence, begun
from aerie.rollout.faults import stops
from aerie.rollout.fleet import Fleet
from aerie.rollout.machine import GROWING, Looks, Phase, Stage, Step, Terms, advance
from aerie.rollout.observed import Observed
from aerie.rollout.questions import unasked
from aerie.rollout.route import refusal, refused_since
from aerie.rollout.sentences import PROMOTE, ROLL_BACK, finding_of, stuck, told
from aerie.rollout.traffic import ALL
from aerie.rollout.wanted import Wanted

REMEMBERED = timedelta(hours=24)
"""For so long, analyses of a revision that ended without a promotion make the next one of it stricter."""
LONGEST_PAUSE = timedelta(hours=6)
"""Between two attempts to find room for a canary."""
_JUDGED = ("WarmingUp", "Analyzing", "AwaitingApproval", "Held")
_UNDECIDED = ("Starting", "WarmingUp", "Analyzing")
Result = Literal["Promoted", "RolledBack", "Superseded", "Failed", "Explored"]


@dataclass(frozen=True)
class Way:
    """Where the canary is after this look."""

    canary: CanaryArm | None
    """None: it is promoted, or gone."""
    arms: Arms
    """Pods to ask for."""
    weights: Mapping[str, int]
    """Share of the traffic by arm, in parts of traffic.ALL."""
    progressing: Finding
    analysis: AnalysisStatus | None
    outcome: Outcome | None = None
    again: timedelta | None = None


# ------------------------------------------------------------------------------------------------------------------- the way on
def begin(observed: Observed, wanted: Wanted, stable: Arm, now: datetime) -> Way:
    """A canary that begins now."""
    spec, status = observed.resource.spec, observed.resource.status or Status()
    alone = is_broken(observed, stable)
    arm = CanaryArm(
        **dict(wanted.arm),
        change=wanted.change(status),
        phase="Promoting" if alone else "Starting",
        started_at=now,
        step_started_at=now if alone else None,
    )
    fleet = Fleet.of(observed, stable.revision, arm.revision, now)
    by_pods = spec.rollout.traffic.gateway is None
    arms = fleet.asked(arm.phase, spec.rollout.canary.ramp, None, by_pods=by_pods)
    finding = Finding(PROGRESSING, "True", arm.phase, told(observed.resource, arm, fleet, arms, None))
    weights = traffic.one_arm(fleet.stable.pods, fleet.canary.pods, fleet.control.pods)
    return Way(arm, arms, weights, finding, None, again=spec.rollout.progress_deadline)


def go_on(observed: Observed, wanted: Wanted, stable: Arm, known: CanaryArm, now: datetime) -> Way:
    """The canary, of the revision that is wanted, one look later."""
    resource = observed.resource
    spec, status = resource.spec, resource.status or Status()
    fleet = Fleet.of(observed, stable.revision, known.revision, now, stalled_since(known))
    if spec.replicas == 0 and known.phase in _UNDECIDED:
        return _scaled_to_zero(observed, stable, known, fleet, now)
    ramp, by_pods = spec.rollout.canary.ramp, spec.rollout.traffic.gateway is None
    stage = _stage(known)
    evidence = Evidence.unpack(status.analysis.state) if status.analysis and status.analysis.state else None
    if evidence is None and stage.phase == "Analyzing":
        evidence = _begun(observed, wanted, stable, fleet, now)
    evidence = evidence.meant(wanted.goal).placed(hardware.difference(observed), now) if evidence is not None else None
    faults = _stops(observed, stage.phase, fleet, now)
    evidence = _crashed(evidence, stage.phase, fleet)
    evidence, judgement = _judged(stage.phase, evidence, observed, faults, now)
    unrouted, limit = refusal(observed), _route_limit(observed, known)
    looks = Looks(
        ready=fleet.ready(stage.phase, ramp, stage.step, by_pods=by_pods) and (not unrouted or stage.phase == "Promoting"),
        late=fleet.late(stage.phase) or (limit is not None and now >= limit),
        late_at=fleet.late_at(stage.phase) if limit is None else min(limit, fleet.late_at(stage.phase) or limit),
        stop=" ".join(faults),
        verdict=judgement.verdict if judgement else "Continue",
        reason=judgement.reason if judgement else "",
        word=word(resource, known.revision),
    )
    terms = _terms(observed, wanted, known)
    step = advance(stage, looks, terms, now)
    frozen = terms.analysis
    analysis = _analysis(status.analysis if known.ready_at else None, evidence, judgement, frozen)
    if step.end is not None:
        return _ended(observed, stable, known, fleet, step, analysis, now)
    if step.stage.phase != stage.phase:
        evidence = _entered(step.stage.phase, stage.phase, evidence, observed, wanted, stable, fleet, now)
        if step.stage.phase == "Analyzing":
            assert evidence is not None
            evidence, judgement = evidence.judged(now, ())
        analysis = _analysis(analysis, evidence, judgement, frozen)
    canary = _with_stage(known, step.stage)
    arms = fleet.asked(canary.phase, ramp, canary.step, by_pods=by_pods)
    weights = _weights(resource, canary, fleet, arms)
    canary = canary.model_copy(update={"waiting": _waiting(known, canary, fleet, arms, now)})
    trouble = _trouble(observed, stable, known)
    finding = finding_of(resource, canary, fleet, arms, analysis, trouble)
    if unrouted:
        finding = replace(finding, message=f"{finding.message.rstrip('.')}. Nothing is decided: {unrouted}")
    return Way(canary, arms, weights, finding, analysis, again=_sooner(step.again, _due(canary, evidence, now)))


def _ended(
    observed: Observed, stable: Arm, known: CanaryArm, fleet: Fleet, step: Step, analysis: AnalysisStatus | None, now: datetime
) -> Way:
    """The canary is promoted, or on its way out from now on."""
    resource, why = observed.resource, step.why
    status, patience = resource.status or Status(), resource.spec.rollout.progress_deadline
    assert step.end is not None, "it has ended"
    assert step.end != "Over", "that is how a watch ends, not a canary"
    if step.end == "Promoted":
        outcome = outcome_of(known, "Promoted", _promoted(known, analysis, step), status, analysis, now)
        done = Finding(PROGRESSING, "False", "Complete", f"revision {known.revision} is rolled out")
        return Way(None, Arms(fleet.stable.pods.asked), {}, done, analysis, outcome, timedelta(0))  # watch.py goes on with it
    trouble = _trouble(observed, stable, known)
    if step.end == "Failed" and fleet.only_control_missing:
        why = f"{why} Its own serve; those of its control, which are of the stable revision {stable.revision}, do not."
    if step.end == "Failed" and trouble is not None:
        why = f"{why} {trouble.message[:1].upper()}{trouble.message[1:]}"
    elif step.end == "Failed" and (unrouted := refusal(observed)):
        why = f"{unrouted} So it was for spec.rollout.progressDeadline ({duration.format(patience)})."
    outcome = outcome_of(known, step.end, why, status, analysis, now)
    if step.end == "Failed" and fleet.roomless():
        outcome = outcome.model_copy(update={"retry_at": now + _pause(known, status, patience)})
    return withdraw(observed, stable, known, _closed(analysis), outcome, now)


def withdraw(
    observed: Observed,
    stable: Arm,
    known: CanaryArm,
    analysis: AnalysisStatus | None,
    outcome: Outcome | None,
    now: datetime,
) -> Way:
    """The canary on its way out. With an outcome it has ended just now: its traffic goes first, its pods with the next look."""
    resource = observed.resource
    since = stalled_since(known) if known.phase == "RollingBack" else None
    fleet = Fleet.of(observed, stable.revision, known.revision, now, since, grows="stable")
    replicas, groups = resource.spec.replicas, (fleet.stable.pods, fleet.canary.pods, fleet.control.pods)
    arms = capacity.withdrawn(fleet.places, *groups)
    weights = traffic.standing_in(replicas, arms, *groups)
    if outcome is not None and known.step_started_at is None:  # traffic first
        arms = replace(arms, canary=fleet.canary.pods.asked)
    if outcome is None and arms.canary == arms.control == 0:
        done = Finding(PROGRESSING, "False", "RolledBack", f"revision {known.revision} is gone")
        return Way(None, arms, weights, done, analysis, again=timedelta(0))
    said = outcome or next((one for one in (resource.status or Status()).history if one.revision == known.revision), None)
    why = f"{said.reason} " if said else ""
    message = f"{why}{fleet.stable.pods.serving} of {replicas} pods of revision {stable.revision} serve."
    if outcome is None and fleet.stuck_back:
        message = f"{message} {stuck(resource, stable, known)}"
    finding = Finding(PROGRESSING, "True", "RollingBack", message)
    arm = known.model_copy(update={"phase": "RollingBack"})
    arm = arm.model_copy(update={"waiting": _waiting(known, arm, fleet, arms, now)})
    return Way(arm, arms, weights, finding, analysis, outcome, timedelta(0) if outcome else timedelta(seconds=5))


def outcome_of(
    canary: CanaryArm, result: Result, reason: str, status: Status, analysis: AnalysisStatus | None, now: datetime
) -> Outcome:
    """How it has ended, with what was known of it."""
    return Outcome(
        revision=canary.revision,
        change=canary.change,
        result=result,
        reason=shortened(reason),
        started_at=canary.started_at,
        ended_at=now,
        drafter=canary.drafter,
        against=status.stable.drafter if status.stable else None,
        comparisons=analysis.comparisons if analysis and canary.ready_at else [],
    )


# --------------------------------------------------------------------------------------------------------------------- its parts
def _stage(canary: CanaryArm) -> Stage:
    assert canary.phase != "RollingBack"
    return Stage(canary.phase, canary.started_at, canary.ready_at, canary.step, canary.step_started_at)


def _with_stage(canary: CanaryArm, stage: Stage) -> CanaryArm:
    update = {"phase": stage.phase, "ready_at": stage.ready_at, "step": stage.step, "step_started_at": stage.step_started_at}
    return canary.model_copy(update=update)


def _terms(observed: Observed, wanted: Wanted, known: CanaryArm) -> Terms:
    """What the spec says of the rollout; of the analysis, what it said when this one began. A trial waits for nobody's word."""
    spec, status = observed.resource.spec, observed.resource.status or Status()
    frozen = status.analysis.parameters if status.analysis and known.ready_at else spec.rollout.analysis
    explore = None
    if wanted.trial is not None:
        frozen = frozen.model_copy(update={"on_inconclusive": "Rollback"})
        explore = spec.speculation.tuning.interval if wanted.trial.purpose == "Explore" else None
    return Terms(spec.rollout.canary, frozen, spec.rollout.progress_deadline, explore)


def _judged(
    phase: Phase, evidence: Evidence | None, observed: Observed, faults: Sequence[str], now: datetime
) -> tuple[Evidence | None, Judgement | None]:
    if evidence is None or phase in ("Starting", "WarmingUp"):
        return evidence, None
    evidence = evidence.passed_over(observed.blocks) if refusal(observed) else evidence.counted(observed.blocks)
    if phase == "Analyzing":
        return evidence.answered(observed.answers).judged(now, faults)
    return evidence.watching(now, faults)


def _crashed(evidence: Evidence | None, phase: Phase, fleet: Fleet) -> Evidence | None:
    """With the engines that have ended."""
    if evidence is None:
        return None
    others = fleet.stable if phase in GROWING or not fleet.control.objects else fleet.control
    since = datetime.fromtimestamp(evidence.state.began, tz=UTC)
    return evidence.crashed(*(pods.restarts_since(group.objects, since) for group in (fleet.canary, others)))


def _entered(
    phase: Phase,
    left: Phase,
    evidence: Evidence | None,
    observed: Observed,
    wanted: Wanted,
    stable: Arm,
    fleet: Fleet,
    now: datetime,
) -> Evidence | None:
    """The evidence when a phase begins."""
    if phase == "Analyzing":
        return _begun(observed, wanted, stable, fleet, now)
    if phase == "WarmingUp" or left == "Ramping":
        return evidence
    if evidence is None:  # a person has passed the analysis over
        evidence = _begun(observed, wanted, stable, fleet, now)
    return evidence.renewed(now)


def is_broken(observed: Observed, stable: Arm) -> bool:
    """Whether no stable pod serves, each of them for a reason that does not pass by itself."""
    group = observed.group(stable.revision)
    return bool(group) and all(map(pods.broken, group))


def _scaled_to_zero(observed: Observed, stable: Arm, known: CanaryArm, fleet: Fleet, now: datetime) -> Way:
    """No pod is asked for, so nothing can be judged but by a person."""
    status, said = observed.resource.status or Status(), word(observed.resource, known.revision)
    if said is not None:
        promoted = said == "promote"
        why = f"A person asked for the {'promotion' if promoted else 'rollback'}."
        step = Step(_stage(known), "Promoted" if promoted else "RolledBack", why)
        return _ended(observed, stable, known, fleet, step, status.analysis, now)
    message = f"spec.replicas is 0: the canary of revision {known.revision} starts anew with the first pods"
    finding = Finding(PROGRESSING, "False", "ScaledToZero", message)
    update = {"phase": "Starting", "ready_at": None, "step": None, "step_started_at": None, "waiting": None}
    return Way(known.model_copy(update=update), Arms(0), {"stable": ALL}, finding, _closed(status.analysis))


def _pause(known: CanaryArm, status: Status, patience: timedelta) -> timedelta:
    """Until a canary that has found no room is tried again: twice as long with each attempt."""
    attempts = list(itertools.takewhile(lambda ended: ended.revision == known.revision and ended.retry_at, status.history))
    doubled: timedelta = patience * 2 ** len(attempts)
    return min(LONGEST_PAUSE, doubled)


def _route_limit(observed: Observed, known: CanaryArm) -> datetime | None:
    """Until when a gateway is waited for that refuses the route; None where one takes it."""
    since = refused_since(observed)
    if since is None:
        return None
    return max(since, known.step_started_at or known.started_at) + observed.resource.spec.rollout.progress_deadline


def _trouble(observed: Observed, stable: Arm, known: CanaryArm) -> pods.Trouble | None:
    """What keeps pods of canary and control from serving."""
    groups = (observed.trouble(known.revision), observed.trouble(stable.revision, control=True))
    return pods.graver(*(trouble for trouble in groups if trouble is not None))


def stalled_since(known: CanaryArm) -> datetime | None:
    """Since when pods have been waited for without progress."""
    return known.waiting.since if known.waiting is not None else None


def _waiting(known: CanaryArm, after: CanaryArm, fleet: Fleet, arms: Arms, now: datetime) -> Waiting | None:
    """What `after` waits for; since now, where the phase or the step is another one, or more pods serve than ever since."""
    groups = (fleet.stable,) if after.phase == "RollingBack" else (fleet.canary, fleet.control)
    serving = sum(group.pods.serving for group in groups)
    asked = arms.stable if after.phase == "RollingBack" else arms.canary + arms.control
    if serving >= asked or any(group.lateness.wants_room for group in groups):
        return None
    before = known.waiting
    if before is None or serving > before.serving or (after.phase, after.step) != (known.phase, known.step):
        return Waiting(since=now, serving=serving)
    return before


def _begun(observed: Observed, wanted: Wanted, stable: Arm, fleet: Fleet, now: datetime) -> Evidence:
    spec, status = observed.resource.spec, observed.resource.status or Status()
    places = fleet.places
    attempt = sum(
        one.revision == wanted.revision and bool(one.comparisons) and one.result != "Promoted" and one.ended_at + REMEMBERED > now
        for one in status.history
    )
    sizes = (places.canary, places.control or max(1, capacity.judged(places).stable))
    why_not, goal = unasked(observed, stable, wanted.arm), wanted.goal
    asked = (spec.rollout.analysis, (wanted.arm, stable), sizes, spec.speculation.tuning.slo, attempt)
    return begun(*asked, history.recalled(observed, stable), now, why_not, goal).placed(hardware.difference(observed), now)


def _stops(observed: Observed, phase: Phase, fleet: Fleet, now: datetime) -> list[str]:
    others = fleet.control if fleet.control.objects else fleet.stable
    # Elsewhere the machine's own limit holds.
    patience = observed.resource.spec.rollout.progress_deadline if phase in _JUDGED else None
    found = list(stops(fleet.canary, others, observed.unreadable, patience, observed.last_lines, now))
    refused = shorter(observed.contexts, observed.resource.spec.engine.args)
    return [*found, refused] if refused else found


def word(resource: SpeculativeDeployment, revision: str) -> Literal["promote", "rollback"] | None:
    """What a person has said about this very revision."""
    said = resource.metadata.annotations
    if said.get(ROLL_BACK) == revision:
        return "rollback"
    return "promote" if said.get(PROMOTE) == revision else None


def _analysis(
    before: AnalysisStatus | None, evidence: Evidence | None, judgement: Judgement | None, frozen: Analysis
) -> AnalysisStatus | None:
    """The analysis as the status shows it; its sentence changes with a block or a verdict, and not with the clock."""
    if evidence is None:
        return before
    state, unlike = evidence.pack(), evidence.terms.unlike or None
    if before is None or judgement is None:
        return AnalysisStatus(
            parameters=frozen,
            verdict=judgement.verdict if judgement else "Continue",
            reason=judgement.reason if judgement else "",
            started_at=datetime.fromtimestamp(evidence.state.began, tz=UTC),
            history_blocks=evidence.history_blocks,
            inflation=round(evidence.inflation, 2),
            comparisons=list(judgement.comparisons) if judgement else [],
            unlike=unlike,
            state=state,
        )
    if before.state == state and before.verdict == judgement.verdict:
        return before
    if evidence.watched is not None and judgement.verdict != "Rollback":  # what it was accepted with stays to be read
        return before.model_copy(update={"state": state, "unlike": unlike})
    shown = list(judgement.comparisons or before.comparisons)
    found = {"verdict": judgement.verdict, "reason": judgement.reason, "comparisons": shown}
    return before.model_copy(update={**found, "state": state, "unlike": unlike})


def _closed(analysis: AnalysisStatus | None) -> AnalysisStatus | None:
    """The analysis when its canary has ended: nothing goes on from it."""
    return analysis.model_copy(update={"state": ""}) if analysis is not None else None


def _promoted(canary: CanaryArm, analysis: AnalysisStatus | None, step: Step) -> str:
    """Why it is promoted: what it was accepted for."""
    if analysis is not None and analysis.verdict == "Promote":
        return analysis.reason
    return "A person asked for the promotion." if canary.ready_at else f"Revision {canary.revision}: {step.why}"


def _weights(resource: SpeculativeDeployment, canary: CanaryArm, fleet: Fleet, arms: Arms) -> dict[str, int]:
    stable, mine, control = fleet.stable.pods, fleet.canary.pods, fleet.control.pods
    ramp = resource.spec.rollout.canary.ramp
    if canary.phase == "Starting" or not (stable.serving or mine.serving):
        return traffic.one_arm(stable, mine, control)
    match canary.phase:
        case "Ramping":
            share = capacity.ramp_share(ramp, canary.step)
            return traffic.shared(ALL * share // 100, resource.spec.replicas, arms, stable, mine)
        case "Promoting":
            return traffic.shared(ALL, resource.spec.replicas, arms, stable, mine)
        case _:
            return traffic.in_proportion(arms, stable, mine, control)


def _due(canary: CanaryArm, evidence: Evidence | None, now: datetime) -> timedelta | None:
    """When an analysis would go on without a block."""
    if canary.phase != "Analyzing" or evidence is None:
        return None
    passed = now.timestamp() - evidence.state.began
    left = [limit - passed for limit in (evidence.terms.soak, evidence.terms.deadline) if limit > passed]
    return timedelta(seconds=min(left)) if left else None


def _sooner(one: timedelta | None, other: timedelta | None) -> timedelta | None:
    return min((found for found in (one, other) if found is not None), default=None)
