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
from aerie.api.speculation import TuningSpec
from aerie.api.status import AppliedSetting, PerformanceGain, RolloutOutcome, SpeculationStatus, Status, Trial
from aerie.api.types import duration
from aerie.engine.speculation import SpeculationSetting, SpeculationSettingError, describe_setting, max_speculative_tokens
from aerie.manifests.revision_hash import compute_revision
from aerie.rollout.canary import transition as canary
from aerie.rollout.canary.messages import ROLLBACK_ANNOTATION
from aerie.rollout.children.tuning_record import find_drafting_obstacle, is_tuning_enabled
from aerie.rollout.conditions import truncate_message
from aerie.rollout.facts.route_status import route_rejection_message
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression import Progression
from aerie.rollout.revision.desired import build_status_setting, read_spec_setting, read_status_setting, resolve_desired_revision
from aerie.rollout.revision.preflight_result import read_preflight_result
from aerie.rollout.trials import failures
from aerie.rollout.trials.failures import COOLDOWNS_AFTER_ROLLBACK
from aerie.tuning.decision.policy import backoff_factor
from aerie.tuning.recommendation import Recommendation

MAX_RECOMMENDATION_AGE_INTERVALS = 2
"""Intervals for which an advice is one of the present."""


@dataclass(frozen=True)
class EffectiveSetting:
    """What is asked for."""

    setting: SpeculationSetting
    basis: str
    """The revision that the spec alone would make."""
    applied: AppliedSetting | None = None
    """The choice in force."""
    trial: Trial | None = None
    """The trial under way."""
    abandoned_reason: str = ""
    """Why the trial of the status has failed before its canary began, as a sentence."""
    exceeded_bound: str = ""
    """Which bound of the spec the choice of the status is beyond, so that it is no longer in force; empty where none."""


def resolve_effective_setting(snapshot: Snapshot, now: datetime) -> EffectiveSetting:
    """By the spec, and by the status as far as it still holds."""
    resource = snapshot.resource
    status, setting = resource.status or Status(), read_spec_setting(resource)
    found = EffectiveSetting(setting, compute_revision(resource, setting))
    said, mode = status.speculation, resource.spec.speculation.tuning.mode
    if said is None or mode == "Off" or status.stable is None:
        return found
    alive = {arm.revision for arm in (status.stable, status.previous) if arm is not None}
    chosen = _read_setting_for_basis(resource, said.chosen, found.basis)
    if said.chosen is not None and chosen is not None and said.chosen.revision in alive:
        void = find_exceeded_bound(resource, said.chosen, chosen)
        found = replace(found, exceeded_bound=void) if void else EffectiveSetting(chosen, found.basis, said.chosen)
    trial = _read_setting_for_basis(resource, said.trial, found.basis)
    if said.trial is None or trial is None or mode != "Auto" or resource.spec.replicas == 0:
        return found
    if find_exceeded_bound(resource, said.trial, trial):
        return found
    if why := _find_start_obstacle(snapshot, status, said.trial, now):
        return replace(found, abandoned_reason=why)
    return replace(found, setting=trial, trial=said.trial)


def find_exceeded_bound(resource: SpeculativeDeployment, candidate: AppliedSetting | Trial, setting: SpeculationSetting) -> str:
    """Which bound of the spec a setting of tuning's is beyond, as part of a sentence; empty where none."""
    spec = resource.spec.speculation
    if max_speculative_tokens(setting) and (why := find_drafting_obstacle(resource)):
        return why
    if max_speculative_tokens(setting) > spec.tuning.max_tokens:
        return f"spec.speculation.tuning.maxTokens is {spec.tuning.max_tokens}"
    if spec.tuning.slo is not None and spec.tuning.slo.is_stricter_than(candidate.slo):
        return "spec.speculation.tuning.slo is stricter than the one that it was proven under"
    return ""


def _read_setting_for_basis(
    resource: SpeculativeDeployment, found: AppliedSetting | Trial | None, basis: str
) -> SpeculationSetting | None:
    """Its setting, if it is for this spec."""
    if found is None or found.basis != basis:
        return None
    try:
        setting = read_status_setting(found.setting)
    except SpeculationSettingError:
        return None
    return setting if compute_revision(resource, setting) == found.revision else None


def _find_start_obstacle(observed: Snapshot, status: Status, trial: Trial, now: datetime) -> str:
    """Why a trial whose canary has not begun never will; empty while it may."""
    known, spec = status.canary, observed.resource.spec
    if (known is not None and known.revision == trial.revision) or spec.rollout.paused:
        return ""
    if problem := resolve_desired_revision(observed.resource, setting=read_status_setting(trial.setting)).problem:
        return problem
    verdict = read_preflight_result(observed, trial.revision, now)
    if verdict.state == "Refused":
        return verdict.message
    if status.stable is not None and not observed.ready_pod_count(status.stable.revision):
        return "The stable pods ceased to serve before its canary began."
    if now >= trial.started_at + spec.rollout.progress_deadline:
        limit = duration.format_duration(spec.rollout.progress_deadline)
        return f"Its canary did not begin within spec.rollout.progressDeadline ({limit}). {verdict.message}".rstrip()
    return ""


def with_trial_outcome(progression: Progression, snapshot: Snapshot, effective: EffectiveSetting, now: datetime) -> Progression:
    """The course with what tuning adds: how a trial has ended that never had a canary, and that no setting of tuning's stays
    rejected as one of the spec's does; it is not asked for any more."""
    status = snapshot.resource.status or Status()
    trial = status.speculation.trial if status.speculation is not None else None
    if effective.trial is not None or effective.applied is not None:
        progression = replace(progression, rejected_revision=None)
    if not effective.abandoned_reason or trial is None or progression.outcome is not None:
        return progression
    setting = describe_setting(read_status_setting(trial.setting))
    reason = truncate_message(effective.abandoned_reason)
    ended = RolloutOutcome(
        revision=trial.revision, change=setting, result="Failed", reason=reason, started_at=trial.started_at, ended_at=now
    )
    return replace(progression, outcome=ended)


def compute_time_until_trial_expiry(
    snapshot: Snapshot, effective: EffectiveSetting, progression: Progression, now: datetime
) -> timedelta | None:
    """When a trial whose canary has not begun is given up."""
    if (
        effective.trial is None or progression.canary_revision == effective.trial.revision or progression.phase == "Paused"
    ):  # no trial is given up while paused
        return None
    return max(timedelta(0), effective.trial.started_at + snapshot.resource.spec.rollout.progress_deadline - now)


# -------------------------------------------------------------------------------------------------------------- a trial begins
@dataclass(frozen=True)
class TrialDecision:
    """What follows from the advice: a trial, or why there is none."""

    trial: Trial | None = None
    reason: str = ""
    """As the condition has it; empty where nothing stands in the way."""
    message: str = ""
    queued: bool = False
    """Whether a trial would begin, and claims a slot for that."""


def find_current_recommendation(snapshot: Snapshot, progression: Progression) -> Recommendation | None:
    """The advice, if it is for the pods that are stable, after this step too."""
    advice, status = snapshot.recommendation, snapshot.resource.status
    before = status.stable.revision if status is not None and status.stable is not None else None
    return advice if advice is not None and advice.revision == before == progression.stable_revision else None


def decide_next_trial(snapshot: Snapshot, effective: EffectiveSetting, progression: Progression, now: datetime) -> TrialDecision:
    """The trial that is to begin now."""
    resource, advice = snapshot.resource, find_current_recommendation(snapshot, progression)
    status, tuning = resource.status or Status(), resource.spec.speculation.tuning
    if advice is None or advice.setting is None or advice.action not in ("Change", "Explore") or status.stable is None:
        return TrialDecision()
    if not is_tuning_enabled(resource):
        return TrialDecision()
    if effective.trial is not None:
        return TrialDecision(_convert_exploration(effective.trial, advice, progression))
    if status.stable.setting == build_status_setting(advice.setting):
        return TrialDecision()
    if status.speculation is not None and status.speculation.trial is not None:  # it is void from now on: another advice counts
        return TrialDecision()
    if waits := _find_rollout_obstacle(snapshot, progression):
        return TrialDecision(reason="RolloutUnderWay", message=waits)
    if refused := _find_setting_rejection(snapshot, effective, advice.setting):
        return TrialDecision(reason="Refused", message=f"{describe_setting(advice.setting)} is not tried: {refused}")
    if tuning.mode != "Auto":
        return TrialDecision()
    said = status.speculation
    if said is not None and (why := failures.find_capacity_obstacle(said, snapshot, effective.basis)):
        return TrialDecision(reason="NoRoom", message=why)
    if said is not None and (until := find_cooldown_end(said, advice, tuning.cooldown, now)):
        return TrialDecision(
            reason="Cooldown", message=f"{describe_setting(advice.setting)} may be tried from {until:%Y-%m-%d %H:%M} UTC on"
        )
    if said is not None and (failed := _recent_failure_message(said, advice, tuning, now)):
        return TrialDecision(reason="Cooldown", message=failed)
    ended = max((one.timestamp() for one in _iterate_change_times(said)), default=0.0)
    if (
        not ended <= advice.decision_time
        or now.timestamp() - advice.decision_time > MAX_RECOMMENDATION_AGE_INTERVALS * tuning.interval.total_seconds()
    ):
        return TrialDecision()  # of a time before the last change, or too long ago: the next one counts
    if "Trial" not in snapshot.start_permission.allowed_purposes:
        waits_for = snapshot.start_permission.wait_reason
        told = f"{describe_setting(advice.setting)} waits for its turn: {waits_for}" if waits_for else ""
        return TrialDecision(reason="Queued" if told else "", message=told, queued=True)
    trial = Trial(
        setting=build_status_setting(advice.setting),
        purpose="Change" if advice.action == "Change" else "Explore",
        revision=compute_revision(resource, advice.setting),
        basis=effective.basis,
        slo=tuning.slo,
        predicted=build_predicted_gain(advice),
        started_at=now,
    )
    return TrialDecision(trial)


def _convert_exploration(trial: Trial, advice: Recommendation, way: Progression) -> Trial | None:
    """The trial that explores, now to be proven: what its canary has shown so far speaks for its setting."""
    canary = way.canary
    if canary is None or canary.revision != trial.revision or canary.phase != "Analyzing" or canary.ready_at is None:
        return None
    if trial.purpose != "Explore" or advice.action != "Change" or advice.setting != read_status_setting(trial.setting):
        return None
    if advice.decision_time < canary.ready_at.timestamp():
        return None
    return trial.model_copy(update={"purpose": "Change", "predicted": build_predicted_gain(advice)})


def _find_rollout_obstacle(observed: Snapshot, way: Progression) -> str:
    """What has to end before a trial may begin; empty where nothing does."""
    resource = observed.resource
    if way.phase == "Paused":
        return "spec.rollout.paused is true: no trial begins until it is false"
    if way.phase != "Ready" or way.canary is not None or way.previous is not None or way.outcome is not None:
        return "no trial begins while a rollout is under way, or what the spec asks for is not what serves"
    serving = observed.ready_pod_count(way.stable_revision or "")
    if serving < resource.spec.replicas or resource.spec.replicas == 0 or route_rejection_message(observed):
        return f"no trial begins before all {resource.spec.replicas} pods serve"
    return ""


def _find_setting_rejection(observed: Snapshot, asked: EffectiveSetting, setting: SpeculationSetting) -> str:
    """Why the engine is not given the setting; empty where it may be."""
    resource, most = observed.resource, observed.resource.spec.speculation.tuning.max_tokens
    if max_speculative_tokens(setting) > most:
        return f"spec.speculation.tuning.maxTokens is {most}."
    wanted = resolve_desired_revision(resource, setting=setting)
    if wanted.problem:
        return wanted.problem
    if canary.read_manual_action(resource, wanted.revision) == "rollback" and wanted.revision != asked.basis:
        return f"a person has rolled it back; without the annotation {ROLLBACK_ANNOTATION} it may be tried again."
    return ""


def find_cooldown_end(
    speculation_status: SpeculationStatus, recommendation: Recommendation, cooldown: timedelta, now: datetime
) -> datetime | None:
    """Until when nothing is tried; None where something may be. What a canary was to teach may be acted on at once, and that a
    trial was taken back or undecided says nothing of traffic that has changed since it began."""
    ends = [moment + times * cooldown for moment, times in _iterate_cooldowns(speculation_status, recommendation)]
    last = max(ends, default=None)
    return last if last is not None and last > now else None


def _iterate_cooldowns(said: SpeculationStatus, advice: Recommendation) -> Iterator[tuple[datetime, int]]:
    if said.changed_at is not None:
        yield said.changed_at, 1
    began = find_last_unsuccessful_start(said)
    if began is not None and (said.failed or began.timestamp() >= (advice.traffic_changed_at or 0.0)):
        if said.rolled_back_at is not None:
            yield said.rolled_back_at, COOLDOWNS_AFTER_ROLLBACK * backoff_factor(said.failed or 0)
        undecided = [one.ended_at for one in said.changes if one.result == "Undecided"]
        if undecided:
            yield undecided[0], min(len(undecided), COOLDOWNS_AFTER_ROLLBACK)
    if advice.action == "Explore":
        yield from ((moment, 1) for moment in said.explored)


def _recent_failure_message(said: SpeculationStatus, advice: Recommendation, tuning: TuningSpec, now: datetime) -> str:
    """That the setting has failed before and its pause is not over, as a sentence; empty where it may be tried."""
    found = next(
        (one for one in said.failures if advice.setting is not None and one.setting == build_status_setting(advice.setting)), None
    )
    if found is None or (found.reason == "Worse" and found.began_at.timestamp() < (advice.traffic_changed_at or 0.0)):
        return ""
    until = failures.compute_retry_time(found, tuning.cooldown, tuning.interval)
    if now >= until:
        return ""
    times = "once" if found.times == 1 else f"{found.times} times in a row"
    setting = describe_setting(read_status_setting(found.setting))
    return f"{setting} has failed {times} and may be tried from {until:%Y-%m-%d %H:%M} UTC on: {found.message}"


def find_last_unsuccessful_start(speculation_status: SpeculationStatus) -> datetime | None:
    """When the last trial began that was taken back, failed, or stayed undecided."""
    last = next((one for one in speculation_status.changes if one.result in ("RolledBack", "Failed", "Undecided")), None)
    return speculation_status.rolled_back_at if last is None else last.started_at or last.ended_at


def _iterate_change_times(said: SpeculationStatus | None) -> Iterator[datetime]:
    if said is not None:
        yield from (one for one in (said.changed_at, said.rolled_back_at) if one is not None)
        yield from (one.ended_at for one in said.changes)


def build_predicted_gain(recommendation: Recommendation) -> PerformanceGain | None:
    """The predicted gain as the status shows it."""
    if recommendation.predicted_gain is None:
        return None
    low, middle, high = recommendation.predicted_gain
    return PerformanceGain(estimate=round(middle, 3), lower=round(low, 3), upper=round(high, 3))
