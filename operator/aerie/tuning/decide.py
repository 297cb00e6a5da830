"""From telemetry to a decision: hold, change the setting, or explore with one canary.

The rule: of the candidates whose latencies hold with `certainty`, the one with the best pessimistic gain; it is proposed if its
gain passes the gate more likely than not, the pessimistic one pays for the roll, and it is surely enough better: the canary of
the change proves the rest. Else, and before that, what one canary would teach is weighed against what it costs:

    value(K') = E[ max_c E[gain_c | what a canary at K' shows], of those c that could then be proposed, or 0 ]

the expected value of partial information, with the inner expectation by regression over the draws (Strong, Oakley and Brennan
2014), and its residuals for what would stay uncertain. Nothing is proposed without evidence, during a cooldown, or where an
objective is broken and the change does not cure it. Windows of the current setting that end long before now are no evidence: the
metrics are lost, or somebody set the engines to something else.

Guarantees: pure and deterministic in telemetry, situation, policy and seed. Not guaranteed: that the forecast is right. The
caller proves a change on a canary before it is made.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, Static, max_tokens, named
from aerie.engine.windows import Unknown
from aerie.tuning.acceptance import Acceptance, acceptance
from aerie.tuning.candidates import Candidates, Engine, LeftOut, candidates
from aerie.tuning.forecast import Forecast, forecast, load, unseen
from aerie.tuning.latency import Latencies, latencies, observed, stretched
from aerie.tuning.numeric import Array, quantiles
from aerie.tuning.policy import History, Objectives, Policy
from aerie.tuning.regimes import Regimes, day_known, regimes, steps
from aerie.tuning.steptime import StepTime, fit
from aerie.tuning.telemetry import HOUR, Block, Telemetry

STALE_BLOCKS = 12
"""After so many blocks without a window of the current setting nothing is decided."""


class Action(enum.Enum):
    """What to do."""

    HOLD = "hold"
    CHANGE = "change"
    EXPLORE = "explore"
    INSUFFICIENT = "insufficient data"


@dataclass(frozen=True)
class Situation:
    """All that telemetry does not say."""

    engine: Engine
    current: Setting
    most: int
    """The most draft tokens that may be chosen."""
    replicas: int
    now: float
    objectives: Objectives = field(default_factory=Objectives)
    history: History = field(default_factory=History)
    waiting: float = 0.0
    """Requests in the queues, all replicas together."""
    lent: int = 0
    """Replicas whose places a canary and its control take; 0 where there are spare GPUs for them."""


@dataclass(frozen=True)
class Prediction:
    """One candidate."""

    setting: Setting
    gain: tuple[float, float, float, float]
    """Over the current setting: the 5 %, 20 %, 50 % and 95 % points."""
    better: float
    """Probability that it is better than the current one."""
    length: float
    """Mean acceptance length."""
    latencies: Latencies
    worst_fifth: float
    """The gain, half of the draws above it, in the fifth of the load where it is least."""
    unseen: float | None = None
    """The same at half and at twice the load that was seen, whichever is less; None where a day of it is known."""
    why_not: str = ""
    """Empty for what was chosen, and for the current setting."""


@dataclass(frozen=True)
class Evidence:
    """What the forecast rests on; None where it could not be had."""

    acceptance: Acceptance | None = None
    step_time: StepTime | None = None
    forecast: Forecast | None = None
    regimes: Regimes = field(default_factory=Regimes)


@dataclass(frozen=True)
class Decision:
    """What to do, and why."""

    action: Action
    reason: str
    setting: Setting | None = None
    """To change to, or for the canary to run."""
    predictions: tuple[Prediction, ...] = ()
    """The best first."""
    left_out: tuple[LeftOut, ...] = ()
    missing: tuple[str, ...] = ()
    """What the data do not identify."""
    value: float = 0.0
    """Expected gain of what the best canary would teach, and what it costs; shares of the capacity over the horizon."""
    cost: float = 0.0
    evidence: Evidence = field(default_factory=Evidence)


def decide(telemetry: Telemetry, situation: Situation, policy: Policy, seed: int) -> Decision:
    """The decision on what is known now."""
    random = np.random.default_rng(seed)
    blocks = list(telemetry.blocks())
    since = regimes(blocks)
    if since.acceptance is not None and since.acceptance.at > (situation.history.explored or 0.0):
        situation = replace(situation, history=replace(situation.history, explored=None))  # what it taught is of no use now
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
            return replace(_probe(situation, policy), missing=missing, evidence=evidence)
        missing = (*missing, *_why_left_out(telemetry))
        return Decision(Action.INSUFFICIENT, " ".join(missing), missing=missing, evidence=evidence)
    drawn = forecast(load(telemetry.cells, blocks, since), lengths, step_time, situation.most, random)
    beyond = (
        None if day_known(blocks, telemetry.horizon) else forecast(unseen(drawn.load), lengths, step_time, situation.most, random)
    )
    allowed = candidates(situation.engine, situation.most, drawn.load.pairs)
    recent = since.loaded(since.accepted(blocks))
    options = _Options.of(drawn, beyond, allowed, telemetry, recent, situation, policy)
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


def _probe(situation: Situation, policy: Policy) -> Decision:
    """Speculation is off, and nothing tells what drafts would be worth."""
    since = situation.history.speculated
    setting = Static(min(3, max(situation.most, 1)))
    if since is not None and situation.now < since + policy.probe:
        left = (since + policy.probe - situation.now) / HOUR
        return Decision(Action.HOLD, f"speculation is off, and acceptance is asked for again in {left:.1f} h.")
    if reason := _no_canary(situation, policy) or situation.history.cooling(situation.now, policy):
        return Decision(Action.HOLD, f"speculation is off, and no canary can ask for acceptance: {reason}")
    reason = f"speculation is off, so nothing tells acceptance: one canary with {named(setting)} asks again."
    return Decision(Action.EXPLORE, reason, setting)


def _no_canary(situation: Situation, policy: Policy) -> str | None:
    """Why no replica can be spared for exploring."""
    if situation.replicas < policy.least_replicas:
        return f"there are {situation.replicas} replicas, and {policy.least_replicas} are needed to spare one."
    if situation.waiting > 0:
        return f"{situation.waiting:.0f} requests wait in the queues."
    return None


# --------------------------------------------------------------------------------------------------------------- choosing
@dataclass(frozen=True)
class _Options:
    """The candidates with their draws of the gain, the best first."""

    situation: Situation
    policy: Policy
    drawn: Forecast
    measured: frozenset[Setting]
    """Settings that windows were seen of."""
    gains: dict[Setting, Array]
    predictions: tuple[Prediction, ...]
    stretch: float = 0.0
    """By what share a token takes longer while the replicas that are lent are out."""

    @classmethod
    def of(
        cls,
        drawn: Forecast,
        beyond: Forecast | None,
        allowed: Candidates,
        telemetry: Telemetry,
        recent: Sequence[Block],
        situation: Situation,
        policy: Policy,
    ) -> _Options:
        current = situation.current
        settings: list[Setting] = [*allowed.fixed, *allowed.adaptive]
        if allowed.schedules and (schedule := drawn.schedule(situation.engine, current)) is not None:
            settings.append(schedule)
        if current not in settings:
            settings.append(current)
        had = observed(recent, current, situation.objectives.percentile)
        gains = {setting: drawn.gain(setting, current) for setting in settings}
        if beyond is not None and allowed.schedules and isinstance(current, Static):
            for guarded in list(_guarded(drawn, beyond, gains, current, policy)):
                gains.setdefault(guarded, drawn.gain(guarded, current))
        outside = {} if beyond is None else {setting: float(beyond.by_batch(setting, current).min()) for setting in gains}
        found: list[Prediction] = []
        for setting, gain in gains.items():
            low, pessimistic, middle, high = quantiles(gain, 0.05, policy.pessimism, 0.5, 0.95)
            better = float((gain > 0).mean())
            length = float(np.average(drawn.tokens_per_step(setting), weights=drawn.load.shares))
            seen = latencies(drawn, setting, current, had, situation.objectives)
            worst = drawn.worst_fifth(setting, current)
            interval = (low, pessimistic, middle, high)
            found.append(Prediction(setting, interval, better, length, seen, worst, outside.get(setting)))
        found.sort(key=lambda one: (-one.gain[1], str(one.setting)))
        measured = frozenset(key.setting for key in telemetry.cells)
        return cls(situation, policy, drawn, measured, gains, tuple(found))

    def of_setting(self, setting: Setting) -> Prediction:
        return next(one for one in self.predictions if one.setting == setting)


def _guarded(
    drawn: Forecast, beyond: Forecast, gains: Mapping[Setting, Array], current: Static, policy: Policy
) -> Iterator[Schedule]:
    """What is better on the load that was seen and might not be beyond it, with the current setting beyond it."""
    for setting, gain in gains.items():
        below, above = (beyond.by_batch(setting, current) < -policy.worst_fifth).tolist()
        if (below or above) and not isinstance(setting, Adaptive) and float(np.median(gain)) >= policy.gate():
            found = drawn.guarded(setting, current, below=below, above=above)
            if found is not None:
                yield found


def _choose(options: _Options) -> Decision:
    situation, policy = options.situation, options.policy
    best = _best(options)
    judged = tuple(_judged(one, best, options) for one in options.predictions)
    off = options.of_setting(Off()) if Off() in options.gains else None
    cooling = situation.history.cooling(situation.now, policy)
    if off is not None and off.setting != situation.current and _loses(off, options):
        why = f"speculation loses on this load: without it the gain is {_percents(off)}."
        action = Action.HOLD if cooling else Action.CHANGE
        return Decision(action, f"{why} But {cooling}" if cooling else why, off.setting, judged)
    if best.setting != situation.current and _proven(best, policy):
        why = f"{named(best.setting)} is {_percents(best)} better than {named(situation.current)}."
        if cooling:
            return Decision(Action.HOLD, f"{why} But {cooling}", best.setting, judged)
        asked = _best_canary(options, known=float(options.gains[best.setting].mean()))
        if asked is not None and asked.net >= policy.least_value and _hindered(options) is None:
            first = f"Before it is changed, {asked.teaches} more and cost {100 * asked.cost:.2f} %."
            return Decision(Action.EXPLORE, f"{why} {first}", asked.setting, judged, value=asked.value, cost=asked.cost)
        return Decision(Action.CHANGE, why, best.setting, judged)
    return replace(_explore(options, best, cooling), predictions=judged)


def _best(options: _Options) -> Prediction:
    """The best of those whose latencies hold and that are no worse in any fifth of the load, nor in what may come of it; a fixed
    setting where the others are hardly better. The current one if none."""
    policy = options.policy
    current = options.of_setting(options.situation.current)
    fit_for_users = [
        one
        for one in options.predictions
        if one.latencies.holds >= policy.certainty
        and one.worst_fifth >= -policy.worst_fifth
        and (one.unseen is None or one.unseen >= -policy.worst_fifth)
    ]
    fixed = [one for one in fit_for_users if isinstance(one.setting, Off | Static)]
    best = fit_for_users[0] if fit_for_users else current
    changes = isinstance(best.setting, Schedule | Adaptive) and best.setting != current.setting
    if changes and fixed and best.gain[1] < fixed[0].gain[1] + policy.simpler:
        return fixed[0]
    return best


def _proven(one: Prediction, policy: Policy) -> bool:
    return one.gain[2] >= policy.gate() and one.gain[1] >= policy.pays() and one.better >= policy.better


def _loses(off: Prediction, options: _Options) -> bool:
    """Whether no speculation is the best, surely enough to turn it off."""
    if off.latencies.holds < options.policy.certainty and options.situation.objectives != Objectives():
        return False
    if _useless(options) and off.better >= 0.5:
        return True
    if off.worst_fifth < -options.policy.worst_fifth:
        return False
    drafting = [gain for setting, gain in options.gains.items() if not isinstance(setting, Off)]
    return float((options.gains[Off()] > np.max(drafting, axis=0)).mean()) >= options.policy.off_certainty


def _useless(options: _Options) -> bool:
    """Whether hardly a draft is accepted."""
    current = options.of_setting(options.situation.current)
    return not isinstance(current.setting, Off) and current.length < options.policy.useless_length


def _judged(one: Prediction, best: Prediction, options: _Options) -> Prediction:
    """With the reason why it is not the choice."""
    policy = options.policy
    if one.setting == options.situation.current or (one.setting == best.setting and _proven(best, policy)):
        return one
    if one.latencies.holds < policy.certainty:
        why = f"the objectives hold with {100 * one.latencies.holds:.0f} %, not {100 * policy.certainty:.0f} %."
    elif one.better < 0.5:
        why = "it is worse."
    elif one.worst_fifth < -policy.worst_fifth:
        why = f"in a fifth of the load it loses {-100 * one.worst_fifth:.1f} %, and {100 * policy.worst_fifth:.0f} % is the most."
    elif one.unseen is not None and one.unseen < -policy.worst_fifth:
        why = f"at half or twice the load that was seen it loses {-100 * one.unseen:.1f} %, and less than a day of it is known."
    elif one.better < policy.better:
        why = f"it is better with {100 * one.better:.0f} %, not {100 * policy.better:.0f} %."
    elif one.gain[2] < policy.gate():
        why = f"its gain is {100 * one.gain[2]:.1f} %, and a change is made for {100 * policy.gate():.1f} %."
    elif one.gain[1] < policy.pays():
        why = f"with 80 % it gains {100 * one.gain[1]:.1f} % or more, and {100 * policy.pays():.1f} % pays for the roll."
    else:
        why = f"{named(best.setting)} is better, or simpler and as good."
    return replace(one, why_not=why)


# -------------------------------------------------------------------------------------------------------------- exploring
@dataclass(frozen=True)
class _Canary:
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


def _explore(options: _Options, best: Prediction, cooling: str | None) -> Decision:
    """Hold, or one canary."""
    current = options.situation.current
    held = f"{named(current)} stays: "
    if best.setting == current:
        held += "nothing else is surely better."
    else:
        held += f"{named(best.setting)} is not surely enough better ({_percents(best)})."
    asked = _best_canary(options)
    if asked is None:
        return Decision(Action.HOLD, held)
    found = Decision(Action.HOLD, held, value=asked.value, cost=asked.cost)
    if asked.net < options.policy.least_value:
        return found
    teaches = f"{_capital(asked.teaches)} and cost {100 * asked.cost:.2f} %"
    if reason := cooling or _hindered(options):
        return replace(found, reason=f"{held} {teaches}, but {reason}")
    return replace(found, action=Action.EXPLORE, reason=f"{held} {teaches}.", setting=asked.setting)


def _hindered(options: _Options) -> str | None:
    """Why no canary may explore now."""
    situation, policy = options.situation, options.policy
    if reason := situation.history.exploring(situation.now, policy) or _no_canary(situation, policy):
        return reason
    if options.stretch > policy.stretch():
        longer = f"{100 * options.stretch:.0f} % longer" if math.isfinite(options.stretch) else "too long"
        return f"while {situation.lent} of {situation.replicas} replicas load, each token would take {longer}: at a quieter hour."
    if _useless(options):
        return "hardly a draft is accepted, so there is nothing to be learnt from more."
    limit = situation.objectives.time_per_output_token
    now = options.of_setting(situation.current).latencies.time_per_output_token[0]
    if limit is not None and now > (1 - policy.slo_headroom) * limit:
        return "the time per output token is too near its objective."
    return None


def _best_canary(options: _Options, known: float = 0.0) -> _Canary | None:
    """The one that teaches the most for its cost, beyond a gain that could be had without any."""
    worth = [_worth(options, setting, known) for setting in options.gains if _teaches(setting, options)]
    return max(worth, key=lambda one: one.net, default=None)


def _teaches(setting: Setting, options: _Options) -> bool:
    """Whether a canary at the setting would show what no window has shown yet."""
    return isinstance(setting, Static | Schedule) and setting not in options.measured


def _worth(options: _Options, setting: Setting, known: float) -> _Canary:
    """Of a canary at a setting; `known`: a gain that waits for it, and that it has to add to."""
    policy = options.policy
    gains = np.stack(list(options.gains.values()), axis=1)
    shown = _shown(options.drawn, setting)
    expected = shown @ np.linalg.lstsq(shown, gains, rcond=None)[0]
    left = (gains - expected).std(axis=0)
    normal = statistics.NormalDist()
    pessimistic = expected + normal.inv_cdf(policy.pessimism) * left
    acts = (expected >= policy.gate()) & (pessimistic >= policy.pays()) & (expected >= normal.inv_cdf(policy.better) * left)
    value = float(np.where(acts, expected, 0.0).max(axis=1).mean()) - known
    share = 1 / max(options.situation.replicas, 1)
    loss = max(0.0, -float(options.gains[setting].mean()))
    cost = (share * (2 * policy.reload + policy.canary * loss) + 2 * policy.canary * known) / policy.horizon
    return _Canary(setting, value, cost)


def _shown(drawn: Forecast, setting: Setting) -> Array:
    """What a canary shows: a user's seconds at the least, the middle and the largest batch, and acceptance. By draw."""
    seconds = drawn.of(setting)
    batches = seconds.shape[1]
    shown = [np.log(seconds[:, index]) for index in sorted({0, batches // 2, batches - 1})]
    table = np.stack([*shown, drawn.lengths[:, max_tokens(setting)]], axis=1)
    table = table - table.mean(axis=0)
    found: Array = np.concatenate([np.ones((len(table), 1)), table, table**2], axis=1)
    return found


def _percents(one: Prediction) -> str:
    return f"{100 * one.gain[2]:+.1f} % ({100 * one.gain[0]:+.1f} to {100 * one.gain[3]:+.1f})"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
