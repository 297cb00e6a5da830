"""A decision in words, for a person who runs the fleet: what to do, what it rests on, and why not something else.

Plain text of up to 120 columns; the same decision gives the same text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from aerie.engine.speculation import SpeculationSetting, describe_setting
from aerie.tuning.decision.policy import TuningPolicy
from aerie.tuning.decision.types import CandidatePrediction, TuningAction, TuningContext, TuningDecision
from aerie.tuning.models.change_points import ChangePoint
from aerie.tuning.models.numeric import quantiles
from aerie.tuning.telemetry import HOUR, TuningTelemetry

_LINE_WIDTH = 120
_SETTING_COLUMN_WIDTH = 29


def explain_decision(decision: TuningDecision, telemetry: TuningTelemetry, context: TuningContext, policy: TuningPolicy) -> str:
    """All of it."""
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
    head = {
        TuningAction.HOLD: "HOLD",
        TuningAction.CHANGE: f"CHANGE to {describe_setting(decision.setting)}" if decision.setting else "CHANGE",
        TuningAction.EXPLORE: f"EXPLORE: one canary with {describe_setting(decision.setting)}" if decision.setting else "EXPLORE",
        TuningAction.INSUFFICIENT: "INSUFFICIENT DATA: nothing is recommended",
    }[decision.action]
    yield head
    yield from _wrap_lines(_capitalize(decision.reason))
    if decision.action is TuningAction.CHANGE:
        yield from _wrap_lines("Prove it on a canary before it is rolled out: this is a forecast from metrics.")


def _missing_data(decision: TuningDecision, telemetry: TuningTelemetry) -> Iterator[str]:
    if decision.missing_data and decision.action is not TuningAction.INSUFFICIENT:
        yield "What the metrics do not tell"
        for sentence in decision.missing_data:
            yield from _wrap_lines(_capitalize(sentence), "  - ")
    if telemetry.excluded_windows:
        yield "Windows left out of the step times"
        for sentence, count in telemetry.excluded_windows.most_common(6):
            yield from _wrap_lines(f"{count}: {sentence}", "  - ")


def _evidence(decision: TuningDecision, telemetry: TuningTelemetry) -> Iterator[str]:
    known = decision.evidence
    if known.acceptance is None and known.step_time is None:
        return
    yield "What it rests on"
    if (drawn := known.forecast) is not None:
        low, middle, high = (drawn.load.quantile(share) for share in (0.05, 0.5, 0.95))
        yield f"  load         batch {low:.0f} / {middle:.0f} / {high:.0f} (5 %, half, 95 % of the request-steps)"
        yield from _change_point_lines(known.change_points.load, telemetry)
    if (accepted := known.acceptance) is not None:
        block = telemetry.scale.block
        hours = accepted.block_count * block / HOUR
        length = f"{block / 60:.0f} minutes" if block >= 120 else f"{block:.0f} s"
        yield f"  acceptance   {_format_count(accepted.draft_count)} drafts in {accepted.block_count} blocks of {length} ({hours:.1f} h)"
        yield from _change_point_lines(known.change_points.acceptance, telemetry)
        shown = []
        for position in range(accepted.survival.shape[1]):
            low, middle, high = quantiles(accepted.survival[:, position], 0.05, 0.5, 0.95)
            beyond = "" if position < accepted.observed_positions else "*"
            shown.append(f"S{position + 1}{beyond} {middle:.3f} ({low:.3f}-{high:.3f})")
        yield from _wrap_lines("  ".join(shown), "               ")
        if accepted.observed_positions < accepted.survival.shape[1]:
            yield "               * not drafted so far: the last position's rate carried on"
    if (cost := known.step_time) is not None:
        low, middle, high = cost.draft_step_share
        yield f"  step time    {cost.window_count} windows of {cost.replica_count} replicas, scatter {100 * cost.residual_sd:.1f} %"
        yield (
            f"               a step of nothing {1000 * cost.floor_seconds:.1f} ms; a verified token {1e6 * cost.verified_token_seconds:.0f} us; "
            f"a draft step {100 * middle:.0f} % of a step ({100 * low:.0f}-{100 * high:.0f})"
        )
        settings = sorted({str(key.setting) for key in telemetry.cells})
        yield f"               measured at K = {', '.join(settings)}" + (
            ": the cost of a draft step rests on the prior" if len(settings) == 1 else ""
        )
        if cost.max_captured_tokens is not None:
            yield f"               graphs are captured up to {cost.max_captured_tokens} tokens a step"


def _change_point_lines(change: ChangePoint | None, telemetry: TuningTelemetry) -> Iterator[str]:
    """What was left out because something else went before."""
    if change is None or telemetry.newest_window_end is None:
        return
    left = sum(block.start < change.timestamp for block in telemetry.blocks())
    hours = max(0.0, telemetry.newest_window_end - change.timestamp) / HOUR
    yield from _wrap_lines(f"since {hours:.1f} h ago: {change.description}; {left} blocks before that are left out", " " * 15)


def _candidate_table(decision: TuningDecision, situation: TuningContext, policy: TuningPolicy) -> Iterator[str]:
    if not decision.predictions:
        return
    share = situation.objectives.percentile
    head = f"  {'setting':<{_SETTING_COLUMN_WIDTH}} {'gain':>8} {'90 % interval':>18} {'P(better)':>10} {'AL':>6} {f'TPOT p{share}':>10}"
    objectives = situation.objectives
    limited = objectives.time_per_output_token is not None or objectives.time_to_first_token is not None
    yield "Candidates, the best pessimistic gain first (gain: speed of tokens at the same requests)"
    yield head + (f" {'SLO':>6}" if limited else "") + "  why not"
    for one in decision.predictions:
        yield from _candidate_row(one, situation.current_setting, limited)
    least, pays = (
        100 * share
        for share in (policy.required_median_gain(situation.surge_share), policy.required_pessimistic_gain(situation.surge_share))
    )
    yield f"  A change is tried for {least:.1f} %, if it gains {pays:.1f} % with 80 %: its canary has to prove the rest."
    known = all(one.worst_extrapolated_gain is None for one in decision.predictions)
    unseen = "" if known else ", nor at the least or the most that may come,"
    most = f"{100 * policy.worst_fifth:.0f} %"
    yield f"  In no fifth of the load{unseen} may it lose more than {most} against the current setting."
    if limited:
        yield f"  The objectives have to hold with {100 * policy.certainty:.0f} %."
    if objectives.time_per_output_token is not None:
        yield "  That of the time per output token has to hold at the largest load too, unless it is no longer there than now."
    if decision.exploration_value > 0:
        yield (
            f"  The best canary to explore with would teach what is worth {100 * decision.exploration_value:.1f} % and cost "
            f"{100 * decision.exploration_cost:.2f} % of the fleet's day."
        )


def _candidate_row(one: CandidatePrediction, current: SpeculationSetting, limited: bool) -> Iterator[str]:
    low, _, middle, high = one.gain
    interval = f"{100 * low:+.1f} to {100 * high:+.1f} %"
    gain, better = f"{100 * middle:+.1f} %", f"{100 * one.probability_better:.0f} %"
    note = one.rejection_reason
    if one.setting == current:
        gain, interval, better, note = "now", "", "", ""
    seconds = f"{1000 * one.latencies.time_per_output_token[0]:.1f} ms"
    slo = f" {100 * one.latencies.probability_met:>4.0f} %" if limited else ""
    name = describe_setting(one.setting)
    if len(name) > _SETTING_COLUMN_WIDTH:
        yield f"  {name}"
        name = ""
    yield f"  {name:<{_SETTING_COLUMN_WIDTH}} {gain:>8} {interval:>18} {better:>10} {one.acceptance_length:>6.2f} {seconds:>10}{slo}  {note}".rstrip()


def _excluded_candidates(decision: TuningDecision) -> Iterator[str]:
    if decision.excluded_candidates:
        yield "Not open to this engine"
        for one in decision.excluded_candidates:
            yield from _wrap_lines(f"{one.label}: {one.reason}", "  - ")


def _limitations(decision: TuningDecision) -> Iterator[str]:
    if decision.evidence.forecast is None:
        return
    yield "What this does not know"
    yield from _wrap_lines(
        "the cost of long contexts apart from the batch, a load unlike the one that was seen, other traffic.", "  "
    )


def decision_to_json(decision: TuningDecision) -> dict[str, object]:
    """What a program would want of it."""
    return {
        "action": decision.action.value,
        "reason": decision.reason,
        "setting": None if decision.setting is None else str(decision.setting),
        "missing": list(decision.missing_data),
        "regimes": {
            name: None if change is None else {"since": change.timestamp, "what": change.description}
            for name, change in (
                ("acceptance", decision.evidence.change_points.acceptance),
                ("load", decision.evidence.change_points.load),
            )
        },
        "explore": {"value": round(decision.exploration_value, 5), "cost": round(decision.exploration_cost, 5)},
        "candidates": [
            {
                "setting": str(one.setting),
                "gain": dict(zip(("p5", "p20", "p50", "p95"), (round(g, 5) for g in one.gain), strict=True)),
                "better": round(one.probability_better, 4),
                "worstFifth": round(one.worst_fifth_gain, 5),
                "unseen": None if one.worst_extrapolated_gain is None else round(one.worst_extrapolated_gain, 5),
                "acceptanceLength": round(one.acceptance_length, 4),
                "timePerOutputToken": round(one.latencies.time_per_output_token[0], 6),
                "objectivesHold": round(one.latencies.probability_met, 4),
                "whyNot": one.rejection_reason,
            }
            for one in decision.predictions
        ],
        "leftOut": [{"setting": one.label, "why": one.reason} for one in decision.excluded_candidates],
    }


def _format_count(number: float) -> str:
    power = int(math.log10(max(number, 1)) // 3)
    return f"{number / 1000**power:.{1 if power else 0}f}{('', 'k', 'M', 'G', 'T')[min(power, 4)]}"


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _wrap_lines(text: str, indent: str = "") -> Iterator[str]:
    """Lines of at most `_WIDTH`; further ones stand below the text of the first."""
    line, rest = indent, " " * len(indent)
    for word in text.split(" "):
        if len(line) + len(word) > _LINE_WIDTH and line.strip():
            yield line.rstrip()
            line = rest
        line += word + " "
    yield line.rstrip()
