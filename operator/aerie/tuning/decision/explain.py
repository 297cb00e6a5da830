"""Explain a decision to an operator of the fleet: the action, its evidence, and why not another setting.

The explanation is plain text of up to 120 columns. The same decision gives the same text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from aerie.engine.speculation import SpeculationSetting, describe_setting
from aerie.tuning.decision.policy import TuningPolicy
from aerie.tuning.decision.types import CandidatePrediction, TuningAction, TuningContext, TuningDecision
from aerie.tuning.models.acceptance import AcceptanceModel
from aerie.tuning.models.change_points import ChangePoint
from aerie.tuning.models.numeric import quantiles
from aerie.tuning.models.step_time import StepTimeModel
from aerie.tuning.telemetry import HOUR, TuningTelemetry

_LINE_WIDTH = 120
_SETTING_COLUMN_WIDTH = 29
_EVIDENCE_INDENT = 15 * " "


def explain_decision(decision: TuningDecision, telemetry: TuningTelemetry, context: TuningContext, policy: TuningPolicy) -> str:
    """Return the whole explanation of a decision."""
    parts = [
        _summary(decision),
        _missing_data(decision, telemetry),
        _evidence(decision, telemetry),
        _candidate_table(decision, context, policy),
        _excluded_candidates(decision),
        _limitations(decision),
    ]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part))) + "\n"


def _summary(decision: TuningDecision) -> Iterator[str]:
    yield {
        TuningAction.HOLD: "HOLD",
        TuningAction.CHANGE: f"CHANGE to {describe_setting(decision.setting)}" if decision.setting else "CHANGE",
        TuningAction.EXPLORE: f"EXPLORE: one canary with {describe_setting(decision.setting)}" if decision.setting else "EXPLORE",
        TuningAction.INSUFFICIENT: "INSUFFICIENT DATA: nothing is recommended",
    }[decision.action]
    yield from _wrap_lines(_capitalize(decision.reason))
    if decision.action is TuningAction.CHANGE:
        yield from _wrap_lines("Prove it on a canary before it is rolled out: this is a forecast from metrics.")


def _missing_data(decision: TuningDecision, telemetry: TuningTelemetry) -> Iterator[str]:
    if decision.missing_data and decision.action is not TuningAction.INSUFFICIENT:
        yield "Unknown from the metrics"
        for message in decision.missing_data:
            yield from _wrap_lines(_capitalize(message), "  - ")
    if telemetry.excluded_windows:
        yield "Windows excluded from the step times"
        for message, count in telemetry.excluded_windows.most_common(6):
            yield from _wrap_lines(f"{count}: {message}", "  - ")


def _evidence(decision: TuningDecision, telemetry: TuningTelemetry) -> Iterator[str]:
    evidence = decision.evidence
    if evidence.acceptance is None and evidence.step_time is None:
        return
    yield "Evidence"
    if (forecast := evidence.forecast) is not None:
        low, median, high = (forecast.load.quantile(share) for share in (0.05, 0.5, 0.95))
        yield f"  load         batch {low:.0f} / {median:.0f} / {high:.0f} (5 %, half, 95 % of the request-steps)"
        yield from _change_point_lines(evidence.change_points.load, telemetry)
    if evidence.acceptance is not None:
        yield from _acceptance_lines(evidence.acceptance, evidence.change_points.acceptance, telemetry)
    if evidence.step_time is not None:
        yield from _step_time_lines(evidence.step_time, telemetry)


def _acceptance_lines(acceptance: AcceptanceModel, change: ChangePoint | None, telemetry: TuningTelemetry) -> Iterator[str]:
    block_seconds, count = telemetry.scale.block_seconds, acceptance.block_count
    hours = count * block_seconds / HOUR
    length = f"{block_seconds / 60:.0f} minutes" if block_seconds >= 120 else f"{block_seconds:.0f} s"
    yield f"  acceptance   {_format_count(acceptance.draft_count)} drafts in {count} blocks of {length} ({hours:.1f} h)"
    yield from _change_point_lines(change, telemetry)
    positions = []
    for position in range(acceptance.survival.shape[1]):
        low, median, high = quantiles(acceptance.survival[:, position], 0.05, 0.5, 0.95)
        marker = "" if position < acceptance.observed_positions else "*"
        positions.append(f"S{position + 1}{marker} {median:.3f} ({low:.3f}-{high:.3f})")
    yield from _wrap_lines("  ".join(positions), _EVIDENCE_INDENT)
    if acceptance.observed_positions < acceptance.survival.shape[1]:
        yield f"{_EVIDENCE_INDENT}* not drafted so far: extrapolated from the last position"


def _step_time_lines(step_time: StepTimeModel, telemetry: TuningTelemetry) -> Iterator[str]:
    low, median, high = step_time.draft_step_share
    windows, replicas = step_time.window_count, step_time.replica_count
    yield f"  step time    {windows} windows of {replicas} replicas, dispersion {100 * step_time.residual_sd:.1f} %"
    yield (
        f"{_EVIDENCE_INDENT}an empty step {1000 * step_time.floor_seconds:.1f} ms; "
        f"a verified token {1e6 * step_time.verified_token_seconds:.0f} us; "
        f"a draft step {100 * median:.0f} % of a step ({100 * low:.0f}-{100 * high:.0f})"
    )
    settings = sorted({str(key.setting) for key in telemetry.cells})
    yield f"{_EVIDENCE_INDENT}measured at K = {', '.join(settings)}" + (
        ": the cost of a draft step is taken from the prior" if len(settings) == 1 else ""
    )
    if step_time.max_captured_tokens is not None:
        yield f"{_EVIDENCE_INDENT}graphs are captured up to {step_time.max_captured_tokens} tokens a step"


def _change_point_lines(change: ChangePoint | None, telemetry: TuningTelemetry) -> Iterator[str]:
    """Yield the change and the number of blocks that are excluded because they precede it."""
    if change is None or telemetry.newest_window_end is None:
        return
    excluded = sum(block.start < change.timestamp for block in telemetry.blocks())
    hours = max(0.0, telemetry.newest_window_end - change.timestamp) / HOUR
    yield from _wrap_lines(
        f"since {hours:.1f} h ago: {change.description}; {excluded} blocks before it are excluded", _EVIDENCE_INDENT
    )


def _candidate_table(decision: TuningDecision, context: TuningContext, policy: TuningPolicy) -> Iterator[str]:
    if not decision.predictions:
        return
    objectives = context.objectives
    has_objectives = objectives.time_per_output_token is not None or objectives.time_to_first_token is not None
    yield "Candidates, the best pessimistic gain first (gain: speed of tokens at the same requests)"
    slo = f" {'SLO':>6}" if has_objectives else ""
    yield (
        f"  {'setting':<{_SETTING_COLUMN_WIDTH}} {'gain':>8} {'90 % interval':>18} {'P(better)':>10} {'AL':>6} "
        f"{f'TPOT p{objectives.percentile}':>10}{slo}  rejection reason"
    )
    for prediction in decision.predictions:
        yield from _candidate_row(prediction, context.current_setting, has_objectives)
    median_gain = 100 * policy.required_median_gain(context.surge_share)
    pessimistic_gain = 100 * policy.required_pessimistic_gain(context.surge_share)
    yield (
        f"  A trial needs a median gain of {median_gain:.1f} %, and {pessimistic_gain:.1f} % with a probability of 80 %: "
        "its canary has to prove the rest."
    )
    is_extrapolated = any(prediction.worst_extrapolated_gain is not None for prediction in decision.predictions)
    extrapolation = ", and at the lowest and highest expected load" if is_extrapolated else ""
    max_loss = f"{100 * policy.max_worst_fifth_loss:.0f} %"
    yield f"  It may lose at most {max_loss} against the current setting in each fifth of the load{extrapolation}."
    if has_objectives:
        yield f"  The objectives have to be met with a probability of {100 * policy.min_objective_probability:.0f} %."
    if objectives.time_per_output_token is not None:
        yield "  At the largest load, that of time per output token has to be met too, unless the time is not longer than now."
    if decision.exploration_value > 0:
        yield (
            f"  The best exploration canary has an expected value of {100 * decision.exploration_value:.1f} % and costs "
            f"{100 * decision.exploration_cost:.2f} % of the fleet's day."
        )


def _candidate_row(prediction: CandidatePrediction, current: SpeculationSetting, has_objectives: bool) -> Iterator[str]:
    low, _, median, high = prediction.gain
    interval = f"{100 * low:+.1f} to {100 * high:+.1f} %"
    gain, better = f"{100 * median:+.1f} %", f"{100 * prediction.probability_better:.0f} %"
    note = prediction.rejection_reason
    if prediction.setting == current:
        gain, interval, better, note = "now", "", "", ""
    seconds = f"{1000 * prediction.latencies.time_per_output_token[0]:.1f} ms"
    slo = f" {100 * prediction.latencies.probability_met:>4.0f} %" if has_objectives else ""
    name = describe_setting(prediction.setting)
    if len(name) > _SETTING_COLUMN_WIDTH:
        yield f"  {name}"
        name = ""
    length = f"{prediction.acceptance_length:.2f}"
    columns = f"  {name:<{_SETTING_COLUMN_WIDTH}} {gain:>8} {interval:>18} {better:>10} {length:>6} {seconds:>10}"
    yield f"{columns}{slo}  {note}".rstrip()


def _excluded_candidates(decision: TuningDecision) -> Iterator[str]:
    if decision.excluded_candidates:
        yield "Not supported by this engine"
        for candidate in decision.excluded_candidates:
            yield from _wrap_lines(f"{candidate.label}: {candidate.reason}", "  - ")


def _limitations(decision: TuningDecision) -> Iterator[str]:
    if decision.evidence.forecast is None:
        return
    yield "Limitations"
    yield from _wrap_lines(
        "Not modelled: the cost of long contexts apart from the batch, a load unlike the observed one, other traffic.", "  "
    )


def decision_to_json(decision: TuningDecision) -> dict[str, object]:
    """Return the decision as a JSON object."""
    return {
        "action": decision.action.value,
        "reason": decision.reason,
        "setting": None if decision.setting is None else str(decision.setting),
        "missingData": list(decision.missing_data),
        "changePoints": {
            name: None if change is None else {"time": change.timestamp, "description": change.description}
            for name, change in (
                ("acceptance", decision.evidence.change_points.acceptance),
                ("load", decision.evidence.change_points.load),
            )
        },
        "exploration": {"value": round(decision.exploration_value, 5), "cost": round(decision.exploration_cost, 5)},
        "candidates": [
            {
                "setting": str(prediction.setting),
                "gain": dict(zip(("p5", "p20", "p50", "p95"), (round(gain, 5) for gain in prediction.gain), strict=True)),
                "probabilityBetter": round(prediction.probability_better, 4),
                "worstFifthGain": round(prediction.worst_fifth_gain, 5),
                "worstExtrapolatedGain": None
                if prediction.worst_extrapolated_gain is None
                else round(prediction.worst_extrapolated_gain, 5),
                "acceptanceLength": round(prediction.acceptance_length, 4),
                "timePerOutputToken": round(prediction.latencies.time_per_output_token[0], 6),
                "probabilityObjectivesMet": round(prediction.latencies.probability_met, 4),
                "rejectionReason": prediction.rejection_reason,
            }
            for prediction in decision.predictions
        ],
        "excludedCandidates": [
            {"setting": candidate.label, "reason": candidate.reason} for candidate in decision.excluded_candidates
        ],
    }


def _format_count(number: float) -> str:
    power = int(math.log10(max(number, 1)) // 3)
    return f"{number / 1000**power:.{1 if power else 0}f}{('', 'k', 'M', 'G', 'T')[min(power, 4)]}"


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _wrap_lines(text: str, indent: str = "") -> Iterator[str]:
    """Yield lines of at most `_LINE_WIDTH` columns; continuation lines align with the text of the first."""
    line, continuation = indent, " " * len(indent)
    for word in text.split(" "):
        if len(line) + len(word) > _LINE_WIDTH and line.strip():
            yield line.rstrip()
            line = continuation
        line += word + " "
    yield line.rstrip()
