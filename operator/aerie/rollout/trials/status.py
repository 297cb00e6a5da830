"""What status.speculation and the condition Tuned say after a step: how trials have ended, what they brought, what is advised.

Guarantees: pure; nothing in it follows the clock alone. Figures of an advice are written again when its words have changed or
the gain has moved by a point, so that a decision each half hour is not a write each half hour. Without an advice, and without
anything of tuning in the status, it says what the setting is and nothing else.
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
"""By how much a predicted gain has to move to be written again."""
_REASON_BY_ACTION = {
    "Insufficient": "InsufficientData",
    "Hold": "Optimal",
    "Change": "Recommended",
    "Explore": "ExplorationAdvised",
}
_STICKY_REASONS = (*_REASON_BY_ACTION.values(), "CannotProbe", "Cooldown", "NoRoom", "Refused")


@dataclass(frozen=True)
class TuningStatus:
    """What the status says of tuning."""

    speculation: SpeculationStatus | None
    condition: ConditionUpdate | None = None
    """The condition Tuned; None where there is nothing to say."""


def build_tuning_status(
    snapshot: Snapshot,
    effective: EffectiveSetting,
    trial_decision: TrialDecision,
    progression: Progression,
    stable: Arm | None,
    now: datetime,
) -> TuningStatus:
    """After a step of the course to this stable arm."""
    before = snapshot.resource.status or Status()
    if stable is None or stable.setting is None:
        return TuningStatus(None)
    said = before.speculation or SpeculationStatus(current=stable.setting)
    said = _clamp_future_times(said.model_copy(update={"current": stable.setting}), now)
    if before.stable is not None:
        said = _with_setting_change(said, before.stable, stable, now)
        said = _with_trial_end(said, snapshot, effective, before, progression, stable, now)
        said = _with_retention_cost(said, snapshot, before, progression, now)
        said = _with_reverted_promotion(said, before, progression, stable, now)
    again = read_retry_request(snapshot.resource) != before.retry
    standing = failures.filter_active_failures(said.failures, snapshot, effective.basis, retry_requested=again)
    if standing != said.failures:
        said = said.model_copy(update={"failures": standing, "failed": said.failed if standing else None})
    alive = {stable.revision, *([progression.previous.revision] if progression.previous is not None else [])}
    if said.chosen is not None and said.chosen.revision not in alive:
        said = said.model_copy(update={"chosen": None})
    said = _with_savings_rate(said, snapshot, effective, stable, now)
    if trial_decision.trial is not None:
        said = said.model_copy(update={"trial": trial_decision.trial})
    sampling = recommend_draft_sampling(snapshot.resource, read_status_setting(stable.setting))
    if sampling != said.recommended_draft_sampling:
        said = said.model_copy(update={"recommended_draft_sampling": sampling})
    advice = find_current_recommendation(snapshot, progression)
    said = _with_recommendation(said, before, stable, advice)
    return TuningStatus(
        said, _build_tuned_condition(snapshot, effective, trial_decision, progression, said, before, stable, advice)
    )


def _clamp_future_times(said: SpeculationStatus, now: datetime) -> SpeculationStatus:
    """With no moment after now: a leader whose clock was ahead must not make pauses last until then."""
    update: dict[str, Any] = {
        name: now
        for name in ("changed_at", "rolled_back_at", "speculated_at")
        if (moment := getattr(said, name)) is not None and moment > now
    }
    if said.trial is not None and said.trial.started_at > now:
        update["trial"] = said.trial.model_copy(update={"started_at": now})
    for name, field in (("changes", "ended_at"), ("failures", "last_at")):
        if any(getattr(one, field) > now for one in getattr(said, name)):
            update[name] = [one.model_copy(update={field: min(getattr(one, field), now)}) for one in getattr(said, name)]
    if any(moment > now for moment in said.explored):
        update["explored"] = [min(moment, now) for moment in said.explored]
    return said.model_copy(update=update) if update else said


# ------------------------------------------------------------------------------------------------------------- trials that end
def _with_setting_change(said: SpeculationStatus, was: Arm, stable: Arm, now: datetime) -> SpeculationStatus:
    """The moments of a change of the setting, whoever made it."""
    if was.revision == stable.revision or was.setting == stable.setting or was.setting is None or stable.setting is None:
        return said
    update: dict[str, datetime | None] = {"changed_at": now, "speculated_at": None}
    if stable.setting.mode == "Off":
        update["speculated_at"] = now
    return said.model_copy(update=update)


def _with_trial_end(
    said: SpeculationStatus,
    observed: Snapshot,
    asked: EffectiveSetting,
    before: Status,
    way: Progression,
    stable: Arm,
    now: datetime,
) -> SpeculationStatus:
    """The trial has ended with this step, or is void."""
    trial, outcome = said.trial, way.outcome
    if trial is None:
        return said
    if outcome is not None and outcome.revision != trial.revision:
        outcome = None
    if asked.trial is not None and outcome is None:
        return said
    result: TrialResult = outcome.result if outcome is not None else "Failed" if asked.abandoned_reason else "Superseded"
    if result == "RolledBack" and way.analysis is not None and way.analysis.verdict == "Inconclusive":
        result = "Undecided"
    assert before.stable is not None
    assert before.stable.setting is not None
    tried = TrialRecord(
        was=before.stable.setting,
        tried=trial.setting,
        purpose=trial.purpose,
        result=result,
        revision=trial.revision,
        predicted=trial.predicted,
        realised=compute_measured_gain(outcome.comparisons) if outcome is not None else None,
        started_at=trial.started_at,
        ended_at=now,
    )
    update: dict[str, Any] = {"trial": None, "changes": [tried, *said.changes][:MAX_TRIAL_RECORDS]}
    failure = failures.classify_failure(result, outcome, way.analysis)
    if failure in ("Worse", "Failed"):
        update["rolled_back_at"] = now
    if result != "Superseded":
        why = outcome.reason if outcome is not None else asked.abandoned_reason
        update |= failures.build_failure_update(said, trial, failure, why, observed, now)
    if result == "Explored":
        update["explored"] = [now, *said.explored][:MAX_EXPLORATION_TIMES]
    if result == "Explored" and stable.setting is not None and stable.setting.mode == "Off":
        update["speculated_at"] = now
    if result == "Promoted":
        kept = AppliedSetting(setting=trial.setting, revision=trial.revision, basis=trial.basis, slo=trial.slo)
        update["chosen"] = kept if trial.revision != trial.basis else None
    update["balance"] = _charge_trial(said, observed, before, trial, promoted=result == "Promoted", now=now)
    return said.model_copy(update=update)


def _with_reverted_promotion(
    said: SpeculationStatus, before: Status, way: Progression, stable: Arm, now: datetime
) -> SpeculationStatus:
    """A trial was promoted, and the promotion has been taken back with this step."""
    last, previous = next(iter(said.changes), None), before.previous
    if last is None or last.result != "Promoted" or previous is None or before.stable is None:
        return said
    if (before.stable.revision, previous.revision) != (last.revision, stable.revision):
        return said
    result = "Superseded" if way.outcome is not None and way.outcome.result == "Superseded" else "RolledBack"
    changes = [last.model_copy(update={"result": result, "ended_at": now}), *said.changes[1:]]
    mine = said.chosen is not None and said.chosen.revision == last.revision
    basis = said.chosen.basis if said.chosen is not None and mine else last.revision
    slo = said.chosen.slo if said.chosen is not None and mine else None
    chosen = (
        AppliedSetting(setting=last.was, revision=stable.revision, basis=basis, slo=slo) if stable.revision != basis else None
    )
    moment = {"rolled_back_at": now} if result == "RolledBack" else {}
    return said.model_copy(update={"changes": changes, "chosen": chosen, **moment})


def compute_measured_gain(comparisons: Iterable[MetricComparison]) -> PerformanceGain | None:
    """What a canary has shown: by how much more tokens it gave in the time that users waited for tokens."""
    found = next((one for one in comparisons if one.metric == TIME_PER_OUTPUT_TOKEN and one.estimate is not None), None)
    if found is None or found.estimate is None or found.estimate <= -1:
        return None
    ends = [None if end is None or end <= -1 else round(1 / (1 + end) - 1, 4) for end in (found.upper, found.lower)]
    return PerformanceGain(estimate=round(1 / (1 + found.estimate) - 1, 4), lower=ends[0], upper=ends[1])


# ----------------------------------------------------------------------------------------------------------------- the balance
def _charge_trial(
    said: SpeculationStatus, observed: Snapshot, before: Status, trial: Trial, *, promoted: bool, now: datetime
) -> TuningSavings:
    """With what the trial has cost: its pods beyond spec.replicas for as long as they were there, and those in the place of
    replicas while they loaded, after a promotion each other one too."""
    known = before.canary if before.canary is not None and before.canary.revision == trial.revision else None
    balance = _accrue_savings(said.balance, observed, now)
    if known is None:
        return balance
    lasted = max(timedelta(0), now - known.started_at) / timedelta(hours=1)
    loading = max(timedelta(0), (known.ready_at or now) - known.started_at) / timedelta(hours=1)
    spec = observed.resource.spec
    places = Capacity.from_spec(spec.replicas, spec.rollout.canary)
    stable = before.stable.revision if before.stable is not None else ""
    arms = (*observed.live_pods(trial.revision), *observed.live_pods(stable, control=True))
    extra = min(
        places.max_total_pods - spec.replicas, sum(not pod_failures.is_pod_unschedulable(pod) for pod in arms)
    )  # one without a node costs none
    instead = places.canary_replicas + places.control_replicas - extra if known.ready_at is not None else 0
    if promoted and not extra:
        instead += spec.replicas
    return _add_cost(balance, extra * lasted + max(0, instead) * loading)


def _with_retention_cost(
    said: SpeculationStatus, observed: Snapshot, before: Status, way: Progression, now: datetime
) -> SpeculationStatus:
    """With what pods have cost that were kept after the promotion of a trial, when they go."""
    previous, last = before.previous, next(iter(said.changes), None)
    if previous is None or way.previous is not None or last is None or before.stable is None or said.balance is None:
        return said
    if last.result != "Promoted" or last.revision != before.stable.revision:
        return said
    hours = max(timedelta(0), now - last.ended_at) / timedelta(hours=1)
    balance = _add_cost(_accrue_savings(said.balance, observed, now), previous.replicas * hours)
    return said.model_copy(update={"balance": balance})


def _add_cost(balance: TuningSavings, hours: float) -> TuningSavings:
    spent = round(balance.spent + hours, 2)
    return balance.model_copy(update={"spent": spent, "net": round(balance.gained - spent, 2)})


def _accrue_savings(balance: TuningSavings | None, observed: Snapshot, now: datetime) -> TuningSavings:
    """With what came since it was reckoned last."""
    if balance is None:
        return TuningSavings(as_of=now)
    hours = max(timedelta(0), now - balance.as_of) / timedelta(hours=1)
    gained = round(balance.gained + balance.rate * observed.resource.spec.replicas * hours, 2)
    return balance.model_copy(update={"gained": gained, "net": round(gained - balance.spent, 2), "as_of": now})


def _with_savings_rate(
    said: SpeculationStatus, observed: Snapshot, asked: EffectiveSetting, stable: Arm, now: datetime
) -> SpeculationStatus:
    """What the setting in force saves against the spec's: what the trials that led to it have shown, one upon the other."""
    if said.balance is None:
        return said
    factor, revision = 1.0, stable.revision
    if said.chosen is not None and said.chosen.revision == revision and said.chosen.basis == asked.basis:
        setting = said.chosen.setting
        for one in said.changes:
            if one.result == "Promoted" and one.tried == setting:
                factor *= 1 + (one.realised.estimate if one.realised is not None else 0.0)
                setting = one.was
    rate = round(factor - 1, 4)
    if rate == said.balance.rate:
        return said
    return said.model_copy(update={"balance": _accrue_savings(said.balance, observed, now).model_copy(update={"rate": rate})})


# ---------------------------------------------------------------------------------------------------------------- what is said
def _with_recommendation(
    said: SpeculationStatus, before: Status, stable: Arm, advice: Recommendation | None
) -> SpeculationStatus:
    """What tuning recommends now."""
    if advice is None:
        if before.stable is not None and before.stable.revision == stable.revision:
            return said
        return said.model_copy(update={"recommended": None, "predicted": None, "why": None})
    better = build_status_setting(advice.setting) if advice.setting is not None and advice.action in ("Change", "Hold") else None
    better = None if better == stable.setting else better
    gain = build_predicted_gain(advice) if better is not None else None
    why = truncate_message(advice.reason)
    alike = (
        said.recommended == better
        and _mask_numbers(said.why or "") == _mask_numbers(why)
        and not _has_gain_changed(said.predicted, gain)
    )
    if alike and advice.action != "Insufficient":
        return said
    return said.model_copy(update={"recommended": better, "predicted": gain, "why": why})


def _mask_numbers(text: str) -> str:
    return re.sub(r"[-+]?[0-9][0-9.,]*", "#", text)


def _has_gain_changed(before: PerformanceGain | None, after: PerformanceGain | None) -> bool:
    if before is None or after is None:
        return before is not after
    return abs(before.estimate - after.estimate) >= MIN_GAIN_CHANGE


def _build_tuned_condition(
    observed: Snapshot,
    asked: EffectiveSetting,
    intent: TrialDecision,
    way: Progression,
    said: SpeculationStatus,
    before: Status,
    stable: Arm,
    advice: Recommendation | None,
) -> ConditionUpdate | None:
    mode = observed.resource.spec.speculation.tuning.mode
    known = next((one for one in before.conditions if one.type == TUNED), None)
    if mode == "Off":
        return ConditionUpdate(TUNED, "False", "Off", "spec.speculation.tuning.mode is Off: spec.speculation.tokens stands")
    if asked.exceeded_bound and said.chosen is not None:
        setting = describe_setting(read_status_setting(said.chosen.setting))
        message = f"{setting} is in force no longer: {asked.exceeded_bound}. {describe_setting(asked.setting)} of the spec takes its place by a rollout"
        return ConditionUpdate(TUNED, "False", "ChoiceVoid", message)
    if said.trial is not None:
        return ConditionUpdate(TUNED, "False", "Trial", _build_trial_message(said.trial))
    if why := find_drafting_obstacle(observed.resource):
        return ConditionUpdate(TUNED, "False", "NoDrafts", why)
    if advice is None and known is None:
        return None
    if way.phase == "Paused" or way.canary is not None or way.phase in ("Preflight", "RolledBack", "Failed"):
        message = "tuning waits: a rollout is under way, or what the spec asks for is not what serves"
        return ConditionUpdate(TUNED, "False", "RolloutUnderWay", message)
    if intent.reason:
        return ConditionUpdate(TUNED, "False", intent.reason, intent.message)
    if advice is not None:
        return _build_recommendation_condition(advice, mode, said)
    if (
        known is not None
        and known.reason in _STICKY_REASONS
        and before.stable is not None
        and before.stable.revision == stable.revision
    ):
        return ConditionUpdate(TUNED, known.status, known.reason, known.message)
    return ConditionUpdate(TUNED, "False", "InsufficientData", f"nothing has been decided yet for revision {stable.revision}")


def _build_recommendation_condition(advice: Recommendation, mode: str, said: SpeculationStatus) -> ConditionUpdate:
    why = said.why or advice.reason
    if advice.blocked_reason:
        return ConditionUpdate(TUNED, "False", advice.blocked_reason, why)
    if advice.action == "Change" and mode == "Recommend":
        why = f"{why} Mode Recommend leaves it at that"
    if advice.action == "Hold" and said.recommended is not None:  # it is held back because of a pause
        return ConditionUpdate(TUNED, "False", "Cooldown" if mode == "Auto" else "Recommended", why)
    return ConditionUpdate(TUNED, "True" if advice.action == "Hold" else "False", _REASON_BY_ACTION[advice.action], why)


def _build_trial_message(trial: Trial) -> str:
    setting = describe_setting(read_status_setting(trial.setting))
    if trial.purpose == "Explore":
        return f"a canary with {setting} is to be measured and given up: what it shows makes the next decision surer"
    expected = trial.predicted
    gain = f", expected to gain {100 * expected.estimate:.1f} %" if expected is not None else ""
    return f"{setting} is on trial{gain}: a canary has to prove it, or it is taken back"
