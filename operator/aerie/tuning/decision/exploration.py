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

from aerie.engine.speculation import Schedule, Setting, Static, max_tokens, named, tokens_of
from aerie.tuning.decision.evaluation import Options
from aerie.tuning.decision.forecast import Forecast
from aerie.tuning.decision.policy import Policy
from aerie.tuning.decision.types import Action, Decision, Prediction, Situation
from aerie.tuning.models.numeric import Array
from aerie.tuning.telemetry import HOUR


@dataclass(frozen=True)
class Canary:
    """A canary that might explore."""

    setting: Setting
    value: float
    """What it would teach, and what it costs: shares of the capacity over the horizon."""
    cost: float

    @property
    def net(self) -> float:
        return self.value - self.cost

    @property
    def teaches(self) -> str:
        return f"a canary with {named(self.setting)} would teach what is worth {100 * self.value:.1f} %"


CANNOT_PROBE = "CannotProbe"
"""Speculation is off, or would be, and no canary can ask whether it should come back."""


def cannot_probe(situation: Situation, policy: Policy) -> str:
    """Why no canary could ever ask for acceptance again, with the way out, as the end of a sentence; empty where one could."""
    if situation.lent == 0 or situation.replicas >= policy.least_replicas:
        return ""
    return (
        f"no canary could ask for acceptance again: there are {situation.replicas} replicas, and {policy.least_replicas} are "
        "needed to spare one. Write spec.rollout.canary.capacity: Surge, or spec.speculation.tokens: 0 to turn it off for good."
    )


def probe(situation: Situation, policy: Policy) -> Decision:
    """Speculation is off, and nothing tells what drafts would be worth."""
    since = situation.history.speculated
    setting = Static(min(3, max(situation.most, 1)))
    if since is not None and situation.now < since + policy.probe:
        left = (since + policy.probe - situation.now) / HOUR
        return Decision(Action.HOLD, f"speculation is off, and acceptance is asked for again in {left:.1f} h.")
    if never := cannot_probe(situation, policy):
        return Decision(Action.HOLD, f"speculation is off, and {never}", obstacle=CANNOT_PROBE)
    if situation.bars(setting):
        why = f"speculation is off, and {named(setting)} is not tried again yet: its trials have failed."
        return Decision(Action.HOLD, why, setting)
    if cooling := situation.history.cooling(situation.now, policy):
        return Decision(Action.HOLD, f"speculation is off, and no canary asks for acceptance yet: {cooling}", setting)
    if reason := _queues(situation):
        return Decision(Action.HOLD, f"speculation is off, and no canary asks for acceptance: {reason}", obstacle=CANNOT_PROBE)
    reason = f"speculation is off, so nothing tells acceptance: one canary with {named(setting)} asks again."
    return Decision(Action.EXPLORE, reason, setting)


def explore(options: Options, best: Prediction, cooling: str | None) -> Decision:
    """Hold, or one canary."""
    current = options.situation.current
    held = f"{named(current)} stays: "
    if best.setting == current:
        held += "nothing else is surely better."
    else:
        held += f"{named(best.setting)} is not surely enough better ({best.percents})."
    asked = best_canary(options)
    if asked is None:
        return Decision(Action.HOLD, held)
    found = Decision(Action.HOLD, held, value=asked.value, cost=asked.cost)
    if asked.net < options.policy.least_value:
        return found
    teaches = f"{_capital(asked.teaches)} and cost {100 * asked.cost:.2f} %"
    if reason := cooling or hindered(options, asked):
        return replace(found, reason=f"{held} {teaches}, but {reason}")
    return replace(found, action=Action.EXPLORE, reason=f"{held} {teaches}.", setting=asked.setting)


def best_canary(options: Options, known: float = 0.0) -> Canary | None:
    """The one that teaches the most for its cost, beyond a gain that could be had without any."""
    worth = [_worth(options, setting, known) for setting in options.gains if _teaches(setting, options)]
    best = max(worth, key=lambda one: one.net, default=None)
    return None if best is None else replace(best, setting=options.bounded(best.setting))


def hindered(options: Options, asked: Canary) -> str | None:
    """Why no canary may explore now."""
    situation, policy = options.situation, options.policy
    if situation.exploring is not None:
        return "one explores already."
    urgent = asked.net >= policy.urgent
    spare = replace(situation, waiting=0.0) if urgent else situation
    other_side = _other_side(options, asked.setting)
    pause = situation.history.exploring(situation.now, policy, urgent=urgent, other_side=other_side)
    if reason := pause or _no_canary(spare, policy):
        return reason
    if options.stretch > policy.stretch() and not urgent:
        longer = f"{100 * options.stretch:.0f} % longer" if math.isfinite(options.stretch) else "too long"
        return f"while {situation.lent} of {situation.replicas} replicas load, each token would take {longer}: at a quieter hour."
    if options.useless:
        return "hardly a draft is accepted, so there is nothing to be learnt from more."
    limit = situation.objectives.time_per_output_token
    now = options.of_setting(situation.current).latencies.time_per_output_token[0]
    if limit is not None and now > (1 - policy.slo_headroom) * limit:
        return "the time per output token is too near its objective."
    return None


def _other_side(options: Options, setting: Setting) -> bool:
    """Whether it drafts more than the current setting and nothing was measured that does, or less likewise."""
    now = max_tokens(options.situation.current)
    side = max_tokens(setting) - now
    return side != 0 and not any(side * (tokens - now) > 0 for tokens in options.measured)


def _no_canary(situation: Situation, policy: Policy) -> str | None:
    """Why no replica can be spared for exploring."""
    if situation.replicas < policy.least_replicas:
        return f"there are {situation.replicas} replicas, and {policy.least_replicas} are needed to spare one."
    return _queues(situation)


def _queues(situation: Situation) -> str | None:
    if situation.waiting > situation.replicas:  # one each may have come since the last step
        return f"{situation.waiting:.0f} requests wait in the queues."
    return None


def _teaches(setting: Setting, options: Options) -> bool:
    """Whether a canary at the setting would show what no window has shown yet, and is likely to keep the objectives meanwhile."""
    if not isinstance(setting, Static | Schedule) or tokens_of(setting) <= options.measured:
        return False
    if options.situation.bars(setting) or options.situation.has_failed_with(max_tokens(setting)):
        return False
    return options.of_setting(setting).latencies.bearable >= options.policy.explores


def _worth(options: Options, setting: Setting, known: float) -> Canary:
    """Of a canary at a setting; `known`: a gain that waits for it, and that it has to add to."""
    policy = options.policy
    gains = np.stack(list(options.gains.values()), axis=1)
    shown = _shown(options.drawn, setting)
    expected = shown @ np.linalg.lstsq(shown, gains, rcond=None)[0]
    left = (gains - expected).std(axis=0)
    normal = statistics.NormalDist()
    pessimistic = expected + normal.inv_cdf(policy.pessimism) * left
    acts = (expected >= options.gate) & (pessimistic >= options.pays) & (expected >= normal.inv_cdf(policy.better) * left)
    value = float(np.where(acts, expected, 0.0).max(axis=1).mean()) - known
    share = 1 / max(options.situation.replicas, 1)
    loss = max(0.0, -float(options.gains[setting].mean()))
    cost = (share * (2 * policy.reload + policy.canary * loss) + 2 * policy.canary * known) / policy.horizon
    cost += options.situation.extra_share * (policy.reload + policy.canary) / policy.payback
    return Canary(setting, value, cost)


def _shown(drawn: Forecast, setting: Setting) -> Array:
    """What a canary shows: a user's seconds at the least, the middle and the largest batch, and acceptance. By draw."""
    seconds = drawn.of(setting)
    batches = seconds.shape[1]
    shown = [np.log(seconds[:, index]) for index in sorted({0, batches // 2, batches - 1})]
    table = np.stack([*shown, drawn.lengths[:, max_tokens(setting)]], axis=1)
    table = table - table.mean(axis=0)
    found: Array = np.concatenate([np.ones((len(table), 1)), table, table**2], axis=1)
    return found


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
