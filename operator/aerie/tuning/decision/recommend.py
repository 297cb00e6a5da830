"""From telemetry to a decision: hold, change the setting, or explore with one canary.

The rule: of the candidates whose latencies hold with `certainty`, the one with the best pessimistic gain; it is proposed if its
gain passes the gate more likely than not, the pessimistic one pays for the roll, and it is surely enough better: the canary of
the change proves the rest. Else, and before that, what one canary would teach is weighed against what it costs (`exploring`).
Nothing is proposed without evidence, during a cooldown, or where an objective is broken and the change does not cure it. Windows
of the current setting that end long before now are no evidence: the metrics are lost, or somebody set the engines to something
else.

Guarantees: pure and deterministic in telemetry, situation, policy and seed. Not guaranteed: that the forecast is right. The
caller proves a change on a canary before it is made.
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
from aerie.tuning.decision.forecast import LoadExtrapolation, build_forecast, estimate_load, extrapolate_load
from aerie.tuning.decision.objectives import load_slowdown
from aerie.tuning.decision.policy import FailedTrial, LatencyObjectives, TrialHistory, TuningPolicy
from aerie.tuning.decision.types import CandidatePrediction, DecisionEvidence, TuningAction, TuningContext, TuningDecision
from aerie.tuning.models.acceptance import AcceptanceModel, fit_acceptance
from aerie.tuning.models.change_points import ChangePoints, detect_change_points, is_day_covered, summarize_block_loads
from aerie.tuning.models.step_time import StepTimeModel, fit_step_time
from aerie.tuning.telemetry import HOUR, TelemetryBlock, TuningTelemetry

MAX_STALE_BLOCKS = 12
"""After so many blocks without a window of the current setting nothing is decided."""


def decide_setting(telemetry: TuningTelemetry, context: TuningContext, policy: TuningPolicy, seed: int) -> TuningDecision:
    """The decision on what is known now."""
    random = np.random.default_rng(seed)
    blocks = list(telemetry.blocks())
    since = detect_change_points(blocks)
    context = replace(
        context, history=_current_history(context.history, since), failed_trials=_current_failures(context.failed_trials, since)
    )
    step_time = fit_step_time(telemetry.cells, context.engine.max_captured_tokens, is_moe=context.engine.is_moe)
    lengths = fit_acceptance(since.acceptance_blocks(blocks), max(context.max_speculative_tokens, 1), policy.draws, random)
    stale = _stale_telemetry_message(blocks, telemetry, context)
    missing = tuple(filter(None, (stale, *(one.message for one in (lengths, step_time) if isinstance(one, Unknown)))))
    if isinstance(lengths, Unknown) or isinstance(step_time, Unknown) or stale is not None:
        evidence = DecisionEvidence(
            None if isinstance(lengths, Unknown) else lengths,
            None if isinstance(step_time, Unknown) else step_time,
            change_points=since,
        )
        if isinstance(context.current_setting, Off) and isinstance(lengths, Unknown) and stale is None:
            return replace(decide_while_off(context, policy), missing_data=missing, evidence=evidence)
        missing = (*missing, *_exclusion_messages(telemetry))
        return TuningDecision(TuningAction.INSUFFICIENT, " ".join(missing), missing_data=missing, evidence=evidence)
    room = float(context.engine.arguments.max_num_seqs or math.inf)
    drawn = build_forecast(
        estimate_load(telemetry.cells, blocks, since), lengths, step_time, context.max_speculative_tokens, random, room
    )
    beyond = None
    if not is_day_covered(since.load_blocks(blocks), telemetry.horizon):
        before = estimate_load(telemetry.cells, blocks) if is_day_covered(blocks, telemetry.horizon) else drawn.load
        may_come = extrapolate_load(drawn.load, before)
        beyond = LoadExtrapolation(
            *(build_forecast(each, lengths, step_time, context.max_speculative_tokens, random, room) for each in may_come)
        )
    allowed = build_candidates(context.engine, context.max_speculative_tokens, drawn.load.pairs)
    recent = since.load_blocks(since.acceptance_blocks(blocks))
    options = CandidateEvaluation.evaluate(drawn, beyond, allowed, telemetry, recent, context, policy)
    decision = _choose_action(replace(options, slowdown=_lending_slowdown(recent, step_time, lengths, context)))
    return replace(decision, excluded_candidates=allowed.excluded, evidence=DecisionEvidence(lengths, step_time, drawn, since))


def _stale_telemetry_message(
    blocks: Sequence[TelemetryBlock], telemetry: TuningTelemetry, situation: TuningContext
) -> str | None:
    """Why the windows tell nothing of the setting that runs now."""
    current, block = situation.current_setting, telemetry.scale.block
    ends = [one.start + block for one in blocks if one.setting == current]
    if not ends:
        return f"no window of {describe_setting(current)} was counted, which is what the engines are set to."
    if situation.now - ends[-1] <= MAX_STALE_BLOCKS * block:
        return None
    ago = (situation.now - ends[-1]) / HOUR
    return f"the newest windows of {describe_setting(current)} ended {ago:.1f} h ago: no traffic, no metrics, or another setting runs."


def _current_history(history: TrialHistory, since: ChangePoints) -> TrialHistory:
    """Without what was of other traffic: what a canary has taught, and that a setting was not proven, or was taken back."""
    if since.acceptance is not None:
        history = replace(history, explored=tuple(one for one in history.explored if one >= since.acceptance.timestamp))
    ended = max(history.rolled_back or 0.0, history.undecided or 0.0)
    if not history.failed and (history.tried or ended) < (since.newest_timestamp or 0.0):
        history = replace(history, rolled_back=None, undecided=None, undecided_times=1)
    return history


def _current_failures(failed: tuple[FailedTrial, ...], since: ChangePoints) -> tuple[FailedTrial, ...]:
    """Without what was found worse on other traffic."""
    return tuple(one for one in failed if not one.measured or one.began >= (since.newest_timestamp or 0.0))


def _lending_slowdown(
    recent: Sequence[TelemetryBlock], step_time: StepTimeModel, lengths: AcceptanceModel, situation: TuningContext
) -> float:
    """At the largest load of the last hour."""
    left = situation.replicas - situation.borrowed_replicas
    last = [row.batch for row in summarize_block_loads(recent) if row.start >= situation.now - HOUR]
    if not situation.borrowed_replicas or not last:
        return 0.0
    if left <= 0:
        return math.inf
    middle = lengths.lengths.mean(axis=0)
    return load_slowdown(step_time, middle, situation.current_setting, max(last), situation.replicas / left)


def _exclusion_messages(telemetry: TuningTelemetry) -> tuple[str, ...]:
    """What most of the windows lack that could have told more."""
    if not telemetry.excluded_windows:
        return ()
    sentence, count = telemetry.excluded_windows.most_common(1)[0]
    return (f"{sum(telemetry.excluded_windows.values())} windows were left out, {count} of them for this: {sentence}",)


# --------------------------------------------------------------------------------------------------------------- choosing
def _choose_action(options: CandidateEvaluation) -> TuningDecision:
    situation, policy = options.context, options.policy
    best = _select_candidate(options)
    judged = tuple(_with_rejection_reason(one, best, options) for one in options.predictions)
    off = options.prediction_for(Off()) if Off() in options.gains else None
    cooling = situation.history.change_pause_reason(situation.now, policy)
    if (
        off is not None
        and off.setting != situation.current_setting
        and not situation.is_in_backoff(Off())
        and _is_speculation_harmful(off, options)
    ):
        if reason := probe_blocked_message(situation, policy):
            why = f"speculation loses on this load: without it the gain is {off.gain_text}. It stays all the same, for {reason}"
            return TuningDecision(TuningAction.HOLD, why, off.setting, judged, blocked_reason=CANNOT_PROBE_REASON)
        why = f"speculation loses on this load: without it the gain is {off.gain_text}."
        action = TuningAction.HOLD if cooling else TuningAction.CHANGE
        return TuningDecision(action, f"{why} But {cooling}" if cooling else why, off.setting, judged)
    if best.setting != situation.current_setting and _is_worth_trial(best, options):
        why = f"{describe_setting(best.setting)} is {best.gain_text} better than {describe_setting(situation.current_setting)}."
        if best.setting == situation.explored_setting:
            return TuningDecision(
                TuningAction.CHANGE, f"{why} The canary that explores with it may prove it.", best.setting, judged
            )
        if cooling:
            return TuningDecision(TuningAction.HOLD, f"{why} But {cooling}", best.setting, judged)
        asked = select_canary(options, pending_gain=float(options.gains[best.setting].mean()))
        if asked is not None and asked.net_value >= policy.least_value and exploration_blocked_reason(options, asked) is None:
            first = f"Before it is changed, {asked.value_message} more and cost {100 * asked.cost:.2f} %."
            return TuningDecision(
                TuningAction.EXPLORE,
                f"{why} {first}",
                asked.setting,
                judged,
                exploration_value=asked.value,
                exploration_cost=asked.cost,
            )
        if (lately := options.recent_gain(best.setting)) < policy.shown * options.required_median_gain:
            waits = f"At the load of the last hour that would be {100 * lately:+.1f} %: a canary waits for one at which it shows."
            return TuningDecision(TuningAction.HOLD, f"{why} {waits}", best.setting, judged)
        return TuningDecision(TuningAction.CHANGE, why, best.setting, judged)
    return replace(decide_exploration(options, best, cooling), predictions=judged)


def _select_candidate(options: CandidateEvaluation) -> CandidatePrediction:
    """The best of those whose latencies hold and that are no worse in any fifth of the load, nor in what may come of it; a fixed
    setting where the others are hardly better. The current one if none."""
    policy = options.policy
    current = options.prediction_for(options.context.current_setting)
    fit_for_users = [
        one
        for one in options.predictions
        if one.latencies.probability_met >= policy.certainty
        and not options.context.is_in_backoff(one.setting)
        and one.worst_fifth_gain >= -policy.worst_fifth
        and (one.worst_extrapolated_gain is None or one.worst_extrapolated_gain >= -policy.worst_fifth)
    ]
    fixed = [one for one in fit_for_users if isinstance(one.setting, Off | Static)]
    best = fit_for_users[0] if fit_for_users else current
    kept = next((one for one in fit_for_users if one.setting == options.context.explored_setting), None)
    if kept is not None and _is_worth_trial(kept, options) and kept.gain[1] >= best.gain[1] - policy.simpler:
        return kept
    changes = isinstance(best.setting, Schedule | Adaptive) and best.setting != current.setting
    if changes and fixed and best.gain[1] < fixed[0].gain[1] + policy.simpler:
        return fixed[0]
    return best


def _is_worth_trial(one: CandidatePrediction, options: CandidateEvaluation) -> bool:
    """Whether it is worth a canary of its own; or that the one which explores with it is kept until it is proven."""
    policy = options.policy
    if one.setting == options.context.explored_setting:
        return one.gain[2] >= options.required_pessimistic_gain and one.probability_better >= policy.better
    return (
        one.gain[2] >= options.required_median_gain
        and one.gain[1] >= options.required_pessimistic_gain
        and one.probability_better >= policy.better
    )


def _is_speculation_harmful(off: CandidatePrediction, options: CandidateEvaluation) -> bool:
    """Whether no speculation is the best, surely enough to turn it off."""
    if off.latencies.probability_met < options.policy.certainty and options.context.objectives != LatencyObjectives():
        return False
    if options.is_drafter_ineffective and off.probability_better >= 0.5:
        return True
    if off.worst_fifth_gain < -options.policy.worst_fifth or off.gain[2] < options.required_pessimistic_gain:
        return False
    drafting = [gain for setting, gain in options.gains.items() if not isinstance(setting, Off)]
    return float((options.gains[Off()] > np.max(drafting, axis=0)).mean()) >= options.policy.off_certainty


def _with_rejection_reason(
    one: CandidatePrediction, best: CandidatePrediction, options: CandidateEvaluation
) -> CandidatePrediction:
    """With the reason why it is not the choice."""
    policy = options.policy
    if one.setting == options.context.current_setting or (one.setting == best.setting and _is_worth_trial(best, options)):
        return one
    if options.context.is_in_backoff(one.setting):
        until = next(each.until for each in options.context.failed_trials if each.setting == one.setting)
        why = f"its trials have failed, and it may be tried again in {(until - options.context.now) / HOUR:.1f} h."
    elif one.latencies.probability_met < policy.certainty:
        why = f"the objectives hold with {100 * one.latencies.probability_met:.0f} %, not {100 * policy.certainty:.0f} %."
    elif one.probability_better < 0.5:
        why = "it is worse."
    elif one.worst_fifth_gain < -policy.worst_fifth:
        why = f"in a fifth of the load it loses {-100 * one.worst_fifth_gain:.1f} %, and {100 * policy.worst_fifth:.0f} % is the most."
    elif one.worst_extrapolated_gain is not None and one.worst_extrapolated_gain < -policy.worst_fifth:
        why = f"at the least or the most load that may come it loses {-100 * one.worst_extrapolated_gain:.1f} %: less than a day of it is known."
    elif one.probability_better < policy.better:
        why = f"it is better with {100 * one.probability_better:.0f} %, not {100 * policy.better:.0f} %."
    elif one.gain[2] < options.required_median_gain:
        why = f"its gain is {100 * one.gain[2]:.1f} %, and a change is made for {100 * options.required_median_gain:.1f} %."
    elif one.gain[1] < options.required_pessimistic_gain:
        why = f"with 80 % it gains {100 * one.gain[1]:.1f} % or more, and {100 * options.required_pessimistic_gain:.1f} % pays for the roll."
    else:
        why = f"{describe_setting(best.setting)} is better, or simpler and as good."
    return replace(one, rejection_reason=why)
