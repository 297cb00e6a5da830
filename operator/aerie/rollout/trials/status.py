"""status.speculation and the condition SpeculationTuned after a step: how trials ended, what they saved, what is recommended.

Guarantees: pure; nothing in the result follows the clock alone. The numbers of a recommendation are written again only when its
text has changed or its gain has changed by one point. So a decision each half hour does not cause a write each half hour. Without
a recommendation, and without anything of tuning in the status, the result is only the current setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from aerie.analysis.criteria.criterion import TIME_PER_OUTPUT_TOKEN
from aerie.api.status import (
    MAX_EXPLORATION_TIMES,
    MAX_TRIAL_RECORDS,
    AppliedSetting,
    Arm,
    MetricComparison,
    PerformanceGain,
    RolloutOutcome,
    SpeculationStatus,
    Status,
    Trial,
    TrialRecord,
    TrialResult,
)
from aerie.manifests.revision_hash import compute_revision
from aerie.rollout.conditions import ConditionUpdate, truncate_message
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression.progression import Progression
from aerie.rollout.progression.retry_request import read_retry_request
from aerie.rollout.revision.desired import build_status_setting, read_status_setting, recommend_draft_sampling
from aerie.rollout.trials import failures, savings
from aerie.rollout.trials.condition import build_tuned_condition
from aerie.rollout.trials.effective_setting import (
    EffectiveSetting,
    TrialDecision,
    build_predicted_gain,
    find_current_recommendation,
)
from aerie.tuning.recommendation import Recommendation

MIN_GAIN_CHANGE = 0.01
"""Change of a predicted gain, as a fraction, from which on it is written again."""


@dataclass(frozen=True)
class TuningStatus:
    """Status of tuning, and the condition for it."""

    speculation: SpeculationStatus | None
    condition: ConditionUpdate | None = None
    """The condition SpeculationTuned; None without anything to report."""


def build_tuning_status(
    snapshot: Snapshot,
    effective: EffectiveSetting,
    trial_decision: TrialDecision,
    progression: Progression,
    stable: Arm | None,
    now: datetime,
) -> TuningStatus:
    """Return the status of tuning after a step of the progression that results in this stable arm."""
    previous_status = snapshot.resource.status or Status()
    if stable is None or stable.setting is None:
        return TuningStatus(None)
    speculation_status = previous_status.speculation or SpeculationStatus(current=stable.setting)
    speculation_status = _clamp_future_times(speculation_status.model_copy(update={"current": stable.setting}), now)
    if previous_status.stable is not None:
        speculation_status = _with_setting_change(speculation_status, previous_status.stable, stable, now)
        speculation_status = _with_trial_end(speculation_status, snapshot, effective, previous_status, progression, stable, now)
        speculation_status = savings.with_retention_cost(speculation_status, snapshot.resource, previous_status, progression, now)
        speculation_status = _with_reverted_promotion(speculation_status, previous_status, progression, stable, now)
        speculation_status = _with_served_drafter(speculation_status, effective, stable)
    retry_requested = read_retry_request(snapshot.resource) != previous_status.last_handled_retry
    active_failures = failures.filter_active_failures(
        speculation_status.failures, snapshot, effective.specs, retry_requested=retry_requested
    )
    if active_failures != speculation_status.failures:
        speculation_status = speculation_status.model_copy(
            update={
                "failures": active_failures,
                "consecutive_failures": speculation_status.consecutive_failures if active_failures else None,
            }
        )
    served_revisions = {arm.served_revision for arm in (stable, progression.previous) if arm is not None}
    if speculation_status.applied is not None and speculation_status.applied.revision not in served_revisions:
        speculation_status = speculation_status.model_copy(update={"applied": None})
    speculation_status = savings.with_savings_rate(speculation_status, snapshot.resource, effective, stable, now)
    if trial_decision.trial is not None:
        speculation_status = speculation_status.model_copy(update={"trial": trial_decision.trial})
    sampling = recommend_draft_sampling(snapshot.resource, read_status_setting(stable.setting))
    if sampling != speculation_status.recommended_draft_sampling:
        speculation_status = speculation_status.model_copy(update={"recommended_draft_sampling": sampling})
    recommendation = find_current_recommendation(snapshot, progression)
    speculation_status = _with_recommendation(speculation_status, previous_status, stable, recommendation)
    return TuningStatus(
        speculation_status,
        build_tuned_condition(
            snapshot.resource, effective, trial_decision, progression, speculation_status, previous_status, stable, recommendation
        ),
    )


def _clamp_future_times(speculation_status: SpeculationStatus, now: datetime) -> SpeculationStatus:
    """Return the status without times after now: a leader whose clock was ahead must not extend pauses to such a time."""
    update: dict[str, Any] = {
        name: now
        for name in ("last_change_time", "last_rollback_time", "last_speculation_time")
        if (moment := getattr(speculation_status, name)) is not None and moment > now
    }
    if speculation_status.trial is not None and speculation_status.trial.start_time > now:
        update["trial"] = speculation_status.trial.model_copy(update={"start_time": now})
    for name, field in (("trials", "completion_time"), ("failures", "last_completion_time")):
        if any(getattr(record, field) > now for record in getattr(speculation_status, name)):
            update[name] = [
                record.model_copy(update={field: min(getattr(record, field), now)})
                for record in getattr(speculation_status, name)
            ]
    if any(moment > now for moment in speculation_status.exploration_times):
        update["exploration_times"] = [min(moment, now) for moment in speculation_status.exploration_times]
    return speculation_status.model_copy(update=update) if update else speculation_status


# ------------------------------------------------------------------------------------------------------------- end of a trial
def _with_setting_change(
    speculation_status: SpeculationStatus, previous_stable: Arm, stable: Arm, now: datetime
) -> SpeculationStatus:
    """Return the status with the times of a change of the setting, whoever made the change."""
    if (
        previous_stable.revision == stable.revision
        or previous_stable.setting == stable.setting
        or previous_stable.setting is None
        or stable.setting is None
    ):
        return speculation_status
    update: dict[str, datetime | None] = {"last_change_time": now, "last_speculation_time": None}
    if stable.setting.mode == "Off":
        update["last_speculation_time"] = now
    return speculation_status.model_copy(update=update)


def _with_trial_end(
    speculation_status: SpeculationStatus,
    snapshot: Snapshot,
    effective: EffectiveSetting,
    previous_status: Status,
    progression: Progression,
    stable: Arm,
    now: datetime,
) -> SpeculationStatus:
    """Return the status with the result of a trial that has ended with this step, or is void."""
    trial, outcome = speculation_status.trial, progression.outcome
    if trial is None:
        return speculation_status
    if outcome is not None and outcome.revision != trial.revision:
        outcome = None
    if effective.trial is not None and outcome is None:
        return speculation_status
    result: TrialResult = outcome.result if outcome is not None else "Failed" if effective.abandoned_reason else "Superseded"
    if result == "RolledBack" and progression.analysis is not None and progression.analysis.verdict == "Inconclusive":
        result = "Inconclusive"
    record = _build_trial_record(previous_status, trial, result, outcome, now)
    update: dict[str, Any] = {"trial": None, "trials": [record, *speculation_status.trials][:MAX_TRIAL_RECORDS]}
    failure_reason = failures.classify_failure(result, outcome, progression.analysis)
    if failure_reason in ("Regressed", "Failed"):
        update["last_rollback_time"] = now
    if result != "Superseded":
        message = outcome.message if outcome is not None else effective.abandoned_reason
        update |= failures.build_failure_update(speculation_status, trial, failure_reason, message, snapshot.resource, now)
    if result == "Explored":
        update["exploration_times"] = [now, *speculation_status.exploration_times][:MAX_EXPLORATION_TIMES]
    if result == "Explored" and stable.setting is not None and stable.setting.mode == "Off":
        update["last_speculation_time"] = now
    if result == "Promoted":
        applied_setting = AppliedSetting(
            setting=trial.setting, revision=trial.revision, spec_revision=trial.spec_revision, slo=trial.slo
        )
        update["applied"] = applied_setting if trial.revision != trial.spec_revision else None
    update["savings"] = savings.charge_trial(
        speculation_status, snapshot, previous_status, trial, promoted=result == "Promoted", now=now
    )
    return speculation_status.model_copy(update=update)


def _build_trial_record(
    previous_status: Status, trial: Trial, result: TrialResult, outcome: RolloutOutcome | None, now: datetime
) -> TrialRecord:
    assert previous_status.stable is not None
    assert previous_status.stable.setting is not None
    return TrialRecord(
        from_setting=previous_status.stable.setting,
        to_setting=trial.setting,
        purpose=trial.purpose,
        result=result,
        revision=trial.revision,
        predicted=trial.predicted,
        measured=compute_measured_gain(outcome.comparisons) if outcome is not None else None,
        start_time=trial.start_time,
        completion_time=now,
    )


def _with_reverted_promotion(
    speculation_status: SpeculationStatus, previous_status: Status, progression: Progression, stable: Arm, now: datetime
) -> SpeculationStatus:
    """Return the status after a rollback, with this step, of a trial that was promoted."""
    last_record, previous = next(iter(speculation_status.trials), None), previous_status.previous
    if last_record is None or last_record.result != "Promoted" or previous is None or previous_status.stable is None:
        return speculation_status
    if (previous_status.stable.revision, previous.revision) != (last_record.revision, stable.revision):
        return speculation_status
    result = "Superseded" if progression.outcome is not None and progression.outcome.result == "Superseded" else "RolledBack"
    changes = [last_record.model_copy(update={"result": result, "completion_time": now}), *speculation_status.trials[1:]]
    is_applied = speculation_status.applied is not None and speculation_status.applied.revision == last_record.revision
    spec_revision = (
        speculation_status.applied.spec_revision
        if speculation_status.applied is not None and is_applied
        else last_record.revision
    )
    slo = speculation_status.applied.slo if speculation_status.applied is not None and is_applied else None
    applied_setting = (
        AppliedSetting(setting=last_record.from_setting, revision=stable.served_revision, spec_revision=spec_revision, slo=slo)
        if stable.served_revision != spec_revision
        else None
    )
    rollback_update = {"last_rollback_time": now} if result == "RolledBack" else {}
    return speculation_status.model_copy(update={"trials": changes, "applied": applied_setting, **rollback_update})


def _with_served_drafter(speculation_status: SpeculationStatus, effective: EffectiveSetting, stable: Arm) -> SpeculationStatus:
    """Return the status whose applied setting names the revisions of the drafter that serves after this step: of one that was
    promoted, in place or by pods, or of the one before after a rollback."""
    applied = speculation_status.applied
    if applied is None or applied != effective.applied or applied.revision == stable.served_revision:
        return speculation_status
    setting = read_status_setting(applied.setting)
    for spec_revision, resource in effective.specs.items():
        if compute_revision(resource, setting) == stable.served_revision:
            applied = applied.model_copy(update={"revision": stable.served_revision, "spec_revision": spec_revision})
            return speculation_status.model_copy(update={"applied": applied})
    return speculation_status


def compute_measured_gain(comparisons: Iterable[MetricComparison]) -> PerformanceGain | None:
    """Return the measured gain of a canary: by which fraction more tokens it delivered in the time that users waited for
    tokens."""
    comparison = next(
        (
            comparison
            for comparison in comparisons
            if comparison.metric == TIME_PER_OUTPUT_TOKEN and comparison.estimate is not None
        ),
        None,
    )
    if comparison is None or comparison.estimate is None or comparison.estimate <= -1:
        return None
    bounds = [
        None if bound is None or bound <= -1 else round(1 / (1 + bound) - 1, 4) for bound in (comparison.upper, comparison.lower)
    ]
    return PerformanceGain(estimate=round(1 / (1 + comparison.estimate) - 1, 4), lower=bounds[0], upper=bounds[1])


# ---------------------------------------------------------------------------------------------------------- recommendation
def _with_recommendation(
    speculation_status: SpeculationStatus, previous_status: Status, stable: Arm, recommendation: Recommendation | None
) -> SpeculationStatus:
    """Return the status with the current recommendation of tuning."""
    if recommendation is None:
        if previous_status.stable is not None and previous_status.stable.served_revision == stable.served_revision:
            return speculation_status
        return speculation_status.model_copy(update={"recommended": None, "predicted": None, "message": None})
    recommended = (
        build_status_setting(recommendation.setting)
        if recommendation.setting is not None and recommendation.action in ("Change", "Hold")
        else None
    )
    recommended = None if recommended == stable.setting else recommended
    predicted_gain = build_predicted_gain(recommendation) if recommended is not None else None
    message = truncate_message(recommendation.reason)
    is_unchanged = (
        speculation_status.recommended == recommended
        and _mask_numbers(speculation_status.message or "") == _mask_numbers(message)
        and not _has_gain_changed(speculation_status.predicted, predicted_gain)
    )
    if is_unchanged and recommendation.action != "Insufficient":
        return speculation_status
    return speculation_status.model_copy(update={"recommended": recommended, "predicted": predicted_gain, "message": message})


def _mask_numbers(text: str) -> str:
    return re.sub(r"[-+]?[0-9][0-9.,]*", "#", text)


def _has_gain_changed(old_gain: PerformanceGain | None, new_gain: PerformanceGain | None) -> bool:
    if old_gain is None or new_gain is None:
        return old_gain is not new_gain
    return abs(old_gain.estimate - new_gain.estimate) >= MIN_GAIN_CHANGE
