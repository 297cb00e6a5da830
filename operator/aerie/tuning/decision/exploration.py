"""Weigh what one canary would teach against its cost, and decide when no replica can be spared for one.

    value(K') = E[ max_c E[gain_c | observations of a canary at K'], over those c that could then be proposed, or 0 ]

This is the expected value of partial information. The inner expectation is a regression over the draws (Strong, Oakley and
Brennan 2014); its residuals stand for the remaining uncertainty.

Guarantees: pure. No canary explores at the users' cost, unless it is the remedy. If the engine runs schedules, a canary explores
more draft tokens only at the observed batches, and runs the current setting beyond them. The cost of a step there is unknown, and
an engine whose steps are too slow accumulates more requests, which makes them slower still.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from aerie.engine.speculation import (
    Schedule,
    SpeculationSetting,
    Static,
    describe_setting,
    max_speculative_tokens,
    possible_token_counts,
)
from aerie.tuning.decision.evaluation import CandidateEvaluation
from aerie.tuning.decision.forecast import Forecast
from aerie.tuning.decision.policy import TuningPolicy
from aerie.tuning.decision.types import CandidatePrediction, TuningAction, TuningContext, TuningDecision
from aerie.tuning.models.numeric import FloatArray
from aerie.tuning.telemetry import HOUR


@dataclass(frozen=True)
class ExplorationCanary:
    """A candidate for an exploration canary."""

    setting: SpeculationSetting
    value: float
    """Value of what it would teach, and below it its cost: shares of the capacity over the horizon."""
    cost: float

    @property
    def net_value(self) -> float:
        """Value less cost."""
        return self.value - self.cost

    @property
    def value_message(self) -> str:
        """Benefit of the canary, as part of a sentence."""
        return f"an exploration canary with {describe_setting(self.setting)} has an expected value of {100 * self.value:.1f} %"


CANNOT_PROBE_REASON: Final = "CannotProbe"
"""Speculation is off, or would be, and no canary can measure whether it should come back."""


def probe_blocked_message(context: TuningContext, policy: TuningPolicy) -> str:
    """Return why no canary could ever measure acceptance again, with the fix, as the end of a sentence; empty if one could."""
    if context.borrowed_replicas == 0 or context.replicas >= policy.min_replicas:
        return ""
    return (
        f"no canary could measure acceptance again: {context.replicas} of the {policy.min_replicas} replicas needed to spare one "
        "are there. Set spec.rollout.canary.capacity: Surge, or spec.speculation.numSpeculativeTokens: 0 to turn speculation off "
        "permanently."
    )


def decide_while_off(context: TuningContext, policy: TuningPolicy) -> TuningDecision:
    """Return the decision while speculation is off, when nothing measures the gain from drafts."""
    speculated_at = context.history.last_drafted_at
    setting = Static(min(3, max(context.max_speculative_tokens, 1)))
    if speculated_at is not None and context.now < speculated_at + policy.probe_interval_seconds:
        hours = (speculated_at + policy.probe_interval_seconds - context.now) / HOUR
        return TuningDecision(
            TuningAction.HOLD, f"speculation is off; the next canary that measures acceptance is possible in {hours:.1f} h."
        )
    if probe_blocked := probe_blocked_message(context, policy):
        return TuningDecision(TuningAction.HOLD, f"speculation is off, and {probe_blocked}", blocked_reason=CANNOT_PROBE_REASON)
    if context.is_in_backoff(setting):
        reason = f"speculation is off, and {describe_setting(setting)} is in backoff, because its trials failed."
        return TuningDecision(TuningAction.HOLD, reason, setting)
    if pause_reason := context.history.change_pause_reason(context.now, policy):
        reason = f"speculation is off, and no canary measures acceptance yet: {pause_reason}"
        return TuningDecision(TuningAction.HOLD, reason, setting)
    if queue_reason := _queue_reason(context):
        return TuningDecision(
            TuningAction.HOLD,
            f"speculation is off, and no canary measures acceptance: {queue_reason}",
            blocked_reason=CANNOT_PROBE_REASON,
        )
    reason = f"speculation is off, so acceptance is not measured: one canary with {describe_setting(setting)} measures it."
    return TuningDecision(TuningAction.EXPLORE, reason, setting)


def decide_exploration(evaluation: CandidateEvaluation, best: CandidatePrediction, pause_reason: str | None) -> TuningDecision:
    """Return the decision to hold, or to explore with one canary.

    `pause_reason`: why the setting may not change yet; None if it may.
    """
    current = evaluation.context.current_setting
    reason = f"{describe_setting(current)} stays: "
    if best.setting == current:
        reason += "no other setting is better with enough certainty."
    else:
        reason += f"{describe_setting(best.setting)} is not better with enough certainty ({best.gain_text})."
    canary = select_canary(evaluation)
    if canary is None:
        return TuningDecision(TuningAction.HOLD, reason)
    hold = TuningDecision(TuningAction.HOLD, reason, exploration_value=canary.value, exploration_cost=canary.cost)
    if canary.net_value < evaluation.policy.min_exploration_value:
        return hold
    benefit = f"{_capitalize(canary.value_message)} and costs {100 * canary.cost:.2f} %"
    if blocked_reason := pause_reason or exploration_blocked_reason(evaluation, canary):
        return replace(hold, reason=f"{reason} {benefit}, but {blocked_reason}")
    return replace(hold, action=TuningAction.EXPLORE, reason=f"{reason} {benefit}.", setting=canary.setting)


def select_canary(evaluation: CandidateEvaluation, pending_gain: float = 0.0) -> ExplorationCanary | None:
    """Return the canary with the highest net value; None if no canary would be informative.

    `pending_gain`: a gain that is available without a canary, and that the canary has to exceed.
    """
    canaries = [
        _evaluate_canary(evaluation, setting, pending_gain)
        for setting in evaluation.gains
        if _is_informative(setting, evaluation)
    ]
    best = max(canaries, key=lambda canary: canary.net_value, default=None)
    return None if best is None else replace(best, setting=evaluation.bound_to_observed_load(best.setting))


def exploration_blocked_reason(evaluation: CandidateEvaluation, canary: ExplorationCanary) -> str | None:
    """Return why no canary may explore now; None if one may."""
    context, policy = evaluation.context, evaluation.policy
    if context.explored_setting is not None:
        return "an exploration is running."
    urgent = canary.net_value >= policy.urgent_exploration_value
    queue_context = replace(context, queued_requests=0.0) if urgent else context
    untested = _is_untested_direction(evaluation, canary.setting)
    pause_reason = context.history.exploration_pause_reason(context.now, policy, urgent=urgent, untested_direction=untested)
    if reason := pause_reason or _no_spare_replica_reason(queue_context, policy):
        return reason
    if evaluation.slowdown > policy.max_slowdown() and not urgent:
        longer = f"{100 * evaluation.slowdown:.0f} % longer" if math.isfinite(evaluation.slowdown) else "too long"
        return (
            f"while {context.borrowed_replicas} of {context.replicas} replicas load, each token would take {longer}: "
            "it waits for a lower load."
        )
    if evaluation.is_drafter_ineffective:
        return "almost no draft is accepted, so more drafts would show nothing."
    objective = context.objectives.time_per_output_token
    token_seconds = evaluation.prediction_for(context.current_setting).latencies.time_per_output_token[0]
    if objective is not None and token_seconds > (1 - policy.slo_headroom) * objective:
        return "the time per output token is too close to its objective."
    return None


def _is_untested_direction(evaluation: CandidateEvaluation, setting: SpeculationSetting) -> bool:
    """Return whether the setting drafts more tokens than the current one and no measured setting does; or fewer, likewise."""
    current_k = max_speculative_tokens(evaluation.context.current_setting)
    direction = max_speculative_tokens(setting) - current_k
    return direction != 0 and not any(direction * (tokens - current_k) > 0 for tokens in evaluation.measured_token_counts)


def _no_spare_replica_reason(context: TuningContext, policy: TuningPolicy) -> str | None:
    """Return why no replica can be spared for a canary; None if one can."""
    if context.replicas < policy.min_replicas:
        return f"there are {context.replicas} replicas, and {policy.min_replicas} are needed to spare one."
    return _queue_reason(context)


def _queue_reason(context: TuningContext) -> str | None:
    """Return why the queues rule out a canary; None if they do not."""
    if context.queued_requests > context.replicas:  # one request a replica may have arrived since the last step
        return f"{context.queued_requests:.0f} requests are queued."
    return None


def _is_informative(setting: SpeculationSetting, evaluation: CandidateEvaluation) -> bool:
    """Return whether a canary at the setting would measure a new number of draft tokens, and would probably keep the
    objectives meanwhile."""
    if not isinstance(setting, Static | Schedule) or possible_token_counts(setting) <= evaluation.measured_token_counts:
        return False
    if evaluation.context.is_in_backoff(setting) or evaluation.context.has_backoff_with_tokens(max_speculative_tokens(setting)):
        return False
    return (
        evaluation.prediction_for(setting).latencies.probability_no_worse
        >= evaluation.policy.min_exploration_objective_probability
    )


def _evaluate_canary(evaluation: CandidateEvaluation, setting: SpeculationSetting, pending_gain: float) -> ExplorationCanary:
    """Return the value and cost of a canary at a setting. `pending_gain`: a gain that the canary delays, and has to exceed."""
    policy = evaluation.policy
    gains = np.stack(list(evaluation.gains.values()), axis=1)
    observables = _canary_observables(evaluation.forecast, setting)
    expected = observables @ np.linalg.lstsq(observables, gains, rcond=None)[0]
    residual_sd = (gains - expected).std(axis=0)
    normal = statistics.NormalDist()
    pessimistic = expected + normal.inv_cdf(policy.pessimistic_quantile) * residual_sd
    is_proposed = (
        (expected >= evaluation.required_median_gain)
        & (pessimistic >= evaluation.required_pessimistic_gain)
        & (expected >= normal.inv_cdf(policy.min_probability_better) * residual_sd)
    )
    value = float(np.where(is_proposed, expected, 0.0).max(axis=1).mean()) - pending_gain
    share = 1 / max(evaluation.context.replicas, 1)
    loss = max(0.0, -float(evaluation.gains[setting].mean()))
    cost = (
        share * (2 * policy.reload_seconds + policy.exploration_seconds * loss) + 2 * policy.exploration_seconds * pending_gain
    ) / policy.horizon_seconds
    cost += evaluation.context.surge_share * (policy.reload_seconds + policy.exploration_seconds) / policy.surge_payback_seconds
    return ExplorationCanary(setting, value, cost)


def _canary_observables(forecast: Forecast, setting: SpeculationSetting) -> FloatArray:
    """Return what a canary measures, by draw: a user's seconds at the lowest, middle and highest batch, and acceptance."""
    seconds = forecast.token_seconds(setting)
    batches = seconds.shape[1]
    columns = [np.log(seconds[:, index]) for index in sorted({0, batches // 2, batches - 1})]
    table = np.stack([*columns, forecast.acceptance_lengths[:, max_speculative_tokens(setting)]], axis=1)
    table = table - table.mean(axis=0)
    regressors: FloatArray = np.concatenate([np.ones((len(table), 1)), table, table**2], axis=1)
    return regressors


def _capitalize(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
