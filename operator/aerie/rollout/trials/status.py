"""status.speculation and the condition SpeculationTuned after a step: how trials ended, what they saved, what is recommended.

Guarantees: pure; nothing in the result follows the clock alone. The numbers of a recommendation are written again only when its
text has changed or its gain has changed by one point. So a decision each half hour does not cause a write each half hour. Without
a recommendation, and without anything of tuning in the status, the result is only the current setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from aerie.analysis.criteria import TIME_PER_OUTPUT_TOKEN
from aerie.api.status import (
    MAX_EXPLORATION_TIMES,
    MAX_TRIAL_RECORDS,
    AppliedSetting,
    Arm,
    MetricComparison,
    PerformanceGain,
    SpeculationStatus,
    Status,
    Trial,
    TrialRecord,
    TrialResult,
    TuningSavings,
)
from aerie.engine.speculation import describe_setting
from aerie.rollout.capacity.replica_counts import Capacity
from aerie.rollout.children.tuning_record import find_drafting_obstacle
from aerie.rollout.conditions import TUNED, ConditionUpdate, truncate_message
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression import Progression, read_retry_request
from aerie.rollout.revision.desired import build_status_setting, read_status_setting, recommend_draft_sampling
from aerie.rollout.trials import failures
from aerie.rollout.trials.effective_setting import (
    EffectiveSetting,
    TrialDecision,
    build_predicted_gain,
    find_current_recommendation,
)
from aerie.tuning.recommendation import Recommendation

MIN_GAIN_CHANGE = 0.01
"""Change of a predicted gain, as a fraction, from which on it is written again."""
_REASON_BY_ACTION = {
    "Insufficient": "InsufficientData",
    "Hold": "Optimal",
    "Change": "Recommended",
    "Explore": "ExplorationRecommended",
}
_STICKY_REASONS = (*_REASON_BY_ACTION.values(), "CannotProbe", "Cooldown", "InsufficientCapacity", "SettingRejected")


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
        speculation_status = _with_retention_cost(speculation_status, snapshot, previous_status, progression, now)
        speculation_status = _with_reverted_promotion(speculation_status, previous_status, progression, stable, now)
    retry_requested = read_retry_request(snapshot.resource) != previous_status.last_handled_retry
    active_failures = failures.filter_active_failures(
        speculation_status.failures, snapshot, effective.spec_revision, retry_requested=retry_requested
    )
    if active_failures != speculation_status.failures:
        speculation_status = speculation_status.model_copy(
            update={
                "failures": active_failures,
                "consecutive_failures": speculation_status.consecutive_failures if active_failures else None,
            }
        )
    revisions_with_pods = {stable.revision, *([progression.previous.revision] if progression.previous is not None else [])}
    if speculation_status.applied is not None and speculation_status.applied.revision not in revisions_with_pods:
        speculation_status = speculation_status.model_copy(update={"applied": None})
    speculation_status = _with_savings_rate(speculation_status, snapshot, effective, stable, now)
    if trial_decision.trial is not None:
        speculation_status = speculation_status.model_copy(update={"trial": trial_decision.trial})
    sampling = recommend_draft_sampling(snapshot.resource, read_status_setting(stable.setting))
    if sampling != speculation_status.recommended_draft_sampling:
        speculation_status = speculation_status.model_copy(update={"recommended_draft_sampling": sampling})
    recommendation = find_current_recommendation(snapshot, progression)
    speculation_status = _with_recommendation(speculation_status, previous_status, stable, recommendation)
    return TuningStatus(
        speculation_status,
        _build_tuned_condition(
            snapshot, effective, trial_decision, progression, speculation_status, previous_status, stable, recommendation
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
    for name, field in (("trials", "completion_time"), ("failures", "last_failure_time")):
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
    assert previous_status.stable is not None
    assert previous_status.stable.setting is not None
    record = TrialRecord(
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
    update: dict[str, Any] = {"trial": None, "trials": [record, *speculation_status.trials][:MAX_TRIAL_RECORDS]}
    failure_reason = failures.classify_failure(result, outcome, progression.analysis)
    if failure_reason in ("Regressed", "Failed"):
        update["last_rollback_time"] = now
    if result != "Superseded":
        message = outcome.message if outcome is not None else effective.abandoned_reason
        update |= failures.build_failure_update(speculation_status, trial, failure_reason, message, snapshot, now)
    if result == "Explored":
        update["exploration_times"] = [now, *speculation_status.exploration_times][:MAX_EXPLORATION_TIMES]
    if result == "Explored" and stable.setting is not None and stable.setting.mode == "Off":
        update["last_speculation_time"] = now
    if result == "Promoted":
        applied_setting = AppliedSetting(
            setting=trial.setting, revision=trial.revision, spec_revision=trial.spec_revision, slo=trial.slo
        )
        update["applied"] = applied_setting if trial.revision != trial.spec_revision else None
    update["savings"] = _charge_trial(
        speculation_status, snapshot, previous_status, trial, promoted=result == "Promoted", now=now
    )
    return speculation_status.model_copy(update=update)


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
        AppliedSetting(setting=last_record.from_setting, revision=stable.revision, spec_revision=spec_revision, slo=slo)
        if stable.revision != spec_revision
        else None
    )
    rollback_update = {"last_rollback_time": now} if result == "RolledBack" else {}
    return speculation_status.model_copy(update={"trials": changes, "applied": applied_setting, **rollback_update})


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


# ----------------------------------------------------------------------------------------------------------------- savings
def _charge_trial(
    speculation_status: SpeculationStatus,
    snapshot: Snapshot,
    previous_status: Status,
    trial: Trial,
    *,
    promoted: bool,
    now: datetime,
) -> TuningSavings:
    """Return the savings with the cost of the trial.

    The cost is the time of its pods beyond spec.replicas, and the loading time of pods that replaced replicas. After a promotion
    without extra pods, each other replica has that loading time too.
    """
    canary_arm = (
        previous_status.canary
        if previous_status.canary is not None and previous_status.canary.revision == trial.revision
        else None
    )
    savings = _accrue_savings(speculation_status.savings, snapshot, now)
    if canary_arm is None:
        return savings
    canary_hours = max(timedelta(0), now - canary_arm.start_time) / timedelta(hours=1)
    loading_hours = max(timedelta(0), (canary_arm.ready_time or now) - canary_arm.start_time) / timedelta(hours=1)
    spec = snapshot.resource.spec
    capacity = Capacity.from_spec(spec.replicas, spec.rollout.canary)
    stable_revision = previous_status.stable.revision if previous_status.stable is not None else ""
    trial_pods = (*snapshot.live_pods(trial.revision), *snapshot.live_pods(stable_revision, control=True))
    scheduled_pods = sum(not pod_failures.is_pod_unschedulable(pod) for pod in trial_pods)  # a pod without a node costs nothing
    extra_pods = min(capacity.max_total_pods - spec.replicas, scheduled_pods)
    replaced_pods = capacity.canary_replicas + capacity.control_replicas - extra_pods if canary_arm.ready_time is not None else 0
    if promoted and not extra_pods:
        replaced_pods += spec.replicas
    return _add_cost(savings, extra_pods * canary_hours + max(0, replaced_pods) * loading_hours)


def _with_retention_cost(
    speculation_status: SpeculationStatus, snapshot: Snapshot, previous_status: Status, progression: Progression, now: datetime
) -> SpeculationStatus:
    """Return the status with the cost of the pods that were retained after the promotion of a trial, once they are scaled
    down."""
    previous, last_record = previous_status.previous, next(iter(speculation_status.trials), None)
    if (
        previous is None
        or progression.previous is not None
        or last_record is None
        or previous_status.stable is None
        or speculation_status.savings is None
    ):
        return speculation_status
    if last_record.result != "Promoted" or last_record.revision != previous_status.stable.revision:
        return speculation_status
    hours = max(timedelta(0), now - last_record.completion_time) / timedelta(hours=1)
    savings = _add_cost(_accrue_savings(speculation_status.savings, snapshot, now), previous.replicas * hours)
    return speculation_status.model_copy(update={"savings": savings})


def _add_cost(savings: TuningSavings, hours: float) -> TuningSavings:
    spent = round(savings.spent + hours, 2)
    return savings.model_copy(update={"spent": spent, "net": round(savings.saved - spent, 2)})


def _accrue_savings(savings: TuningSavings | None, snapshot: Snapshot, now: datetime) -> TuningSavings:
    """Return the savings with those since the last update."""
    if savings is None:
        return TuningSavings(update_time=now)
    hours = max(timedelta(0), now - savings.update_time) / timedelta(hours=1)
    gained = round(savings.saved + savings.current_rate * snapshot.resource.spec.replicas * hours, 2)
    return savings.model_copy(update={"saved": gained, "net": round(gained - savings.spent, 2), "update_time": now})


def _with_savings_rate(
    speculation_status: SpeculationStatus, snapshot: Snapshot, effective: EffectiveSetting, stable: Arm, now: datetime
) -> SpeculationStatus:
    """Return the status with what the applied setting saves against the spec's: the product of the measured gains of the trials
    that led to it."""
    if speculation_status.savings is None:
        return speculation_status
    factor, revision = 1.0, stable.revision
    if (
        speculation_status.applied is not None
        and speculation_status.applied.revision == revision
        and speculation_status.applied.spec_revision == effective.spec_revision
    ):
        setting = speculation_status.applied.setting
        for record in speculation_status.trials:
            if record.result == "Promoted" and record.to_setting == setting:
                factor *= 1 + (record.measured.estimate if record.measured is not None else 0.0)
                setting = record.from_setting
    rate = round(factor - 1, 4)
    if rate == speculation_status.savings.current_rate:
        return speculation_status
    return speculation_status.model_copy(
        update={"savings": _accrue_savings(speculation_status.savings, snapshot, now).model_copy(update={"current_rate": rate})}
    )


# ------------------------------------------------------------------------------------------------ recommendation and condition
def _with_recommendation(
    speculation_status: SpeculationStatus, previous_status: Status, stable: Arm, recommendation: Recommendation | None
) -> SpeculationStatus:
    """Return the status with the current recommendation of tuning."""
    if recommendation is None:
        if previous_status.stable is not None and previous_status.stable.revision == stable.revision:
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


def _build_tuned_condition(
    snapshot: Snapshot,
    effective: EffectiveSetting,
    trial_decision: TrialDecision,
    progression: Progression,
    speculation_status: SpeculationStatus,
    previous_status: Status,
    stable: Arm,
    recommendation: Recommendation | None,
) -> ConditionUpdate | None:
    mode = snapshot.resource.spec.speculation.tuning.mode
    previous_condition = next((condition for condition in previous_status.conditions if condition.type == TUNED), None)
    if mode == "Off":
        return ConditionUpdate(
            TUNED, "False", "Off", "Tuning is off (spec.speculation.tuning.mode); using spec.speculation.numSpeculativeTokens."
        )
    if effective.exceeded_bound and speculation_status.applied is not None:
        setting = describe_setting(read_status_setting(speculation_status.applied.setting))
        message = (
            f"{setting} is no longer applied: {effective.exceeded_bound}. "
            f"A rollout replaces it with the spec's {describe_setting(effective.setting)}."
        )
        return ConditionUpdate(TUNED, "False", "SettingVoid", message)
    if speculation_status.trial is not None:
        return ConditionUpdate(TUNED, "False", "Trial", _build_trial_message(speculation_status.trial))
    if obstacle := find_drafting_obstacle(snapshot.resource):
        return ConditionUpdate(TUNED, "False", "NoDrafts", obstacle)
    if recommendation is None and previous_condition is None:
        return None
    if (
        progression.phase == "Paused"
        or progression.canary is not None
        or progression.phase in ("Preflight", "RolledBack", "Failed")
    ):
        message = "Tuning is waiting: a rollout is in progress, or the desired revision is not the stable one."
        return ConditionUpdate(TUNED, "False", "RolloutInProgress", message)
    if trial_decision.reason:
        return ConditionUpdate(TUNED, "False", trial_decision.reason, trial_decision.message)
    if recommendation is not None:
        return _build_recommendation_condition(recommendation, mode, speculation_status)
    if (
        previous_condition is not None
        and previous_condition.reason in _STICKY_REASONS
        and previous_status.stable is not None
        and previous_status.stable.revision == stable.revision
    ):
        return ConditionUpdate(TUNED, previous_condition.status, previous_condition.reason, previous_condition.message)
    return ConditionUpdate(TUNED, "False", "InsufficientData", f"No decision yet for revision {stable.revision}.")


def _build_recommendation_condition(
    recommendation: Recommendation, mode: str, speculation_status: SpeculationStatus
) -> ConditionUpdate:
    message = speculation_status.message or recommendation.reason
    if recommendation.blocked_reason:
        return ConditionUpdate(TUNED, "False", recommendation.blocked_reason, message)
    if recommendation.action == "Change" and mode == "Recommend":
        message = f"{message} Not applied: spec.speculation.tuning.mode is Recommend."
    if recommendation.action == "Hold" and speculation_status.recommended is not None:  # a pause delays it
        return ConditionUpdate(TUNED, "False", "Cooldown" if mode == "Auto" else "Recommended", message)
    return ConditionUpdate(
        TUNED, "True" if recommendation.action == "Hold" else "False", _REASON_BY_ACTION[recommendation.action], message
    )


def _build_trial_message(trial: Trial) -> str:
    setting = describe_setting(read_status_setting(trial.setting))
    if trial.purpose == "Explore":
        return f"Exploration: a canary with {setting} is measured and not promoted, so that the next decision has more data."
    predicted_gain = trial.predicted
    gain = f" (predicted gain {100 * predicted_gain.estimate:.1f} %)" if predicted_gain is not None else ""
    return f"Trial of {setting}{gain}: it is rolled back unless its canary proves it."
