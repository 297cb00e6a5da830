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

from aerie.api.status import AnalysisStatus, Arm, CanaryArm, PreviousArm, Status
from aerie.rollout import canary, capacity, hardware, pods, traffic
from aerie.rollout.analysis import drift, reasons
from aerie.rollout.analysis.blocks import Block
from aerie.rollout.analysis.counting import State
from aerie.rollout.analysis.judgement import Judgement
from aerie.rollout.canary import Way, outcome_of
from aerie.rollout.capacity import Arms, Pods
from aerie.rollout.conditions import PROGRESSING, Finding
from aerie.rollout.evidence import Evidence
from aerie.rollout.faults import stops
from aerie.rollout.fleet import Fleet
from aerie.rollout.machine import Looks, Stage, Terms, advance
from aerie.rollout.observed import Observed
from aerie.rollout.route import refusal
from aerie.rollout.sentences import kept


@dataclass(frozen=True)
class Watch:
    """Where the watch is after this look."""

    previous: PreviousArm | None
    """None: it is over."""
    analysis: AnalysisStatus | None
    weights: Mapping[str, int]
    """Share of the traffic by arm, in parts of traffic.ALL."""
    progressing: Finding
    back: Way | None = None
    """The way back, where the promotion is taken back."""
    back_to: str | None = None
    """The revision that is stable again then."""
    again: timedelta | None = None


def begin(observed: Observed, old: Arm, promoted: CanaryArm, analysis: AnalysisStatus | None, now: datetime) -> Watch:
    """A revision has been promoted just now over the old one."""
    rollout, fleet = observed.resource.spec.rollout, Fleet.of(observed, old.revision, promoted.revision, now)
    count = min(capacity.kept(fleet.places), fleet.stable.pods.asked)
    if not count or not fleet.stable.pods.serving or rollout.canary.scale_down_delay <= timedelta(0):
        return _over(promoted, analysis)
    previous = PreviousArm(
        **dict(old.model_copy(update={"replicas": count})),
        since=now,
        change=promoted.change,
        started_at=promoted.started_at,
    )
    evidence = _evidence(analysis)
    analysis = _written(analysis, evidence and evidence.renewed(now))
    return _at(observed, promoted, previous, fleet, analysis, rollout.canary.scale_down_delay)


def accepted_length(analysis: AnalysisStatus | None) -> float | None:
    """The acceptance length with which a canary was accepted, as the status shows it."""
    evidence = _evidence(analysis)
    length = drift.accepted_length(evidence.state, evidence.terms) if evidence is not None else None
    return None if length is None else round(length, 2)


def go_on(observed: Observed, stable: Arm, previous: PreviousArm, now: datetime) -> Watch:
    """The watch, one look later; the spec asks for the stable revision."""
    resource, status = observed.resource, observed.resource.status or Status()
    fleet = Fleet.of(observed, previous.revision, stable.revision, now)
    needed = min(previous.replicas, standing_in(fleet))
    count = max(needed, min(capacity.kept(fleet.places), previous.replicas))
    if not count:
        return _over(stable, status.analysis)
    previous = previous.model_copy(update={"replicas": count})
    stage = Stage(previous.phase, previous.started_at, previous.since, step_started_at=previous.since)
    patience = resource.spec.rollout.progress_deadline
    faults = list(stops(fleet.canary, fleet.stable, observed.unreadable, patience, observed.last_lines, now))
    evidence = _crashed(_evidence(status.analysis), fleet)
    evidence, judgement, fallen = _counted(observed, previous, evidence, len(fleet.canary.objects), faults, now)
    looks = Looks(
        ready=True,
        stop=" ".join(faults) or (drift.stop(evidence.watched, evidence.terms) if evidence and evidence.watched else ""),
        fallen=fallen,
        suspicious=bool(_suspicion(evidence)),
        verdict="Rollback" if judgement and judgement.verdict == "Rollback" else "Continue",
        reason=judgement.reason if judgement else "",
        word=canary.word(resource, stable.revision),
    )
    frozen = status.analysis.parameters if status.analysis else resource.spec.rollout.analysis
    step = advance(stage, looks, Terms(resource.spec.rollout.canary, frozen, patience), now)
    analysis = _written(status.analysis, evidence)
    if step.end == "Over" and needed:
        return _at(observed, stable, previous, fleet, analysis, _soon(fleet, now), needed)
    if step.end == "Over":
        if analysis is not None and previous.phase == "Rechecking":
            said = f"{analysis.reason} Pods of revision {previous.revision} were not certainly better at the same time."
            analysis = analysis.model_copy(update={"reason": said})
        return _over(stable, analysis)
    if step.end is not None:
        comparisons = list(judgement.comparisons) if judgement and judgement.comparisons else None
        if analysis is not None and comparisons:
            analysis = analysis.model_copy(update={"comparisons": comparisons, "verdict": "Rollback", "reason": step.why})
        return taken_back(observed, stable, previous, step.why, analysis, now)
    if step.stage.phase != stage.phase:
        previous = previous.model_copy(update={"phase": step.stage.phase, "since": now})
        analysis = _written(analysis, evidence and evidence.renewed(now))
        analysis = analysis and analysis.model_copy(update={"reason": step.why})
    return _at(observed, stable, previous, fleet, analysis, step.again, suspicion=_suspicion(evidence))


def standing_in(fleet: Fleet) -> int:
    """Kept pods that clients cannot do without, because so many promoted ones do not serve."""
    return max(0, fleet.places.floor - fleet.canary.pods.done) if fleet.stable.pods.serving else 0


def taken_back(
    observed: Observed,
    stable: Arm,
    previous: PreviousArm,
    why: str,
    analysis: AnalysisStatus | None,
    now: datetime,
    result: canary.Result = "RolledBack",
) -> Watch:
    """The promotion is taken back: the revision before is stable again, and its successor a canary on its way out."""
    status = observed.resource.status or Status()
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
    outcome = outcome_of(leaving, result, f"Taken back after its promotion. {why}", before, analysis, now)
    way = canary.withdraw(observed, old, leaving, closed(analysis), outcome, now)
    # Traffic first: its pods go with the next look, when it is written that they are to.
    asked = Fleet.of(observed, old.revision, leaving.revision, now).canary.pods.asked
    way = replace(way, arms=replace(way.arms, canary=max(way.arms.canary, asked)))
    return Watch(None, way.analysis, way.weights, way.progressing, way, old.revision, way.again)


# --------------------------------------------------------------------------------------------------------------------- its parts
def _at(
    observed: Observed,
    stable: Arm,
    previous: PreviousArm,
    fleet: Fleet,
    analysis: AnalysisStatus | None,
    again: timedelta | None,
    needed: int = 0,
    suspicion: str = "",
) -> Watch:
    resource = observed.resource
    finding = Finding(PROGRESSING, "True", previous.phase, kept(resource, stable, previous, analysis, needed, suspicion))
    weights = {"stable": traffic.ALL}
    if previous.phase == "Watching" and fleet.stable.pods.serving and not fleet.canary.pods.serving:
        weights = {"stable": 0, "previous": traffic.ALL}
    if previous.phase == "Rechecking":
        arms = Arms(resource.spec.replicas, previous.replicas)
        found = traffic.in_proportion(arms, fleet.canary.pods, fleet.stable.pods, Pods())
        weights = {"stable": found["stable"], "previous": found["canary"]}
    return Watch(previous, analysis, weights, finding, again=again)


def _soon(fleet: Fleet, now: datetime) -> timedelta | None:
    """When another promoted pod is late, and may be excused."""
    late_at = fleet.canary.lateness.next_at
    return max(timedelta(0), late_at - now) if late_at is not None else None


def _over(stable: Arm, analysis: AnalysisStatus | None) -> Watch:
    done = Finding(PROGRESSING, "False", "Complete", f"revision {stable.revision} is rolled out")
    return Watch(None, closed(analysis), {"stable": traffic.ALL}, done, again=timedelta(0))


def _counted(
    observed: Observed, previous: PreviousArm, evidence: Evidence | None, count: int, faults: list[str], now: datetime
) -> tuple[Evidence | None, Judgement | None, str]:
    """The evidence with the blocks that are new; the verdict of the comparison in pairs; and what is to be said of a fall."""
    if evidence is None:
        return None, None, ""
    if refusal(observed):
        return evidence.passed_over(observed.blocks), None, ""
    if previous.phase == "Rechecking":
        evidence = evidence.placed(hardware.difference(observed), now).counted(observed.blocks)
        evidence, judgement = evidence.watching(now, faults)
        return evidence, judgement, ""
    level = drift.level_of(evidence.state, evidence.terms)
    if level is None:
        return evidence, None, ""
    evidence = _followed(evidence, observed.blocks, level, now)
    return evidence, None, drift.fallen(evidence.watched or State(0.0), level, evidence.terms, count)


def _suspicion(evidence: Evidence | None) -> str:
    """That engines of the promoted revision have ended, and it is not known whether by accident; empty where none has."""
    crashes = evidence.watched.crashes if evidence is not None and evidence.watched is not None else None
    return reasons.suspicious(crashes) if crashes is not None and crashes.suspicious else ""


def _crashed(evidence: Evidence | None, fleet: Fleet) -> Evidence | None:
    """With the engines that have ended since the analysis began."""
    if evidence is None:
        return None
    since = datetime.fromtimestamp(evidence.state.began, tz=UTC)
    return evidence.crashed(*(pods.restarts_since(group.objects, since) for group in (fleet.canary, fleet.stable)))


def _followed(evidence: Evidence, blocks: Iterable[Block], level: drift.Level, now: datetime) -> Evidence:
    """With those blocks of the promoted pods that are new."""
    for block in sorted(blocks, key=lambda one: one.began):
        if block.began >= evidence.until:
            watched = drift.count(evidence.watched or State(now.timestamp()), block, level, evidence.terms)
            evidence = replace(evidence, watched=watched, until=block.ended)
    return evidence


def _evidence(analysis: AnalysisStatus | None) -> Evidence | None:
    return Evidence.unpack(analysis.state) if analysis is not None and analysis.state else None


def _written(analysis: AnalysisStatus | None, evidence: Evidence | None) -> AnalysisStatus | None:
    """What the revision was accepted with stays to be read."""
    return analysis.model_copy(update={"state": evidence.pack()}) if analysis is not None and evidence is not None else analysis


def closed(analysis: AnalysisStatus | None) -> AnalysisStatus | None:
    """The analysis when nothing goes on from it."""
    return analysis.model_copy(update={"state": ""}) if analysis is not None else None
