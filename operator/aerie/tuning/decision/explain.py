"""A decision in words, for a person who runs the fleet: what to do, what it rests on, and why not something else.

Plain text of up to 120 columns; the same decision gives the same text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from aerie.engine.speculation import Setting, named
from aerie.tuning.decision.policy import Policy
from aerie.tuning.decision.types import Action, Decision, Prediction, Situation
from aerie.tuning.models.change_points import Change
from aerie.tuning.models.numeric import quantiles
from aerie.tuning.telemetry import HOUR, Telemetry

_WIDTH = 120
_NAME = 29


def explain(decision: Decision, telemetry: Telemetry, situation: Situation, policy: Policy) -> str:
    """All of it."""
    parts = [
        _verdict(decision),
        _missing(decision, telemetry),
        _evidence(decision, telemetry),
        _table(decision, situation, policy),
        _left_out(decision),
        _limits(decision),
    ]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part))) + "\n"


def _verdict(decision: Decision) -> Iterator[str]:
    head = {
        Action.HOLD: "HOLD",
        Action.CHANGE: f"CHANGE to {named(decision.setting)}" if decision.setting else "CHANGE",
        Action.EXPLORE: f"EXPLORE: one canary with {named(decision.setting)}" if decision.setting else "EXPLORE",
        Action.INSUFFICIENT: "INSUFFICIENT DATA: nothing is recommended",
    }[decision.action]
    yield head
    yield from _wrapped(_sentence(decision.reason))
    if decision.action is Action.CHANGE:
        yield from _wrapped("Prove it on a canary before it is rolled out: this is a forecast from metrics.")


def _missing(decision: Decision, telemetry: Telemetry) -> Iterator[str]:
    if decision.missing and decision.action is not Action.INSUFFICIENT:
        yield "What the metrics do not tell"
        for sentence in decision.missing:
            yield from _wrapped(_sentence(sentence), "  - ")
    if telemetry.left_out:
        yield "Windows left out of the step times"
        for sentence, count in telemetry.left_out.most_common(6):
            yield from _wrapped(f"{count}: {sentence}", "  - ")


def _evidence(decision: Decision, telemetry: Telemetry) -> Iterator[str]:
    known = decision.evidence
    if known.acceptance is None and known.step_time is None:
        return
    yield "What it rests on"
    if (drawn := known.forecast) is not None:
        low, middle, high = (drawn.load.quantile(share) for share in (0.05, 0.5, 0.95))
        yield f"  load         batch {low:.0f} / {middle:.0f} / {high:.0f} (5 %, half, 95 % of the request-steps)"
        yield from _since(known.regimes.load, telemetry)
    if (accepted := known.acceptance) is not None:
        block = telemetry.scale.block
        hours = accepted.blocks * block / HOUR
        length = f"{block / 60:.0f} minutes" if block >= 120 else f"{block:.0f} s"
        yield f"  acceptance   {_count(accepted.drafts)} drafts in {accepted.blocks} blocks of {length} ({hours:.1f} h)"
        yield from _since(known.regimes.acceptance, telemetry)
        shown = []
        for position in range(accepted.survival.shape[1]):
            low, middle, high = quantiles(accepted.survival[:, position], 0.05, 0.5, 0.95)
            beyond = "" if position < accepted.observed else "*"
            shown.append(f"S{position + 1}{beyond} {middle:.3f} ({low:.3f}-{high:.3f})")
        yield from _wrapped("  ".join(shown), "               ")
        if accepted.observed < accepted.survival.shape[1]:
            yield "               * not drafted so far: the last position's rate carried on"
    if (cost := known.step_time) is not None:
        low, middle, high = cost.draft_share
        yield f"  step time    {cost.windows} windows of {cost.replicas} replicas, scatter {100 * cost.scatter:.1f} %"
        yield (
            f"               a step of nothing {1000 * cost.floor:.1f} ms; a verified token {1e6 * cost.token_seconds:.0f} us; "
            f"a draft step {100 * middle:.0f} % of a step ({100 * low:.0f}-{100 * high:.0f})"
        )
        settings = sorted({str(key.setting) for key in telemetry.cells})
        yield f"               measured at K = {', '.join(settings)}" + (
            ": the cost of a draft step rests on the prior" if len(settings) == 1 else ""
        )
        if cost.captured is not None:
            yield f"               graphs are captured up to {cost.captured} tokens a step"


def _since(change: Change | None, telemetry: Telemetry) -> Iterator[str]:
    """What was left out because something else went before."""
    if change is None or telemetry.newest is None:
        return
    left = sum(block.start < change.at for block in telemetry.blocks())
    hours = max(0.0, telemetry.newest - change.at) / HOUR
    yield from _wrapped(f"since {hours:.1f} h ago: {change.what}; {left} blocks before that are left out", " " * 15)


def _table(decision: Decision, situation: Situation, policy: Policy) -> Iterator[str]:
    if not decision.predictions:
        return
    share = situation.objectives.percentile
    head = f"  {'setting':<{_NAME}} {'gain':>8} {'90 % interval':>18} {'P(better)':>10} {'AL':>6} {f'TPOT p{share}':>10}"
    objectives = situation.objectives
    limited = objectives.time_per_output_token is not None or objectives.time_to_first_token is not None
    yield "Candidates, the best pessimistic gain first (gain: speed of tokens at the same requests)"
    yield head + (f" {'SLO':>6}" if limited else "") + "  why not"
    for one in decision.predictions:
        yield from _row(one, situation.current, limited)
    least, pays = (100 * share for share in (policy.gate(situation.extra_share), policy.pays(situation.extra_share)))
    yield f"  A change is tried for {least:.1f} %, if it gains {pays:.1f} % with 80 %: its canary has to prove the rest."
    known = all(one.unseen is None for one in decision.predictions)
    unseen = "" if known else ", nor at the least or the most that may come,"
    most = f"{100 * policy.worst_fifth:.0f} %"
    yield f"  In no fifth of the load{unseen} may it lose more than {most} against the current setting."
    if limited:
        yield f"  The objectives have to hold with {100 * policy.certainty:.0f} %."
    if objectives.time_per_output_token is not None:
        yield "  That of the time per output token has to hold at the largest load too, unless it is no longer there than now."
    if decision.value > 0:
        yield (
            f"  The best canary to explore with would teach what is worth {100 * decision.value:.1f} % and cost "
            f"{100 * decision.cost:.2f} % of the fleet's day."
        )


def _row(one: Prediction, current: Setting, limited: bool) -> Iterator[str]:
    low, _, middle, high = one.gain
    interval = f"{100 * low:+.1f} to {100 * high:+.1f} %"
    gain, better = f"{100 * middle:+.1f} %", f"{100 * one.better:.0f} %"
    note = one.why_not
    if one.setting == current:
        gain, interval, better, note = "now", "", "", ""
    seconds = f"{1000 * one.latencies.time_per_output_token[0]:.1f} ms"
    slo = f" {100 * one.latencies.holds:>4.0f} %" if limited else ""
    name = named(one.setting)
    if len(name) > _NAME:
        yield f"  {name}"
        name = ""
    yield f"  {name:<{_NAME}} {gain:>8} {interval:>18} {better:>10} {one.length:>6.2f} {seconds:>10}{slo}  {note}".rstrip()


def _left_out(decision: Decision) -> Iterator[str]:
    if decision.left_out:
        yield "Not open to this engine"
        for one in decision.left_out:
            yield from _wrapped(f"{one.setting}: {one.why}", "  - ")


def _limits(decision: Decision) -> Iterator[str]:
    if decision.evidence.forecast is None:
        return
    yield "What this does not know"
    yield from _wrapped(
        "the cost of long contexts apart from the batch, a load unlike the one that was seen, other traffic.", "  "
    )


def to_json(decision: Decision) -> dict[str, object]:
    """What a program would want of it."""
    return {
        "action": decision.action.value,
        "reason": decision.reason,
        "setting": None if decision.setting is None else str(decision.setting),
        "missing": list(decision.missing),
        "regimes": {
            name: None if change is None else {"since": change.at, "what": change.what}
            for name, change in (("acceptance", decision.evidence.regimes.acceptance), ("load", decision.evidence.regimes.load))
        },
        "explore": {"value": round(decision.value, 5), "cost": round(decision.cost, 5)},
        "candidates": [
            {
                "setting": str(one.setting),
                "gain": dict(zip(("p5", "p20", "p50", "p95"), (round(g, 5) for g in one.gain), strict=True)),
                "better": round(one.better, 4),
                "worstFifth": round(one.worst_fifth, 5),
                "unseen": None if one.unseen is None else round(one.unseen, 5),
                "acceptanceLength": round(one.length, 4),
                "timePerOutputToken": round(one.latencies.time_per_output_token[0], 6),
                "objectivesHold": round(one.latencies.holds, 4),
                "whyNot": one.why_not,
            }
            for one in decision.predictions
        ],
        "leftOut": [{"setting": one.setting, "why": one.why} for one in decision.left_out],
    }


def _count(number: float) -> str:
    power = int(math.log10(max(number, 1)) // 3)
    return f"{number / 1000**power:.{1 if power else 0}f}{('', 'k', 'M', 'G', 'T')[min(power, 4)]}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _wrapped(text: str, indent: str = "") -> Iterator[str]:
    """Lines of at most `_WIDTH`; further ones stand below the text of the first."""
    line, rest = indent, " " * len(indent)
    for word in text.split(" "):
        if len(line) + len(word) > _WIDTH and line.strip():
            yield line.rstrip()
            line = rest
        line += word + " "
    yield line.rstrip()
