"""The condition SpeculationTuned: what tuning does, waits for or recommends."""

from __future__ import annotations

from aerie.api import SpeculativeDeployment
from aerie.api.status import Arm, SpeculationStatus, Status, Trial
from aerie.engine.speculation import describe_setting
from aerie.rollout.children.tuning_record import find_drafting_obstacle
from aerie.rollout.conditions import TUNED, ConditionUpdate
from aerie.rollout.progression.progression import Progression
from aerie.rollout.reasons import TunedReason
from aerie.rollout.revision.desired import read_spec_setting, read_status_setting
from aerie.rollout.trials.effective_setting import EffectiveSetting, TrialDecision
from aerie.tuning.recommendation import Recommendation, RecommendedAction

_REASON_BY_ACTION: dict[RecommendedAction, TunedReason] = {
    "Insufficient": "InsufficientData",
    "Hold": "Optimal",
    "Change": "Recommended",
    "Explore": "ExplorationRecommended",
}
_STICKY_REASONS: tuple[TunedReason, ...] = (
    *_REASON_BY_ACTION.values(),
    "CannotProbe",
    "Cooldown",
    "InsufficientCapacity",
    "SettingRejected",
)


def build_tuned_condition(
    resource: SpeculativeDeployment,
    effective: EffectiveSetting,
    trial_decision: TrialDecision,
    progression: Progression,
    speculation_status: SpeculationStatus,
    previous_status: Status,
    stable: Arm,
    recommendation: Recommendation | None,
) -> ConditionUpdate | None:
    mode = resource.spec.speculation.tuning.mode
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
    if obstacle := find_drafting_obstacle(resource):
        return ConditionUpdate(TUNED, "False", "NoDrafts", obstacle)
    if effective.is_kept_for_new_drafter:
        return ConditionUpdate(TUNED, "False", "RolloutInProgress", _build_kept_message(resource, effective))
    if recommendation is None and previous_condition is None:
        return None
    if (
        progression.phase == "Paused"
        or progression.canary is not None
        or progression.in_place is not None
        or progression.phase in ("Preflight", "RolledBack", "Failed")
    ):
        message = "Tuning is waiting: a rollout is in progress, or the desired revision is not the stable one."
        return ConditionUpdate(TUNED, "False", "RolloutInProgress", message)
    if trial_decision.reason:
        return ConditionUpdate(TUNED, "False", trial_decision.reason, trial_decision.message)
    if recommendation is not None:
        return _build_recommendation_condition(recommendation, mode, speculation_status)
    previous_reason = previous_condition.reason if previous_condition is not None else ""
    sticky_reason = next((reason for reason in _STICKY_REASONS if reason == previous_reason), None)
    if (
        previous_condition is not None
        and sticky_reason is not None
        and previous_status.stable is not None
        and previous_status.stable.served_revision == stable.served_revision
    ):
        return ConditionUpdate(TUNED, previous_condition.status, sticky_reason, previous_condition.message)
    return ConditionUpdate(TUNED, "False", "InsufficientData", f"No decision yet for revision {stable.served_revision}.")


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


def _build_kept_message(resource: SpeculativeDeployment, effective: EffectiveSetting) -> str:
    setting, spec_setting = describe_setting(effective.setting), describe_setting(read_spec_setting(resource))
    return (
        f"{setting} is kept for the new drafter, so that only the drafter changes (spec.rollout.inPlace.mode is "
        f"{resource.spec.rollout.in_place.mode}). Tuning continues after its promotion. To use the spec's {spec_setting}, "
        "set spec.speculation.tuning.mode: Off until the drafter is promoted."
    )


def _build_trial_message(trial: Trial) -> str:
    setting = describe_setting(read_status_setting(trial.setting))
    if trial.purpose == "Explore":
        return f"Exploration: a canary with {setting} is measured and not promoted, so that the next decision has more data."
    predicted_gain = trial.predicted
    gain = f" (predicted gain {100 * predicted_gain.estimate:.1f} %)" if predicted_gain is not None else ""
    return f"Trial of {setting}{gain}: it is rolled back unless its canary proves it."
