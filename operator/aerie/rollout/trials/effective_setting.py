"""Which speculation setting is asked for: the spec's, one that a trial has proven, or the one on trial now.

    status.speculation ─► asked ─► read_wanted ─► course ─┬─► settled (tuning_status.py) ─► status.speculation
    advice ───────────────────────────────► intended ─────┘

A trial is written into the status before anything is made for it, and from then on it is what is wanted: an ordinary canary of
the course follows. The choice that came of one, and the trial itself, hold for one spec: `basis` is the revision that the spec
alone would make, and where that is another one both are void. So whatever a user changes wins, and starts from the spec's own
setting. The bounds of spec.speculation (maxTokens, slo, tokens: 0) bind what was chosen before as well, from the next pass on.

Guarantees: pure; no trial in the modes Off and Recommend; a setting of tuning is asked for only while a trial of it is under way,
or while pods of the revision that has passed one are there; in mode Off the spec's alone. Nothing differs from a spec without
tuning until an advice has come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from aerie.api import SpeculativeDeployment
from aerie.api.speculation import Tuning
from aerie.api.status import Chosen, Gain, Outcome, SpeculationStatus, Status, Trial
from aerie.api.types import duration
from aerie.engine.speculation import Setting, SettingError, max_tokens, named
from aerie.manifests.revision_hash import revision
from aerie.rollout.canary import transition as canary
from aerie.rollout.canary.messages import ROLL_BACK
from aerie.rollout.children.tuning_record import tunes, without_drafts
from aerie.rollout.conditions import shortened
from aerie.rollout.facts.route_status import refusal
from aerie.rollout.facts.snapshot import Observed
from aerie.rollout.progression import Course
from aerie.rollout.revision.desired import of_spec, read_shown, read_wanted, shown
from aerie.rollout.revision.preflight_result import verdict_of
from aerie.rollout.trials import failures
from aerie.rollout.trials.failures import AFTER_ROLLBACK
from aerie.tuning.decision.policy import lengthened
from aerie.tuning.recommendation import Advice

FRESH = 2
"""Intervals for which an advice is one of the present."""


@dataclass(frozen=True)
class Asked:
    """What is asked for."""

    setting: Setting
    basis: str
    """The revision that the spec alone would make."""
    chosen: Chosen | None = None
    """The choice in force."""
    trial: Trial | None = None
    """The trial under way."""
    given_up: str = ""
    """Why the trial of the status has failed before its canary began, as a sentence."""
    void: str = ""
    """Which bound of the spec the choice of the status is beyond, so that it is no longer in force; empty where none."""


def asked(observed: Observed, now: datetime) -> Asked:
    """By the spec, and by the status as far as it still holds."""
    resource = observed.resource
    status, setting = resource.status or Status(), of_spec(resource)
    found = Asked(setting, revision(resource, setting))
    said, mode = status.speculation, resource.spec.speculation.tuning.mode
    if said is None or mode == "Off" or status.stable is None:
        return found
    alive = {arm.revision for arm in (status.stable, status.previous) if arm is not None}
    chosen = _read(resource, said.chosen, found.basis)
    if said.chosen is not None and chosen is not None and said.chosen.revision in alive:
        void = beyond(resource, said.chosen, chosen)
        found = replace(found, void=void) if void else Asked(chosen, found.basis, said.chosen)
    trial = _read(resource, said.trial, found.basis)
    if said.trial is None or trial is None or mode != "Auto" or resource.spec.replicas == 0:
        return found
    if beyond(resource, said.trial, trial):
        return found
    if why := _hopeless(observed, status, said.trial, now):
        return replace(found, given_up=why)
    return replace(found, setting=trial, trial=said.trial)


def beyond(resource: SpeculativeDeployment, found: Chosen | Trial, setting: Setting) -> str:
    """Which bound of the spec a setting of tuning's is beyond, as part of a sentence; empty where none."""
    spec = resource.spec.speculation
    if max_tokens(setting) and (why := without_drafts(resource)):
        return why
    if max_tokens(setting) > spec.tuning.max_tokens:
        return f"spec.speculation.tuning.maxTokens is {spec.tuning.max_tokens}"
    if spec.tuning.slo is not None and spec.tuning.slo.stricter_than(found.slo):
        return "spec.speculation.tuning.slo is stricter than the one that it was proven under"
    return ""


def _read(resource: SpeculativeDeployment, found: Chosen | Trial | None, basis: str) -> Setting | None:
    """Its setting, if it is for this spec."""
    if found is None or found.basis != basis:
        return None
    try:
        setting = read_shown(found.setting)
    except SettingError:
        return None
    return setting if revision(resource, setting) == found.revision else None


def _hopeless(observed: Observed, status: Status, trial: Trial, now: datetime) -> str:
    """Why a trial whose canary has not begun never will; empty while it may."""
    known, spec = status.canary, observed.resource.spec
    if (known is not None and known.revision == trial.revision) or spec.rollout.paused:
        return ""
    if problem := read_wanted(observed.resource, setting=read_shown(trial.setting)).problem:
        return problem
    verdict = verdict_of(observed, trial.revision, now)
    if verdict.state == "Refused":
        return verdict.message
    if status.stable is not None and not observed.serving(status.stable.revision):
        return "The stable pods ceased to serve before its canary began."
    if now >= trial.started_at + spec.rollout.progress_deadline:
        limit = duration.format(spec.rollout.progress_deadline)
        return f"Its canary did not begin within spec.rollout.progressDeadline ({limit}). {verdict.message}".rstrip()
    return ""


def with_end(way: Course, observed: Observed, asked: Asked, now: datetime) -> Course:
    """The course with what tuning adds: how a trial has ended that never had a canary, and that no setting of tuning's stays
    rejected as one of the spec's does; it is not asked for any more."""
    status = observed.resource.status or Status()
    trial = status.speculation.trial if status.speculation is not None else None
    if asked.trial is not None or asked.chosen is not None:
        way = replace(way, rejected=None)
    if not asked.given_up or trial is None or way.outcome is not None:
        return way
    setting = named(read_shown(trial.setting))
    reason = shortened(asked.given_up)
    ended = Outcome(
        revision=trial.revision, change=setting, result="Failed", reason=reason, started_at=trial.started_at, ended_at=now
    )
    return replace(way, outcome=ended)


def again(observed: Observed, asked: Asked, way: Course, now: datetime) -> timedelta | None:
    """When a trial whose canary has not begun is given up."""
    if asked.trial is None or way.rolling == asked.trial.revision or way.phase == "Paused":  # no trial is given up while paused
        return None
    return max(timedelta(0), asked.trial.started_at + observed.resource.spec.rollout.progress_deadline - now)


# -------------------------------------------------------------------------------------------------------------- a trial begins
@dataclass(frozen=True)
class Intent:
    """What follows from the advice: a trial, or why there is none."""

    trial: Trial | None = None
    reason: str = ""
    """As the condition has it; empty where nothing stands in the way."""
    message: str = ""
    queued: bool = False
    """Whether a trial would begin, and claims a slot for that."""


def current_advice(observed: Observed, way: Course) -> Advice | None:
    """The advice, if it is for the pods that are stable, after this step too."""
    advice, status = observed.advice, observed.resource.status
    before = status.stable.revision if status is not None and status.stable is not None else None
    return advice if advice is not None and advice.revision == before == way.stable else None


def intended(observed: Observed, asked: Asked, way: Course, now: datetime) -> Intent:
    """The trial that is to begin now."""
    resource, advice = observed.resource, current_advice(observed, way)
    status, tuning = resource.status or Status(), resource.spec.speculation.tuning
    if advice is None or advice.setting is None or advice.action not in ("Change", "Explore") or status.stable is None:
        return Intent()
    if not tunes(resource):
        return Intent()
    if asked.trial is not None:
        return Intent(_kept(asked.trial, advice, way))
    if status.stable.setting == shown(advice.setting):
        return Intent()
    if status.speculation is not None and status.speculation.trial is not None:  # it is void from now on: another advice counts
        return Intent()
    if waits := _waits(observed, way):
        return Intent(reason="RolloutUnderWay", message=waits)
    if refused := _refused(observed, asked, advice.setting):
        return Intent(reason="Refused", message=f"{named(advice.setting)} is not tried: {refused}")
    if tuning.mode != "Auto":
        return Intent()
    said = status.speculation
    if said is not None and (why := failures.without_room(said, observed, asked.basis)):
        return Intent(reason="NoRoom", message=why)
    if said is not None and (until := cooling_until(said, advice, tuning.cooldown, now)):
        return Intent(reason="Cooldown", message=f"{named(advice.setting)} may be tried from {until:%Y-%m-%d %H:%M} UTC on")
    if said is not None and (failed := _failed_lately(said, advice, tuning, now)):
        return Intent(reason="Cooldown", message=failed)
    ended = max((one.timestamp() for one in _moments(said)), default=0.0)
    if not ended <= advice.at or now.timestamp() - advice.at > FRESH * tuning.interval.total_seconds():
        return Intent()  # of a time before the last change, or too long ago: the next one counts
    if "Trial" not in observed.turn.may_begin:
        waits_for = observed.turn.waits_for
        told = f"{named(advice.setting)} waits for its turn: {waits_for}" if waits_for else ""
        return Intent(reason="Queued" if told else "", message=told, queued=True)
    trial = Trial(
        setting=shown(advice.setting),
        purpose="Change" if advice.action == "Change" else "Explore",
        revision=revision(resource, advice.setting),
        basis=asked.basis,
        slo=tuning.slo,
        predicted=gain_of(advice),
        started_at=now,
    )
    return Intent(trial)


def _kept(trial: Trial, advice: Advice, way: Course) -> Trial | None:
    """The trial that explores, now to be proven: what its canary has shown so far speaks for its setting."""
    canary = way.canary
    if canary is None or canary.revision != trial.revision or canary.phase != "Analyzing" or canary.ready_at is None:
        return None
    if trial.purpose != "Explore" or advice.action != "Change" or advice.setting != read_shown(trial.setting):
        return None
    if advice.at < canary.ready_at.timestamp():
        return None
    return trial.model_copy(update={"purpose": "Change", "predicted": gain_of(advice)})


def _waits(observed: Observed, way: Course) -> str:
    """What has to end before a trial may begin; empty where nothing does."""
    resource = observed.resource
    if way.phase == "Paused":
        return "spec.rollout.paused is true: no trial begins until it is false"
    if way.phase != "Ready" or way.canary is not None or way.previous is not None or way.outcome is not None:
        return "no trial begins while a rollout is under way, or what the spec asks for is not what serves"
    serving = observed.serving(way.stable or "")
    if serving < resource.spec.replicas or resource.spec.replicas == 0 or refusal(observed):
        return f"no trial begins before all {resource.spec.replicas} pods serve"
    return ""


def _refused(observed: Observed, asked: Asked, setting: Setting) -> str:
    """Why the engine is not given the setting; empty where it may be."""
    resource, most = observed.resource, observed.resource.spec.speculation.tuning.max_tokens
    if max_tokens(setting) > most:
        return f"spec.speculation.tuning.maxTokens is {most}."
    wanted = read_wanted(resource, setting=setting)
    if wanted.problem:
        return wanted.problem
    if canary.word(resource, wanted.revision) == "rollback" and wanted.revision != asked.basis:
        return f"a person has rolled it back; without the annotation {ROLL_BACK} it may be tried again."
    return ""


def cooling_until(said: SpeculationStatus, advice: Advice, cooldown: timedelta, now: datetime) -> datetime | None:
    """Until when nothing is tried; None where something may be. What a canary was to teach may be acted on at once, and that a
    trial was taken back or undecided says nothing of traffic that has changed since it began."""
    ends = [moment + times * cooldown for moment, times in _pauses(said, advice)]
    last = max(ends, default=None)
    return last if last is not None and last > now else None


def _pauses(said: SpeculationStatus, advice: Advice) -> Iterator[tuple[datetime, int]]:
    if said.changed_at is not None:
        yield said.changed_at, 1
    began = unproven(said)
    if began is not None and (said.failed or began.timestamp() >= (advice.since or 0.0)):
        if said.rolled_back_at is not None:
            yield said.rolled_back_at, AFTER_ROLLBACK * lengthened(said.failed or 0)
        undecided = [one.ended_at for one in said.changes if one.result == "Undecided"]
        if undecided:
            yield undecided[0], min(len(undecided), AFTER_ROLLBACK)
    if advice.action == "Explore":
        yield from ((moment, 1) for moment in said.explored)


def _failed_lately(said: SpeculationStatus, advice: Advice, tuning: Tuning, now: datetime) -> str:
    """That the setting has failed before and its pause is not over, as a sentence; empty where it may be tried."""
    found = next((one for one in said.failures if advice.setting is not None and one.setting == shown(advice.setting)), None)
    if found is None or (found.reason == "Worse" and found.began_at.timestamp() < (advice.since or 0.0)):
        return ""
    until = failures.until(found, tuning.cooldown, tuning.interval)
    if now >= until:
        return ""
    times = "once" if found.times == 1 else f"{found.times} times in a row"
    setting = named(read_shown(found.setting))
    return f"{setting} has failed {times} and may be tried from {until:%Y-%m-%d %H:%M} UTC on: {found.message}"


def unproven(said: SpeculationStatus) -> datetime | None:
    """When the last trial began that was taken back, failed, or stayed undecided."""
    last = next((one for one in said.changes if one.result in ("RolledBack", "Failed", "Undecided")), None)
    return said.rolled_back_at if last is None else last.started_at or last.ended_at


def _moments(said: SpeculationStatus | None) -> Iterator[datetime]:
    if said is not None:
        yield from (one for one in (said.changed_at, said.rolled_back_at) if one is not None)
        yield from (one.ended_at for one in said.changes)


def gain_of(advice: Advice) -> Gain | None:
    """The predicted gain as the status shows it."""
    if advice.gain is None:
        return None
    low, middle, high = advice.gain
    return Gain(estimate=round(middle, 3), lower=round(low, 3), upper=round(high, 3))
