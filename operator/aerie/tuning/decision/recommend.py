"""Decide from telemetry: hold, change the setting, or explore with one canary.

The rule: of the candidates whose latencies hold with `certainty`, take the one with the best pessimistic gain. Propose it if its
median gain passes the gate, its pessimistic gain pays for the rollout, and it is probably better; the canary of the change proves
the rest. Before that, and otherwise, weigh what one canary would teach against its cost (`exploration`). Propose nothing without
evidence, during a cooldown, or where an objective is broken and the change does not fix it. Windows of the current setting that
ended long ago are no evidence: the metrics are lost, or somebody changed the engines' setting.

Guarantees: pure and deterministic in telemetry, context, policy and seed. Not guaranteed: that the forecast is right. The caller
proves a change on a canary before promoting it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aerie.engine.metrics.rates import Unknown
from aerie.engine.speculation import Adaptive, Off, Schedule, Static, describe_setting
from aerie.tuning.decision.candidates import build_candidates
from aerie.tuning.decision.evaluation import CandidateEvaluation
from aerie.tuning.decision.exploration import (
    CANNOT_PROBE_REASON,
    decide_exploration,
    decide_while_off,
    exploration_blocked_reason,
    probe_blocked_message,
    select_canary,
)
from aerie.tuning.decision.forecast import Forecast, LoadExtrapolation, build_forecast
from aerie.tuning.decision.load_distribution import estimate_load, extrapolate_load
from aerie.tuning.decision.objectives import load_slowdown
from aerie.tuning.decision.policy import FailedTrial, LatencyObjectives, TrialHistory, TuningPolicy
from aerie.tuning.decision.types import CandidatePrediction, DecisionEvidence, TuningAction, TuningContext, TuningDecision
from aerie.tuning.models.acceptance import AcceptanceModel, fit_acceptance
from aerie.tuning.models.change_points import ChangePoints, detect_change_points, is_day_covered, summarize_block_loads
from aerie.tuning.models.step_time import StepTimeModel, fit_step_time
from aerie.tuning.telemetry import HOUR, TelemetryBlock, TuningTelemetry

MAX_STALE_BLOCKS = 12
"""Blocks without a window of the current setting, after which nothing is decided."""


def decide_setting(telemetry: TuningTelemetry, context: TuningContext, policy: TuningPolicy, seed: int) -> TuningDecision:
    """Return the decision on the telemetry in this context."""
    random = np.random.default_rng(seed)
    blocks = list(telemetry.blocks())
    changes = detect_change_points(blocks)
    context = replace(
        context,
        history=_current_history(context.history, changes),
        failed_trials=_current_failures(context.failed_trials, changes),
    )
    step_time = fit_step_time(telemetry.cells, context.engine.max_captured_tokens, is_moe=context.engine.is_moe)
    acceptance = fit_acceptance(changes.acceptance_blocks(blocks), max(context.max_speculative_tokens, 1), policy.draws, random)
    stale_message = _stale_telemetry_message(blocks, telemetry, context)
    if isinstance(acceptance, Unknown) or isinstance(step_time, Unknown) or stale_message is not None:
        return _decide_without_evidence(acceptance, step_time, stale_message, changes, telemetry, context, policy)
    forecast, extrapolation = _build_forecasts(acceptance, step_time, changes, blocks, telemetry, context, random)
    candidates = build_candidates(context.engine, context.max_speculative_tokens, forecast.load.pairs)
    recent_blocks = changes.load_blocks(changes.acceptance_blocks(blocks))
    evaluation = CandidateEvaluation.evaluate(forecast, extrapolation, candidates, telemetry, recent_blocks, context, policy)
    slowdown = _lending_slowdown(recent_blocks, step_time, acceptance, context)
    decision = _choose_action(replace(evaluation, slowdown=slowdown))
    evidence = DecisionEvidence(acceptance, step_time, forecast, changes)
    return replace(decision, excluded_candidates=candidates.excluded, evidence=evidence)


def _decide_without_evidence(
    acceptance: AcceptanceModel | Unknown,
    step_time: StepTimeModel | Unknown,
    stale_message: str | None,
    changes: ChangePoints,
    telemetry: TuningTelemetry,
    context: TuningContext,
    policy: TuningPolicy,
) -> TuningDecision:
    """Return the decision if a model could not be fitted, or if the telemetry is stale."""
    unknown_messages = (model.message for model in (acceptance, step_time) if isinstance(model, Unknown))
    missing = tuple(filter(None, (stale_message, *unknown_messages)))
    evidence = DecisionEvidence(
        None if isinstance(acceptance, Unknown) else acceptance,
        None if isinstance(step_time, Unknown) else step_time,
        change_points=changes,
    )
    if isinstance(context.current_setting, Off) and isinstance(acceptance, Unknown) and stale_message is None:
        return replace(decide_while_off(context, policy), missing_data=missing, evidence=evidence)
    missing = (*missing, *_exclusion_messages(telemetry))
    return TuningDecision(TuningAction.INSUFFICIENT, " ".join(missing), missing_data=missing, evidence=evidence)


def _build_forecasts(
    acceptance: AcceptanceModel,
    step_time: StepTimeModel,
    changes: ChangePoints,
    blocks: Sequence[TelemetryBlock],
    telemetry: TuningTelemetry,
    context: TuningContext,
    random: np.random.Generator,
) -> tuple[Forecast, LoadExtrapolation | None]:
    """Return the forecast on the expected load, and those on extrapolated loads if a day of load is not known."""
    max_k, max_num_seqs = context.max_speculative_tokens, float(context.engine.arguments.max_num_seqs or math.inf)
    load = estimate_load(telemetry.cells, blocks, changes)
    forecast = build_forecast(load, acceptance, step_time, max_k, random, max_num_seqs)
    if is_day_covered(changes.load_blocks(blocks), telemetry.horizon):
        return forecast, None
    earlier_load = estimate_load(telemetry.cells, blocks) if is_day_covered(blocks, telemetry.horizon) else load
    range_forecast, headroom_forecast = (
        build_forecast(extrapolated, acceptance, step_time, max_k, random, max_num_seqs)
        for extrapolated in extrapolate_load(load, earlier_load)
    )
    return forecast, LoadExtrapolation(range_forecast, headroom_forecast)


def _stale_telemetry_message(blocks: Sequence[TelemetryBlock], telemetry: TuningTelemetry, context: TuningContext) -> str | None:
    """Return why the windows are no evidence of the current setting; None if they are."""
    current, block_seconds = context.current_setting, telemetry.scale.block_seconds
    ends = [block.start + block_seconds for block in blocks if block.setting == current]
    if not ends:
        return f"no window of {describe_setting(current)} was counted, although it is the current setting."
    age = context.now - ends[-1]
    if age <= MAX_STALE_BLOCKS * block_seconds:
        return None
    return (
        f"the newest windows of {describe_setting(current)} ended {age / HOUR:.1f} h ago: "
        "no traffic, no metrics, or another setting runs."
    )


def _current_history(history: TrialHistory, changes: ChangePoints) -> TrialHistory:
    """Return the history without results from other traffic: explorations, inconclusive trials, and rollbacks."""
    if changes.acceptance is not None:
        history = replace(
            history,
            exploration_times=tuple(
                timestamp for timestamp in history.exploration_times if timestamp >= changes.acceptance.timestamp
            ),
        )
    last_ended = max(history.rolled_back_at or 0.0, history.inconclusive_at or 0.0)
    if not history.consecutive_failures and (history.trial_started_at or last_ended) < (changes.newest_timestamp or 0.0):
        history = replace(history, rolled_back_at=None, inconclusive_at=None, inconclusive_count=1)
    return history


def _current_failures(failed_trials: tuple[FailedTrial, ...], changes: ChangePoints) -> tuple[FailedTrial, ...]:
    """Return the failed trials without settings that were found worse on other traffic."""
    return tuple(
        trial for trial in failed_trials if not trial.was_compared or trial.trial_started_at >= (changes.newest_timestamp or 0.0)
    )


def _lending_slowdown(
    blocks: Sequence[TelemetryBlock], step_time: StepTimeModel, acceptance: AcceptanceModel, context: TuningContext
) -> float:
    """Return the share by which a token takes longer without the borrowed replicas, at the largest load of the last hour."""
    remaining = context.replicas - context.borrowed_replicas
    recent_batches = [block_load.batch for block_load in summarize_block_loads(blocks) if block_load.start >= context.now - HOUR]
    if not context.borrowed_replicas or not recent_batches:
        return 0.0
    if remaining <= 0:
        return math.inf
    mean_lengths = acceptance.lengths.mean(axis=0)
    return load_slowdown(step_time, mean_lengths, context.current_setting, max(recent_batches), context.replicas / remaining)


def _exclusion_messages(telemetry: TuningTelemetry) -> tuple[str, ...]:
    """Return how many windows were excluded, and the most common reason; empty if none were."""
    if not telemetry.excluded_windows:
        return ()
    reason, count = telemetry.excluded_windows.most_common(1)[0]
    total = sum(telemetry.excluded_windows.values())
    windows = "1 window was" if total == 1 else f"{total} windows were"
    return (f"{windows} excluded{f', {count} of them' if count < total else ''} because {reason}",)


# ---------------------------------------------------------------------------------------------------------- the candidate
def _choose_action(evaluation: CandidateEvaluation) -> TuningDecision:
    """Return the decision: turn harmful speculation off, else change to the best candidate, else explore or hold."""
    context, policy = evaluation.context, evaluation.policy
    best = _select_candidate(evaluation)
    pause_reason = context.history.change_pause_reason(context.now, policy)
    off = evaluation.prediction_for(Off()) if Off() in evaluation.gains else None
    if (
        off is not None
        and off.setting != context.current_setting
        and not context.is_in_backoff(Off())
        and _is_speculation_harmful(off, evaluation)
    ):
        decision = _decide_turning_off(off, context, policy, pause_reason)
    elif best.setting != context.current_setting and _is_worth_trial(best, evaluation):
        decision = _decide_change(best, evaluation, pause_reason)
    else:
        decision = decide_exploration(evaluation, best, pause_reason)
    predictions = tuple(_with_rejection_reason(prediction, best, evaluation) for prediction in evaluation.predictions)
    return replace(decision, predictions=predictions)


def _decide_turning_off(
    off: CandidatePrediction, context: TuningContext, policy: TuningPolicy, pause_reason: str | None
) -> TuningDecision:
    """Return the decision if speculation is harmful."""
    reason = f"speculation is slower on this load: the gain without it is {off.gain_text}."
    if probe_blocked := probe_blocked_message(context, policy):
        reason = f"{reason} Speculation stays on, because {probe_blocked}"
        return TuningDecision(TuningAction.HOLD, reason, off.setting, blocked_reason=CANNOT_PROBE_REASON)
    if pause_reason:
        return TuningDecision(TuningAction.HOLD, f"{reason} However, {pause_reason}", off.setting)
    return TuningDecision(TuningAction.CHANGE, reason, off.setting)


def _decide_change(best: CandidatePrediction, evaluation: CandidateEvaluation, pause_reason: str | None) -> TuningDecision:
    """Return the decision if the best candidate is worth a trial: change now, explore first, or hold for now."""
    context, policy, setting = evaluation.context, evaluation.policy, best.setting
    reason = f"{describe_setting(setting)} is {best.gain_text} better than {describe_setting(context.current_setting)}."
    if setting == context.explored_setting:
        return TuningDecision(TuningAction.CHANGE, f"{reason} Its exploration canary continues as a trial, to prove it.", setting)
    if pause_reason:
        return TuningDecision(TuningAction.HOLD, f"{reason} However, {pause_reason}", setting)
    canary = select_canary(evaluation, pending_gain=float(evaluation.gains[setting].mean()))
    if (
        canary is not None
        and canary.net_value >= policy.min_exploration_value
        and exploration_blocked_reason(evaluation, canary) is None
    ):
        return TuningDecision(
            TuningAction.EXPLORE,
            f"{reason} Before the change, {canary.value_message} more and costs {100 * canary.cost:.2f} %.",
            canary.setting,
            exploration_value=canary.value,
            exploration_cost=canary.cost,
        )
    if (recent_gain := evaluation.recent_gain(setting)) < policy.recent_gain_fraction * evaluation.required_median_gain:
        wait = f"At the load of the last hour it is {100 * recent_gain:+.1f} %: the trial waits for a load that shows the gain."
        return TuningDecision(TuningAction.HOLD, f"{reason} {wait}", setting)
    return TuningDecision(TuningAction.CHANGE, reason, setting)


def _select_candidate(evaluation: CandidateEvaluation) -> CandidatePrediction:
    """Return the best candidate whose latencies hold and that is no worse in any fifth of the load, nor on an extrapolated load.

    A fixed setting is preferred if a schedule or adaptive verification is hardly better. Without such a candidate the current
    setting is returned.
    """
    policy = evaluation.policy
    current = evaluation.prediction_for(evaluation.context.current_setting)
    eligible = [
        prediction
        for prediction in evaluation.predictions
        if prediction.latencies.probability_met >= policy.min_objective_probability
        and not evaluation.context.is_in_backoff(prediction.setting)
        and prediction.worst_fifth_gain >= -policy.max_worst_fifth_loss
        and (prediction.worst_extrapolated_gain is None or prediction.worst_extrapolated_gain >= -policy.max_worst_fifth_loss)
    ]
    fixed = [prediction for prediction in eligible if isinstance(prediction.setting, Off | Static)]
    best = eligible[0] if eligible else current
    explored = next((prediction for prediction in eligible if prediction.setting == evaluation.context.explored_setting), None)
    if (
        explored is not None
        and _is_worth_trial(explored, evaluation)
        and explored.gain[1] >= best.gain[1] - policy.complexity_penalty
    ):
        return explored
    is_complex_change = isinstance(best.setting, Schedule | Adaptive) and best.setting != current.setting
    if is_complex_change and fixed and best.gain[1] < fixed[0].gain[1] + policy.complexity_penalty:
        return fixed[0]
    return best


def _is_worth_trial(prediction: CandidatePrediction, evaluation: CandidateEvaluation) -> bool:
    """Return whether a candidate is worth a canary of its own, or worth retaining the canary that explores with it until it is
    proven."""
    policy = evaluation.policy
    if prediction.setting == evaluation.context.explored_setting:
        return (
            prediction.gain[2] >= evaluation.required_pessimistic_gain
            and prediction.probability_better >= policy.min_probability_better
        )
    return (
        prediction.gain[2] >= evaluation.required_median_gain
        and prediction.gain[1] >= evaluation.required_pessimistic_gain
        and prediction.probability_better >= policy.min_probability_better
    )


def _is_speculation_harmful(off: CandidatePrediction, evaluation: CandidateEvaluation) -> bool:
    """Return whether no speculation is the best with enough certainty to turn speculation off."""
    if (
        off.latencies.probability_met < evaluation.policy.min_objective_probability
        and evaluation.context.objectives != LatencyObjectives()
    ):
        return False
    if evaluation.is_drafter_ineffective and off.probability_better >= 0.5:
        return True
    if off.worst_fifth_gain < -evaluation.policy.max_worst_fifth_loss or off.gain[2] < evaluation.required_pessimistic_gain:
        return False
    drafting_gains = [gain for setting, gain in evaluation.gains.items() if not isinstance(setting, Off)]
    return (
        float((evaluation.gains[Off()] > np.max(drafting_gains, axis=0)).mean()) >= evaluation.policy.min_probability_off_better
    )


def _with_rejection_reason(
    prediction: CandidatePrediction, best: CandidatePrediction, evaluation: CandidateEvaluation
) -> CandidatePrediction:
    """Return the prediction with the reason why it was not chosen; unchanged for the chosen and the current setting."""
    policy = evaluation.policy
    if prediction.setting == evaluation.context.current_setting or (
        prediction.setting == best.setting and _is_worth_trial(best, evaluation)
    ):
        return prediction
    if evaluation.context.is_in_backoff(prediction.setting):
        until = next(trial.backoff_until for trial in evaluation.context.failed_trials if trial.setting == prediction.setting)
        reason = f"its trials failed; the next is possible in {(until - evaluation.context.now) / HOUR:.1f} h."
    elif prediction.latencies.probability_met < policy.min_objective_probability:
        probability, required = 100 * prediction.latencies.probability_met, 100 * policy.min_objective_probability
        reason = f"the objectives are met with a probability of {probability:.0f} %, {required:.0f} % is required."
    elif prediction.probability_better < 0.5:
        reason = "it is worse."
    elif prediction.worst_fifth_gain < -policy.max_worst_fifth_loss:
        loss = -100 * prediction.worst_fifth_gain
        reason = f"in a fifth of the load it loses {loss:.1f} %, at most {100 * policy.max_worst_fifth_loss:.0f} % is allowed."
    elif prediction.worst_extrapolated_gain is not None and prediction.worst_extrapolated_gain < -policy.max_worst_fifth_loss:
        loss = -100 * prediction.worst_extrapolated_gain
        reason = f"at the lowest or highest expected load it loses {loss:.1f} %; less than a day of load is known."
    elif prediction.probability_better < policy.min_probability_better:
        probability, required = 100 * prediction.probability_better, 100 * policy.min_probability_better
        reason = f"it is better with a probability of {probability:.0f} %, {required:.0f} % is required."
    elif prediction.gain[2] < evaluation.required_median_gain:
        required_gain = 100 * evaluation.required_median_gain
        reason = f"its median gain is {100 * prediction.gain[2]:.1f} %, {required_gain:.1f} % is required."
    elif prediction.gain[1] < evaluation.required_pessimistic_gain:
        required_gain = 100 * evaluation.required_pessimistic_gain
        reason = f"with 80 % it gains {100 * prediction.gain[1]:.1f} % or more, {required_gain:.1f} % pays for the rollout."
    else:
        reason = f"{describe_setting(best.setting)} is better, or simpler and as good."
    return replace(prediction, rejection_reason=reason)
