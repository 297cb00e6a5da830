"""The effective speculation setting: that of the spec, one that a trial has proven, or the one that is on trial now.

    status.speculation ─► EffectiveSetting ─► DesiredRevision ─► Progression ─┬─► trials/status.py ─► status.speculation
    Recommendation ─────────────────────────► decide_next_trial ──────────────┘

A trial is written into the status before any object is created for it. From then on it is the desired setting: an ordinary canary
of the progression follows. The applied setting that results from a trial, and the trial itself, hold for one spec:
`spec_revision` is the revision that the spec alone results in, and where it changes both are void. So any change by a user wins,
and starts from the spec's own setting. The bounds of spec.speculation (maxSpeculativeTokens, slo, numSpeculativeTokens: 0) also
apply to an earlier applied setting, from the next reconcile on.

Exception: where spec.rollout.inPlace.mode is not Off and the spec differs in its drafter alone, the applied setting is kept for
the new drafter. Else the setting would change too: such a change is not in place, and no comparison separates the two. The
record stays that of the served drafter until the new one is promoted (trials/status.py), so a rollback and a return of the spec
need no record of their own.

Guarantees: pure. There is no trial in the modes Off and Recommend. A setting of tuning is desired only while a trial of it is in
progress, while pods serve the revision that has passed one, or that setting with another drafter; in mode Off only the spec's
setting is. Nothing differs from a spec without tuning until there is a recommendation. Not guaranteed: that a kept setting is the
best for the new drafter; tuning decides that after the promotion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from aerie.api import SpeculativeDeployment
from aerie.api.speculation import TuningSpec
from aerie.api.status import AppliedSetting, PerformanceGain, RolloutOutcome, SpeculationStatus, Status, Trial, TrialFailure
from aerie.api.types import duration
from aerie.engine.speculation import SpeculationSetting, SpeculationSettingError, describe_setting, max_speculative_tokens
from aerie.manifests.revision_hash import compute_revision
from aerie.rollout.canary.messages import ROLLBACK_ANNOTATION
from aerie.rollout.canary.observation import read_manual_action
from aerie.rollout.children.tuning_record import find_drafting_obstacle, is_tuning_enabled
from aerie.rollout.conditions import truncate_message
from aerie.rollout.facts.route_status import route_rejection_message
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression.progression import Progression
from aerie.rollout.reasons import TrialObstacle
from aerie.rollout.revision.desired import build_status_setting, read_spec_setting, read_status_setting, resolve_desired_revision
from aerie.rollout.revision.preflight_result import read_preflight_result
from aerie.rollout.revision.recovery import read_recorded_resource
from aerie.rollout.trials import failures
from aerie.rollout.trials.failures import COOLDOWNS_AFTER_ROLLBACK
from aerie.tuning.decision.policy import backoff_factor
from aerie.tuning.recommendation import Recommendation

MAX_RECOMMENDATION_AGE_INTERVALS = 2
"""Number of tuning intervals for which a recommendation is current."""


@dataclass(frozen=True)
class EffectiveSetting:
    """The desired setting, and where it comes from."""

    setting: SpeculationSetting
    spec_revision: str
    """The revision that the spec alone results in."""
    specs: Mapping[str, SpeculativeDeployment]
    """Resources by the revision that each alone results in: the resource, and the resource with the drafter of each arm that
    serves, as far as the records of tuning need them. Records of these revisions hold."""
    applied: AppliedSetting | None = None
    """The applied setting that is active."""
    trial: Trial | None = None
    """The trial in progress."""
    abandoned_reason: str = ""
    """Message about why the trial of the status has failed before its canary began; empty where it has not."""
    exceeded_bound: str = ""
    """The bound of the spec that the applied setting of the status exceeds, so that it is no longer active; empty where it
    exceeds none."""

    @property
    def is_kept_for_new_drafter(self) -> bool:
        """Whether the applied setting was proven with another drafter than the spec's."""
        return self.applied is not None and self.applied.spec_revision != self.spec_revision


def resolve_effective_setting(snapshot: Snapshot, now: datetime) -> EffectiveSetting:
    """Return the effective setting by the spec, and by the status as far as it still holds."""
    resource = snapshot.resource
    status, setting = resource.status or Status(), read_spec_setting(resource)
    spec_revision = compute_revision(resource, setting)
    effective = EffectiveSetting(setting, spec_revision, {spec_revision: resource})
    speculation_status, mode = status.speculation, resource.spec.speculation.tuning.mode
    if speculation_status is None or mode == "Off" or status.stable is None:
        return effective
    if _may_records_be_of_other_drafter(status, speculation_status, spec_revision):
        others = {compute_revision(other, setting): other for other in _iter_resources_with_served_drafters(snapshot, status)}
        effective = replace(effective, specs={**others, spec_revision: resource})
    applied_setting = _find_applied_setting(status, effective)
    if speculation_status.applied is not None and applied_setting is not None:
        exceeded_bound = find_exceeded_bound(resource, speculation_status.applied, applied_setting)
        effective = (
            replace(effective, exceeded_bound=exceeded_bound)
            if exceeded_bound
            else replace(effective, setting=applied_setting, applied=speculation_status.applied)
        )
    trial_setting = _read_setting(effective, speculation_status.trial)
    if speculation_status.trial is None or trial_setting is None or mode != "Auto" or resource.spec.replicas == 0:
        return effective
    if speculation_status.trial.spec_revision != spec_revision:  # of another drafter
        return effective
    if find_exceeded_bound(resource, speculation_status.trial, trial_setting):
        return effective
    if obstacle := _find_start_obstacle(snapshot, status, speculation_status.trial, now):
        return replace(effective, abandoned_reason=obstacle)
    return replace(effective, setting=trial_setting, trial=speculation_status.trial)


def find_exceeded_bound(resource: SpeculativeDeployment, candidate: AppliedSetting | Trial, setting: SpeculationSetting) -> str:
    """Return the bound of the spec that a setting of tuning exceeds, as part of a message; empty where it exceeds none."""
    spec = resource.spec.speculation
    if max_speculative_tokens(setting) and (obstacle := find_drafting_obstacle(resource)):
        return obstacle
    if max_speculative_tokens(setting) > spec.tuning.max_speculative_tokens:
        return f"spec.speculation.tuning.maxSpeculativeTokens is {spec.tuning.max_speculative_tokens}"
    if spec.tuning.slo is not None and spec.tuning.slo.is_stricter_than(candidate.slo):
        return "spec.speculation.tuning.slo is stricter than in its trial"
    return ""


def _may_records_be_of_other_drafter(status: Status, speculation_status: SpeculationStatus, spec_revision: str) -> bool:
    """Return whether records of tuning may be of another drafter than the spec's, or become so by a rollback with this step.
    The records of revisions are read only then, because that takes milliseconds."""
    applied = [speculation_status.applied] if speculation_status.applied is not None else []
    records: list[AppliedSetting | TrialFailure] = [*applied, *speculation_status.failures]
    return any(record.spec_revision != spec_revision or status.previous is not None for record in records)


def _iter_resources_with_served_drafters(snapshot: Snapshot, status: Status) -> Iterator[SpeculativeDeployment]:
    """Yield the resource with the drafter of each arm that serves; none where a change of the drafter is never in place."""
    spec = snapshot.resource.spec
    if spec.rollout.in_place.mode == "Off" or spec.drafter is None:
        return
    for arm in (status.stable, status.previous):
        served = read_recorded_resource(snapshot, arm.served_revision) if arm is not None else None
        if served is not None and served.spec.drafter is not None:
            yield snapshot.resource.model_copy(update={"spec": spec.model_copy(update={"drafter": served.spec.drafter})})


def _find_applied_setting(status: Status, effective: EffectiveSetting) -> SpeculationSetting | None:
    """Return the applied setting of the status, if it holds for this spec, bounds aside."""
    applied = status.speculation.applied if status.speculation is not None else None
    setting = _read_setting(effective, applied)
    if applied is None or setting is None or status.stable is None:
        return None
    if applied.spec_revision == effective.spec_revision:
        served_revisions = {arm.served_revision for arm in (status.stable, status.previous) if arm is not None}
        return setting if applied.revision in served_revisions else None
    # Pods without drafts have no drafter that could be compared with the new one.
    return setting if applied.revision == status.stable.served_revision and max_speculative_tokens(setting) else None


def _read_setting(effective: EffectiveSetting, record: AppliedSetting | Trial | None) -> SpeculationSetting | None:
    """Return the setting of the record, if it is for this spec, or for this spec with a drafter that is served."""
    resource = effective.specs.get(record.spec_revision) if record is not None else None
    if record is None or resource is None:
        return None
    try:
        setting = read_status_setting(record.setting)
    except SpeculationSettingError:
        return None
    return setting if compute_revision(resource, setting) == record.revision else None


def _find_start_obstacle(snapshot: Snapshot, status: Status, trial: Trial, now: datetime) -> str:
    """Return why a trial whose canary has not begun will never begin; empty while it may."""
    canary_arm, spec = status.canary, snapshot.resource.spec
    if (canary_arm is not None and canary_arm.revision == trial.revision) or spec.rollout.paused:
        return ""
    if problem := resolve_desired_revision(snapshot.resource, setting=read_status_setting(trial.setting)).problem:
        return problem
    preflight_result = read_preflight_result(snapshot, trial.revision, now)
    if preflight_result.state == "Failed":
        return preflight_result.message
    if status.stable is not None and not snapshot.cluster.ready_pod_count(status.stable.revision):
        return "No stable pod was ready when its canary was to start."
    if now >= trial.start_time + spec.rollout.progress_deadline:
        progress_deadline = duration.format_duration(spec.rollout.progress_deadline)
        message = f"Its canary did not start within spec.rollout.progressDeadline ({progress_deadline})."
        return f"{message} {preflight_result.message}".rstrip()
    return ""


def with_trial_outcome(
    progression: Progression, resource: SpeculativeDeployment, effective: EffectiveSetting, now: datetime
) -> Progression:
    """Return the progression with what tuning adds.

    This is the outcome of a trial that never had a canary. And no setting of tuning stays rejected, as one of the spec does,
    because it is no longer desired. A drafter that was rejected with the applied setting stays so: it is still desired.
    """
    status = resource.status or Status()
    trial = status.speculation.trial if status.speculation is not None else None
    arms = [arm for arm in (status.stable, status.previous) if arm is not None and arm.revision == progression.stable_revision]
    is_setting_served = any(arm.setting == build_status_setting(effective.setting) for arm in arms)
    if effective.trial is not None or (effective.applied is not None and not is_setting_served):
        progression = replace(progression, rejected_revision=None)
    if not effective.abandoned_reason or trial is None or progression.outcome is not None:
        return progression
    setting = describe_setting(read_status_setting(trial.setting))
    reason = truncate_message(effective.abandoned_reason)
    outcome = RolloutOutcome(
        revision=trial.revision, change=setting, result="Failed", message=reason, start_time=trial.start_time, completion_time=now
    )
    return replace(progression, outcome=outcome)


def compute_time_until_trial_expiry(
    resource: SpeculativeDeployment, effective: EffectiveSetting, progression: Progression, now: datetime
) -> timedelta | None:
    """Return the time until a trial whose canary has not begun is abandoned; None where it is not."""
    if effective.trial is None or progression.canary_revision == effective.trial.revision:
        return None
    if progression.phase == "Paused":  # no trial is abandoned while the rollout is paused
        return None
    return max(timedelta(0), effective.trial.start_time + resource.spec.rollout.progress_deadline - now)


# -------------------------------------------------------------------------------------------------------------- next trial
@dataclass(frozen=True)
class TrialDecision:
    """Decision on the recommendation: a trial, or the reason why there is none."""

    trial: Trial | None = None
    reason: TrialObstacle | None = None
    """Reason of the condition; None where there is no obstacle."""
    message: str = ""
    queued: bool = False
    """True if a trial is ready to begin, and claims a slot for that."""


def find_current_recommendation(snapshot: Snapshot, progression: Progression) -> Recommendation | None:
    """Return the recommendation, if it is for the pods that are stable, also after this step."""
    recommendation, status = snapshot.operator.recommendation, snapshot.resource.status
    served_revision = status.stable.served_revision if status is not None and status.stable is not None else None
    return (
        recommendation
        if recommendation is not None and recommendation.revision == served_revision == progression.served_revision
        else None
    )


def decide_next_trial(snapshot: Snapshot, effective: EffectiveSetting, progression: Progression, now: datetime) -> TrialDecision:
    """Return the trial that is to begin now, or the reason why none begins."""
    resource, recommendation = snapshot.resource, find_current_recommendation(snapshot, progression)
    status, tuning = resource.status or Status(), resource.spec.speculation.tuning
    if recommendation is None or recommendation.setting is None or recommendation.action not in ("Change", "Explore"):
        return TrialDecision()
    if status.stable is None or not is_tuning_enabled(resource):
        return TrialDecision()
    if effective.trial is not None:
        return TrialDecision(_convert_exploration(effective.trial, recommendation, progression))
    if status.stable.setting == build_status_setting(recommendation.setting):
        return TrialDecision()
    if status.speculation is not None and status.speculation.trial is not None:
        return TrialDecision()  # that trial is void from now on, so the next recommendation counts
    if rollout_obstacle := _find_rollout_obstacle(snapshot, progression):
        return TrialDecision(reason="RolloutInProgress", message=rollout_obstacle)
    if rejection := _find_setting_rejection(snapshot, effective, recommendation.setting):
        return TrialDecision(
            reason="SettingRejected", message=f"{describe_setting(recommendation.setting)} is not tried: {rejection}"
        )
    if tuning.mode != "Auto":
        return TrialDecision()
    if (pause := _find_trial_pause(snapshot, effective, recommendation, recommendation.setting, now)) is not None:
        return pause
    if not _is_recommendation_fresh(status.speculation, recommendation, tuning, now):
        return TrialDecision()  # the next recommendation counts
    if "Trial" not in snapshot.operator.start_permission.allowed_purposes:
        wait_reason = snapshot.operator.start_permission.wait_reason
        message = f"A trial of {describe_setting(recommendation.setting)} is queued: {wait_reason}." if wait_reason else ""
        return TrialDecision(reason="Queued" if message else None, message=message, queued=True)
    trial = Trial(
        setting=build_status_setting(recommendation.setting),
        purpose="Improve" if recommendation.action == "Change" else "Explore",
        revision=compute_revision(resource, recommendation.setting),
        spec_revision=effective.spec_revision,
        slo=tuning.slo,
        predicted=build_predicted_gain(recommendation),
        start_time=now,
    )
    return TrialDecision(trial)


def _find_trial_pause(
    snapshot: Snapshot, effective: EffectiveSetting, recommendation: Recommendation, setting: SpeculationSetting, now: datetime
) -> TrialDecision | None:
    """Return why earlier trials delay the next one: no capacity, or a cooldown; None where they do not."""
    resource = snapshot.resource
    speculation_status, tuning = (resource.status or Status()).speculation, resource.spec.speculation.tuning
    if speculation_status is None:
        return None
    if capacity_obstacle := failures.find_capacity_obstacle(speculation_status, snapshot, effective.specs):
        return TrialDecision(reason="InsufficientCapacity", message=capacity_obstacle)
    if cooldown_end := find_cooldown_end(speculation_status, recommendation, tuning.cooldown_duration, now):
        message = f"{describe_setting(setting)} may be tried from {cooldown_end:%Y-%m-%d %H:%M} UTC."
        return TrialDecision(reason="Cooldown", message=message)
    if failure_message := _recent_failure_message(speculation_status, recommendation, tuning, now):
        return TrialDecision(reason="Cooldown", message=failure_message)
    return None


def _is_recommendation_fresh(
    speculation_status: SpeculationStatus | None, recommendation: Recommendation, tuning: TuningSpec, now: datetime
) -> bool:
    """Return whether the recommendation was made after the last change and within the last intervals."""
    last_change = max((moment.timestamp() for moment in _iterate_change_times(speculation_status)), default=0.0)
    max_age = MAX_RECOMMENDATION_AGE_INTERVALS * tuning.decision_interval.total_seconds()
    return last_change <= recommendation.decision_time and now.timestamp() - recommendation.decision_time <= max_age


def _convert_exploration(trial: Trial, recommendation: Recommendation, progression: Progression) -> Trial | None:
    """Return an exploration turned into a trial to be proven, where the results of its canary support its setting."""
    canary = progression.canary
    if canary is None or canary.revision != trial.revision or canary.phase != "Analyzing" or canary.ready_time is None:
        return None
    if (
        trial.purpose != "Explore"
        or recommendation.action != "Change"
        or recommendation.setting != read_status_setting(trial.setting)
    ):
        return None
    if recommendation.decision_time < canary.ready_time.timestamp():
        return None
    return trial.model_copy(update={"purpose": "Improve", "predicted": build_predicted_gain(recommendation)})


def _find_rollout_obstacle(snapshot: Snapshot, progression: Progression) -> str:
    """Return what has to end before a trial may begin; empty where nothing has to."""
    resource = snapshot.resource
    if progression.phase == "Paused":
        return "No trial starts while spec.rollout.paused is true."
    if (
        progression.phase != "Ready"
        or progression.canary is not None
        or progression.in_place is not None
        or progression.previous is not None
        or progression.outcome is not None
    ):
        return "No trial starts while a rollout is in progress or the desired revision is not the stable one."
    ready_pods = snapshot.cluster.ready_pod_count(progression.stable_revision or "")
    if ready_pods < resource.spec.replicas or resource.spec.replicas == 0 or route_rejection_message(snapshot):
        return f"No trial starts until all {resource.spec.replicas} pods are ready."
    return ""


def _find_setting_rejection(snapshot: Snapshot, effective: EffectiveSetting, setting: SpeculationSetting) -> str:
    """Return why the engine may not get the setting; empty where it may."""
    resource, max_tokens = snapshot.resource, snapshot.resource.spec.speculation.tuning.max_speculative_tokens
    if max_speculative_tokens(setting) > max_tokens:
        return f"spec.speculation.tuning.maxSpeculativeTokens is {max_tokens}."
    desired = resolve_desired_revision(resource, setting=setting)
    if desired.problem:
        return desired.problem
    if read_manual_action(resource, desired.revision) == "rollback" and desired.revision != effective.spec_revision:
        return f"it was rolled back manually; remove the annotation {ROLLBACK_ANNOTATION} to try it again."
    return ""


def find_cooldown_end(
    speculation_status: SpeculationStatus, recommendation: Recommendation, cooldown: timedelta, now: datetime
) -> datetime | None:
    """Return until when no trial begins; None where one may begin.

    What an exploration has shown may be used immediately. That a trial was rolled back or inconclusive says nothing about traffic
    that has changed since the trial began.
    """
    ends = [since + cooldowns * cooldown for since, cooldowns in _iterate_cooldowns(speculation_status, recommendation)]
    cooldown_end = max(ends, default=None)
    return cooldown_end if cooldown_end is not None and cooldown_end > now else None


def _iterate_cooldowns(speculation_status: SpeculationStatus, recommendation: Recommendation) -> Iterator[tuple[datetime, int]]:
    if speculation_status.last_change_time is not None:
        yield speculation_status.last_change_time, 1
    unsuccessful_start = find_last_unsuccessful_start(speculation_status)
    if unsuccessful_start is not None and (
        speculation_status.consecutive_failures or unsuccessful_start.timestamp() >= (recommendation.traffic_changed_at or 0.0)
    ):
        if speculation_status.last_rollback_time is not None:
            yield (
                speculation_status.last_rollback_time,
                COOLDOWNS_AFTER_ROLLBACK * backoff_factor(speculation_status.consecutive_failures or 0),
            )
        inconclusive_ends = [record.completion_time for record in speculation_status.trials if record.result == "Inconclusive"]
        if inconclusive_ends:
            yield inconclusive_ends[0], min(len(inconclusive_ends), COOLDOWNS_AFTER_ROLLBACK)
    if recommendation.action == "Explore":
        yield from ((moment, 1) for moment in speculation_status.exploration_times)


def _recent_failure_message(
    speculation_status: SpeculationStatus, recommendation: Recommendation, tuning: TuningSpec, now: datetime
) -> str:
    """Return that the setting has failed before and its pause has not ended, as a message; empty where it may be tried."""
    failure = next(
        (
            failure
            for failure in speculation_status.failures
            if recommendation.setting is not None and failure.setting == build_status_setting(recommendation.setting)
        ),
        None,
    )
    if failure is None or (
        failure.reason == "Regressed" and failure.last_start_time.timestamp() < (recommendation.traffic_changed_at or 0.0)
    ):
        return ""
    retry_time = failures.compute_retry_time(failure, tuning.cooldown_duration, tuning.decision_interval)
    if now >= retry_time:
        return ""
    times_text = "once" if failure.failure_count == 1 else f"{failure.failure_count} times in a row"
    setting = describe_setting(read_status_setting(failure.setting))
    return f"{setting} has failed {times_text} and may be tried from {retry_time:%Y-%m-%d %H:%M} UTC: {failure.message}"


def find_last_unsuccessful_start(speculation_status: SpeculationStatus) -> datetime | None:
    """Return when the last trial began that was rolled back, failed, or was inconclusive."""
    last_record = next(
        (record for record in speculation_status.trials if record.result in ("RolledBack", "Failed", "Inconclusive")), None
    )
    return speculation_status.last_rollback_time if last_record is None else last_record.start_time or last_record.completion_time


def _iterate_change_times(speculation_status: SpeculationStatus | None) -> Iterator[datetime]:
    if speculation_status is not None:
        yield from (
            moment
            for moment in (speculation_status.last_change_time, speculation_status.last_rollback_time)
            if moment is not None
        )
        yield from (record.completion_time for record in speculation_status.trials)


def build_predicted_gain(recommendation: Recommendation) -> PerformanceGain | None:
    """Return the predicted gain for the status."""
    if recommendation.predicted_gain is None:
        return None
    low, middle, high = recommendation.predicted_gain
    return PerformanceGain(estimate=round(middle, 3), lower=round(low, 3), upper=round(high, 3))
