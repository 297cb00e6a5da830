"""What one canary would teach, weighed against what it costs, and when none may be spared.

    value(K') = E[ max_c E[gain_c | what a canary at K' shows], of those c that could then be proposed, or 0 ]

the expected value of partial information, with the inner expectation by regression over the draws (Strong, Oakley and Brennan
2014), and its residuals for what would stay uncertain.

Guarantees: pure; none explores at the users' cost, but where it is the way out. Where the engine runs schedules, it explores
more draft tokens only at the batches that were seen, and runs the current setting beyond them: what a step costs there nobody
knows, and an engine whose steps turn out too slow takes more requests in, which makes them slower still.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

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
    """A canary that might explore."""

    setting: SpeculationSetting
    value: float
    """What it would teach, and what it costs: shares of the capacity over the horizon."""
    cost: float

    @property
    def net_value(self) -> float:
        return self.value - self.cost

    @property
    def value_message(self) -> str:
        return f"a canary with {describe_setting(self.setting)} would teach what is worth {100 * self.value:.1f} %"


CANNOT_PROBE_REASON = "CannotProbe"
"""Speculation is off, or would be, and no canary can ask whether it should come back."""


def probe_blocked_message(context: TuningContext, policy: TuningPolicy) -> str:
    """Why no canary could ever ask for acceptance again, with the way out, as the end of a sentence; empty where one could."""
    if context.borrowed_replicas == 0 or context.replicas >= policy.least_replicas:
        return ""
    return (
        f"no canary could ask for acceptance again: there are {context.replicas} replicas, and {policy.least_replicas} are "
        "needed to spare one. Write spec.rollout.canary.capacity: Surge, or spec.speculation.tokens: 0 to turn it off for good."
    )


def decide_while_off(context: TuningContext, policy: TuningPolicy) -> TuningDecision:
    """Speculation is off, and nothing tells what drafts would be worth."""
    since = context.history.speculated
    setting = Static(min(3, max(context.max_speculative_tokens, 1)))
    if since is not None and context.now < since + policy.probe:
        left = (since + policy.probe - context.now) / HOUR
        return TuningDecision(TuningAction.HOLD, f"speculation is off, and acceptance is asked for again in {left:.1f} h.")
    if never := probe_blocked_message(context, policy):
        return TuningDecision(TuningAction.HOLD, f"speculation is off, and {never}", blocked_reason=CANNOT_PROBE_REASON)
    if context.is_in_backoff(setting):
        why = f"speculation is off, and {describe_setting(setting)} is not tried again yet: its trials have failed."
        return TuningDecision(TuningAction.HOLD, why, setting)
    if cooling := context.history.change_pause_reason(context.now, policy):
        return TuningDecision(TuningAction.HOLD, f"speculation is off, and no canary asks for acceptance yet: {cooling}", setting)
    if reason := _queue_reason(context):
        return TuningDecision(
            TuningAction.HOLD,
            f"speculation is off, and no canary asks for acceptance: {reason}",
            blocked_reason=CANNOT_PROBE_REASON,
        )
    reason = f"speculation is off, so nothing tells acceptance: one canary with {describe_setting(setting)} asks again."
    return TuningDecision(TuningAction.EXPLORE, reason, setting)


def decide_exploration(evaluation: CandidateEvaluation, best: CandidatePrediction, pause_reason: str | None) -> TuningDecision:
    """Hold, or one canary."""
    current = evaluation.context.current_setting
    held = f"{describe_setting(current)} stays: "
    if best.setting == current:
        held += "nothing else is surely better."
    else:
        held += f"{describe_setting(best.setting)} is not surely enough better ({best.gain_text})."
    asked = select_canary(evaluation)
    if asked is None:
        return TuningDecision(TuningAction.HOLD, held)
    found = TuningDecision(TuningAction.HOLD, held, exploration_value=asked.value, exploration_cost=asked.cost)
    if asked.net_value < evaluation.policy.least_value:
        return found
    teaches = f"{_capitalize(asked.value_message)} and cost {100 * asked.cost:.2f} %"
    if reason := pause_reason or exploration_blocked_reason(evaluation, asked):
        return replace(found, reason=f"{held} {teaches}, but {reason}")
    return replace(found, action=TuningAction.EXPLORE, reason=f"{held} {teaches}.", setting=asked.setting)


def select_canary(evaluation: CandidateEvaluation, pending_gain: float = 0.0) -> ExplorationCanary | None:
    """The one that teaches the most for its cost, beyond a gain that could be had without any."""
    worth = [
        _evaluate_canary(evaluation, setting, pending_gain)
        for setting in evaluation.gains
        if _is_informative(setting, evaluation)
    ]
    best = max(worth, key=lambda one: one.net_value, default=None)
    return None if best is None else replace(best, setting=evaluation.bound_to_observed_load(best.setting))


def exploration_blocked_reason(evaluation: CandidateEvaluation, canary: ExplorationCanary) -> str | None:
    """Why no canary may explore now."""
    situation, policy = evaluation.context, evaluation.policy
    if situation.explored_setting is not None:
        return "one explores already."
    urgent = canary.net_value >= policy.urgent
    spare = replace(situation, queued_requests=0.0) if urgent else situation
    other_side = _is_untested_direction(evaluation, canary.setting)
    pause = situation.history.exploration_pause_reason(situation.now, policy, urgent=urgent, untested_direction=other_side)
    if reason := pause or _no_spare_replica_reason(spare, policy):
        return reason
    if evaluation.slowdown > policy.max_slowdown() and not urgent:
        longer = f"{100 * evaluation.slowdown:.0f} % longer" if math.isfinite(evaluation.slowdown) else "too long"
        return f"while {situation.borrowed_replicas} of {situation.replicas} replicas load, each token would take {longer}: at a quieter hour."
    if evaluation.is_drafter_ineffective:
        return "hardly a draft is accepted, so there is nothing to be learnt from more."
    limit = situation.objectives.time_per_output_token
    now = evaluation.prediction_for(situation.current_setting).latencies.time_per_output_token[0]
    if limit is not None and now > (1 - policy.slo_headroom) * limit:
        return "the time per output token is too near its objective."
    return None


def _is_untested_direction(options: CandidateEvaluation, setting: SpeculationSetting) -> bool:
    """Whether it drafts more than the current setting and nothing was measured that does, or less likewise."""
    now = max_speculative_tokens(options.context.current_setting)
    side = max_speculative_tokens(setting) - now
    return side != 0 and not any(side * (tokens - now) > 0 for tokens in options.measured_token_counts)


def _no_spare_replica_reason(situation: TuningContext, policy: TuningPolicy) -> str | None:
    """Why no replica can be spared for exploring."""
    if situation.replicas < policy.least_replicas:
        return f"there are {situation.replicas} replicas, and {policy.least_replicas} are needed to spare one."
    return _queue_reason(situation)


def _queue_reason(situation: TuningContext) -> str | None:
    if situation.queued_requests > situation.replicas:  # one each may have come since the last step
        return f"{situation.queued_requests:.0f} requests wait in the queues."
    return None


def _is_informative(setting: SpeculationSetting, options: CandidateEvaluation) -> bool:
    """Whether a canary at the setting would show what no window has shown yet, and is likely to keep the objectives meanwhile."""
    if not isinstance(setting, Static | Schedule) or possible_token_counts(setting) <= options.measured_token_counts:
        return False
    if options.context.is_in_backoff(setting) or options.context.has_backoff_with_tokens(max_speculative_tokens(setting)):
        return False
    return options.prediction_for(setting).latencies.probability_no_worse >= options.policy.explores


def _evaluate_canary(options: CandidateEvaluation, setting: SpeculationSetting, known: float) -> ExplorationCanary:
    """Of a canary at a setting; `known`: a gain that waits for it, and that it has to add to."""
    policy = options.policy
    gains = np.stack(list(options.gains.values()), axis=1)
    shown = _canary_observables(options.forecast, setting)
    expected = shown @ np.linalg.lstsq(shown, gains, rcond=None)[0]
    left = (gains - expected).std(axis=0)
    normal = statistics.NormalDist()
    pessimistic = expected + normal.inv_cdf(policy.pessimism) * left
    acts = (
        (expected >= options.required_median_gain)
        & (pessimistic >= options.required_pessimistic_gain)
        & (expected >= normal.inv_cdf(policy.better) * left)
    )
    value = float(np.where(acts, expected, 0.0).max(axis=1).mean()) - known
    share = 1 / max(options.context.replicas, 1)
    loss = max(0.0, -float(options.gains[setting].mean()))
    cost = (share * (2 * policy.reload + policy.canary * loss) + 2 * policy.canary * known) / policy.horizon
    cost += options.context.surge_share * (policy.reload + policy.canary) / policy.payback
    return ExplorationCanary(setting, value, cost)


def _canary_observables(drawn: Forecast, setting: SpeculationSetting) -> FloatArray:
    """What a canary shows: a user's seconds at the least, the middle and the largest batch, and acceptance. By draw."""
    seconds = drawn.token_seconds(setting)
    batches = seconds.shape[1]
    shown = [np.log(seconds[:, index]) for index in sorted({0, batches // 2, batches - 1})]
    table = np.stack([*shown, drawn.acceptance_lengths[:, max_speculative_tokens(setting)]], axis=1)
    table = table - table.mean(axis=0)
    found: FloatArray = np.concatenate([np.ones((len(table), 1)), table, table**2], axis=1)
    return found


def _capitalize(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
