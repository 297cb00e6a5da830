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
from aerie.engine.speculation import Adaptive, Off, Schedule, Static, named
from aerie.tuning.decision.candidates import candidates
from aerie.tuning.decision.evaluation import Options
from aerie.tuning.decision.exploration import CANNOT_PROBE, best_canary, cannot_probe, explore, hindered, probe
from aerie.tuning.decision.forecast import Beyond, forecast, load, unseen
from aerie.tuning.decision.objectives import stretched
from aerie.tuning.decision.policy import Failed, History, Objectives, Policy
from aerie.tuning.decision.types import Action, Decision, Evidence, Prediction, Situation
from aerie.tuning.models.acceptance import Acceptance, acceptance
from aerie.tuning.models.change_points import Regimes, day_known, regimes, steps
from aerie.tuning.models.step_time import StepTime, fit
from aerie.tuning.telemetry import HOUR, Block, Telemetry

STALE_BLOCKS = 12
"""After so many blocks without a window of the current setting nothing is decided."""


def decide(telemetry: Telemetry, situation: Situation, policy: Policy, seed: int) -> Decision:
    """The decision on what is known now."""
    random = np.random.default_rng(seed)
    blocks = list(telemetry.blocks())
    since = regimes(blocks)
    situation = replace(situation, history=_of_now(situation.history, since), failed=_still_failed(situation.failed, since))
    step_time = fit(telemetry.cells, situation.engine.captured, experts=situation.engine.experts)
    lengths = acceptance(since.accepted(blocks), max(situation.most, 1), policy.draws, random)
    stale = _stale(blocks, telemetry, situation)
    missing = tuple(filter(None, (stale, *(one.sentence for one in (lengths, step_time) if isinstance(one, Unknown)))))
    if isinstance(lengths, Unknown) or isinstance(step_time, Unknown) or stale is not None:
        evidence = Evidence(
            None if isinstance(lengths, Unknown) else lengths,
            None if isinstance(step_time, Unknown) else step_time,
            regimes=since,
        )
        if isinstance(situation.current, Off) and isinstance(lengths, Unknown) and stale is None:
            return replace(probe(situation, policy), missing=missing, evidence=evidence)
        missing = (*missing, *_why_left_out(telemetry))
        return Decision(Action.INSUFFICIENT, " ".join(missing), missing=missing, evidence=evidence)
    room = float(situation.engine.arguments.max_num_seqs or math.inf)
    drawn = forecast(load(telemetry.cells, blocks, since), lengths, step_time, situation.most, random, room)
    beyond = None
    if not day_known(since.loaded(blocks), telemetry.horizon):
        before = load(telemetry.cells, blocks) if day_known(blocks, telemetry.horizon) else drawn.load
        may_come = unseen(drawn.load, before)
        beyond = Beyond(*(forecast(each, lengths, step_time, situation.most, random, room) for each in may_come))
    allowed = candidates(situation.engine, situation.most, drawn.load.pairs)
    recent = since.loaded(since.accepted(blocks))
    options = Options.of(drawn, beyond, allowed, telemetry, recent, situation, policy)
    decision = _choose(replace(options, stretch=_stretch(recent, step_time, lengths, situation)))
    return replace(decision, left_out=allowed.left_out, evidence=Evidence(lengths, step_time, drawn, since))


def _stale(blocks: Sequence[Block], telemetry: Telemetry, situation: Situation) -> str | None:
    """Why the windows tell nothing of the setting that runs now."""
    current, block = situation.current, telemetry.scale.block
    ends = [one.start + block for one in blocks if one.setting == current]
    if not ends:
        return f"no window of {named(current)} was counted, which is what the engines are set to."
    if situation.now - ends[-1] <= STALE_BLOCKS * block:
        return None
    ago = (situation.now - ends[-1]) / HOUR
    return f"the newest windows of {named(current)} ended {ago:.1f} h ago: no traffic, no metrics, or another setting runs."


def _of_now(history: History, since: Regimes) -> History:
    """Without what was of other traffic: what a canary has taught, and that a setting was not proven, or was taken back."""
    if since.acceptance is not None:
        history = replace(history, explored=tuple(one for one in history.explored if one >= since.acceptance.at))
    ended = max(history.rolled_back or 0.0, history.undecided or 0.0)
    if not history.failed and (history.tried or ended) < (since.newest or 0.0):
        history = replace(history, rolled_back=None, undecided=None, undecided_times=1)
    return history


def _still_failed(failed: tuple[Failed, ...], since: Regimes) -> tuple[Failed, ...]:
    """Without what was found worse on other traffic."""
    return tuple(one for one in failed if not one.measured or one.began >= (since.newest or 0.0))


def _stretch(recent: Sequence[Block], step_time: StepTime, lengths: Acceptance, situation: Situation) -> float:
    """At the largest load of the last hour."""
    left = situation.replicas - situation.lent
    last = [row.batch for row in steps(recent) if row.start >= situation.now - HOUR]
    if not situation.lent or not last:
        return 0.0
    if left <= 0:
        return math.inf
    middle = lengths.lengths.mean(axis=0)
    return stretched(step_time, middle, situation.current, max(last), situation.replicas / left)


def _why_left_out(telemetry: Telemetry) -> tuple[str, ...]:
    """What most of the windows lack that could have told more."""
    if not telemetry.left_out:
        return ()
    sentence, count = telemetry.left_out.most_common(1)[0]
    return (f"{sum(telemetry.left_out.values())} windows were left out, {count} of them for this: {sentence}",)


# --------------------------------------------------------------------------------------------------------------- choosing
def _choose(options: Options) -> Decision:
    situation, policy = options.situation, options.policy
    best = _best(options)
    judged = tuple(_judged(one, best, options) for one in options.predictions)
    off = options.of_setting(Off()) if Off() in options.gains else None
    cooling = situation.history.cooling(situation.now, policy)
    if off is not None and off.setting != situation.current and not situation.bars(Off()) and _loses(off, options):
        if reason := cannot_probe(situation, policy):
            why = f"speculation loses on this load: without it the gain is {off.percents}. It stays all the same, for {reason}"
            return Decision(Action.HOLD, why, off.setting, judged, obstacle=CANNOT_PROBE)
        why = f"speculation loses on this load: without it the gain is {off.percents}."
        action = Action.HOLD if cooling else Action.CHANGE
        return Decision(action, f"{why} But {cooling}" if cooling else why, off.setting, judged)
    if best.setting != situation.current and _proven(best, options):
        why = f"{named(best.setting)} is {best.percents} better than {named(situation.current)}."
        if best.setting == situation.exploring:
            return Decision(Action.CHANGE, f"{why} The canary that explores with it may prove it.", best.setting, judged)
        if cooling:
            return Decision(Action.HOLD, f"{why} But {cooling}", best.setting, judged)
        asked = best_canary(options, known=float(options.gains[best.setting].mean()))
        if asked is not None and asked.net >= policy.least_value and hindered(options, asked) is None:
            first = f"Before it is changed, {asked.teaches} more and cost {100 * asked.cost:.2f} %."
            return Decision(Action.EXPLORE, f"{why} {first}", asked.setting, judged, value=asked.value, cost=asked.cost)
        if (lately := options.gain_lately(best.setting)) < policy.shown * options.gate:
            waits = f"At the load of the last hour that would be {100 * lately:+.1f} %: a canary waits for one at which it shows."
            return Decision(Action.HOLD, f"{why} {waits}", best.setting, judged)
        return Decision(Action.CHANGE, why, best.setting, judged)
    return replace(explore(options, best, cooling), predictions=judged)


def _best(options: Options) -> Prediction:
    """The best of those whose latencies hold and that are no worse in any fifth of the load, nor in what may come of it; a fixed
    setting where the others are hardly better. The current one if none."""
    policy = options.policy
    current = options.of_setting(options.situation.current)
    fit_for_users = [
        one
        for one in options.predictions
        if one.latencies.holds >= policy.certainty
        and not options.situation.bars(one.setting)
        and one.worst_fifth >= -policy.worst_fifth
        and (one.unseen is None or one.unseen >= -policy.worst_fifth)
    ]
    fixed = [one for one in fit_for_users if isinstance(one.setting, Off | Static)]
    best = fit_for_users[0] if fit_for_users else current
    kept = next((one for one in fit_for_users if one.setting == options.situation.exploring), None)
    if kept is not None and _proven(kept, options) and kept.gain[1] >= best.gain[1] - policy.simpler:
        return kept
    changes = isinstance(best.setting, Schedule | Adaptive) and best.setting != current.setting
    if changes and fixed and best.gain[1] < fixed[0].gain[1] + policy.simpler:
        return fixed[0]
    return best


def _proven(one: Prediction, options: Options) -> bool:
    """Whether it is worth a canary of its own; or that the one which explores with it is kept until it is proven."""
    policy = options.policy
    if one.setting == options.situation.exploring:
        return one.gain[2] >= options.pays and one.better >= policy.better
    return one.gain[2] >= options.gate and one.gain[1] >= options.pays and one.better >= policy.better


def _loses(off: Prediction, options: Options) -> bool:
    """Whether no speculation is the best, surely enough to turn it off."""
    if off.latencies.holds < options.policy.certainty and options.situation.objectives != Objectives():
        return False
    if options.useless and off.better >= 0.5:
        return True
    if off.worst_fifth < -options.policy.worst_fifth or off.gain[2] < options.pays:
        return False
    drafting = [gain for setting, gain in options.gains.items() if not isinstance(setting, Off)]
    return float((options.gains[Off()] > np.max(drafting, axis=0)).mean()) >= options.policy.off_certainty


def _judged(one: Prediction, best: Prediction, options: Options) -> Prediction:
    """With the reason why it is not the choice."""
    policy = options.policy
    if one.setting == options.situation.current or (one.setting == best.setting and _proven(best, options)):
        return one
    if options.situation.bars(one.setting):
        until = next(each.until for each in options.situation.failed if each.setting == one.setting)
        why = f"its trials have failed, and it may be tried again in {(until - options.situation.now) / HOUR:.1f} h."
    elif one.latencies.holds < policy.certainty:
        why = f"the objectives hold with {100 * one.latencies.holds:.0f} %, not {100 * policy.certainty:.0f} %."
    elif one.better < 0.5:
        why = "it is worse."
    elif one.worst_fifth < -policy.worst_fifth:
        why = f"in a fifth of the load it loses {-100 * one.worst_fifth:.1f} %, and {100 * policy.worst_fifth:.0f} % is the most."
    elif one.unseen is not None and one.unseen < -policy.worst_fifth:
        why = f"at the least or the most load that may come it loses {-100 * one.unseen:.1f} %: less than a day of it is known."
    elif one.better < policy.better:
        why = f"it is better with {100 * one.better:.0f} %, not {100 * policy.better:.0f} %."
    elif one.gain[2] < options.gate:
        why = f"its gain is {100 * one.gain[2]:.1f} %, and a change is made for {100 * options.gate:.1f} %."
    elif one.gain[1] < options.pays:
        why = f"with 80 % it gains {100 * one.gain[1]:.1f} % or more, and {100 * options.pays:.1f} % pays for the roll."
    else:
        why = f"{named(best.setting)} is better, or simpler and as good."
    return replace(one, why_not=why)
