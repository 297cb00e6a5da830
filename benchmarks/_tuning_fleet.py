"""Fleets that tune themselves for three days: the tuner's own code, fed window by window, beside an oracle and beside no change.

Each run feeds `aerie.tuning.telemetry` one reading a replica every five minutes, asks `aerie.tuning.decide` every half hour, with
each reading while a canary explores, and once when it has, and does what it says: a canary (`_tuning_fleet_trial`), then a roll,
one replica at a time, five minutes each. Canary, control and what loads in a roll are on spare GPUs (`surge`, as by default);
without them they take the places of replicas, and the others carry the load. While any other canary, a roll or a cooldown is
under way no decision is asked for, since none could be acted on; in the pause after a trial that failed, which ends with its
traffic, and after six hours in which nothing was done it is asked every hour, unless the acceptance length has moved by 3 %.

A reading of five minutes is the mean of the twenty that a scraper would have taken, and weighs as many in the fit
(`_as_scraped`); only how the batch moved within them is lost.

What counts is what users wait for a token, all tokens of the run together, each setting at the batches that it leads to itself.

* The *oracle* has the same levers, pays the same rolls and does not see ahead: at every half hour it knows the true cost of a
  step, the true acceptance of that moment, and the load of the last 24 hours; it changes at once, without a canary, to the best
  of all fixed settings and the best schedule, where that gains twice what the roll costs. Where it would have done better to
  change nothing, that is what counts.
* A *predicted gain* is held against what users would have waited with each setting, by the true step times, the true acceptance
  of that moment, and the requests of up to 24 hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from aerie.api.status import MOST_TRIED
from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, Static
from aerie.tuning.decide import decide
from aerie.tuning.decision import Action, Decision, Situation
from aerie.tuning.forecast import Forecast, Load
from aerie.tuning.policy import History, Objectives, Policy
from aerie.tuning.telemetry import Reading, Telemetry
from benchmarks._tuning_fleet_model import BATCH, MOST, USERS, Floats, Ints, counters, disturb, lengths, steady
from benchmarks._tuning_fleet_scenarios import HOUR, REPLICAS, TICK, TICKS, World, draw
from benchmarks._tuning_fleet_trial import PREFILL, judged

INTERVAL = 6
"""Ticks between decisions."""
QUIET = 6 * HOUR
"""Ticks without a canary after which it is asked half as often."""
MOVED = 0.03
"""By what share the acceptance length has to have moved to be asked as often all the same."""
LENT = 2
"""Replicas that become canary and control, where no GPUs are spare."""
PLACES = np.array([*range(REPLICAS), 0, 1])
"""Whose router weight and speed each replica has: spare ones are like the first two."""
SCRAPES = round(TICK / 15)
"""In a window."""
DAY = 24 * HOUR
NEAR = 0.02
"""Gain still to be had below which a setting is the right one."""
WORTH = 0.03
"""And from which on a run is one in which another setting is right: the least gain that is acted on."""
TOLERATED = 0.01
_TAIL = math.exp(1.645 * USERS - USERS**2 / 2)
_EPOCH = 1_750_000_000.0 // 86400 * 86400


@dataclass
class Fleet:
    """Which setting each replica runs, tick by tick; the last two are canary and control on spare GPUs, where there are any."""

    settings: list[Setting]
    runs: Ints
    """Replica by tick: index of the setting; -1 while it loads, or is not there."""
    since: Ints
    """Replica by tick: when its engine began."""
    surge: bool

    @classmethod
    def of(cls, setting: Setting, *, surge: bool = True) -> Fleet:
        runs = np.zeros((len(PLACES), TICKS), dtype=int)
        runs[REPLICAS:] = -1
        return cls([setting], runs, np.full(runs.shape, -HOUR), surge)

    @property
    def arms(self) -> tuple[int, int]:
        """Where canary and control are."""
        return (REPLICAS, REPLICAS + 1) if self.surge else (0, 1)

    def reload(self, replica: int, tick: int, setting: Setting) -> None:
        """With the setting from the next tick on, and out for this one; unless that runs on spare GPUs until it serves."""
        if setting not in self.settings:
            self.settings.append(setting)
        if not self.surge or replica >= REPLICAS:
            self.runs[replica, tick : tick + 1] = -1
        self.runs[replica, tick + 1 :] = self.settings.index(setting)
        self.since[replica, tick + 1 :] = tick + 1

    def roll(self, replicas: list[int], tick: int, setting: Setting) -> int:
        """One after the other; returns when all are done."""
        for replica in replicas:
            self.reload(replica, tick, setting)
            tick += 1
        return tick

    def withdraw(self, tick: int, setting: Setting) -> int:
        """Canary and control are no more, and their replicas run the setting; returns when they do."""
        if self.surge:
            self.runs[REPLICAS:, tick:] = -1
            return tick
        for replica in self.arms:
            self.reload(replica, tick, setting)
        return tick + 1

    def rates(self, world: World) -> Floats:
        """Requests per second, replica by tick. More than `REPLICAS` that serve get more requests, not fewer each: spare GPUs are
        not to make anybody faster."""
        serves = self.runs >= 0
        weights = np.where(serves, world.shares[PLACES], 0.0)
        more = np.maximum(serves.sum(axis=0) / REPLICAS, 1.0)
        return np.asarray(world.rates * more * weights / weights.sum(axis=0))


@dataclass
class Trial:
    """One canary."""

    tick: int
    setting: Setting
    action: Action
    """What it was for at its end: one that explored may have been kept for a change."""
    result: str = ""
    minutes: float = 0.0


@dataclass
class Outcome:
    """A run under the tuner."""

    fleet: Fleet
    trials: list[Trial] = field(default_factory=list)
    inside: list[tuple[bool, bool]] = field(default_factory=list)
    """By prediction: whether the true gain lies inside the interval, and whether it is of a fixed setting."""
    decisions: int = 0
    insufficient: int = 0


# ---------------------------------------------------------------------------------------------------------------- the tuner
def tuned(world: World, seed: int, *, surge: bool = True) -> Outcome:
    """The run under the tuner."""
    policy, random = Policy(), np.random.default_rng([seed, 7])
    fleet, current, history = Fleet.of(world.start, surge=surge), world.start, History()
    found = Outcome(fleet)
    telemetry, fed, changed, free, taught, asked = Telemetry(), 0, 0, 0, -1, 1.0
    edges = _edges(world)
    for tick in range(INTERVAL, TICKS):
        if tick % INTERVAL and tick != taught:
            continue
        if world.fresh is not None and fed < world.fresh <= tick:
            telemetry, fed, changed, history = Telemetry(), world.fresh, world.fresh, History()
        _feed(telemetry, world, fleet, fed, tick, edges, random)
        fed, now = tick, _EPOCH + tick * TICK
        if tick < free or replace(history, rolled_back=None, undecided=None).cooling(now, policy):
            continue
        quiet = tick - max(free, changed) > QUIET or history.cooling(now, policy) is not None
        length = float(lengths(world.survivals[tick])[3])
        if tick != taught and quiet and tick % (2 * INTERVAL) and abs(length / asked - 1) < MOVED:
            continue
        asked = length
        situation = _situation(world, fleet, current, tick, history)
        decision = decide(_as_scraped(telemetry), situation, policy, seed * 1000 + tick)
        found.decisions += 1
        found.insufficient += decision.action is Action.INSUFFICIENT
        found.inside += _covered(decision, world, current, max(changed, tick - DAY), tick)
        if decision.action not in (Action.CHANGE, Action.EXPLORE) or decision.setting is None:
            continue
        explore = policy.canary if decision.action is Action.EXPLORE else 0.0
        if explore and history.explored and now < history.explored[0] + policy.cooldown:
            continue  # as the operator does (`rollout.tuned`)
        for place, setting in zip(fleet.arms, (decision.setting, current), strict=True):
            fleet.reload(place, tick, setting)
        begin = min(tick + 2, TICKS - 1)
        trial = Trial(tick, decision.setting, decision.action)

        def keep(
            at: int,
            trial: Trial = trial,
            telemetry: Telemetry = telemetry,
            current: Setting = current,
            history: History = history,
        ) -> bool:
            """Whether the canary that explores is to be proven, as the operator asks while it does."""
            nonlocal fed
            if at >= TICKS:
                return False
            _feed(telemetry, world, fleet, fed, at, edges, random)
            fed = at
            there = replace(_situation(world, fleet, current, at, history), exploring=trial.setting)
            advice = decide(_as_scraped(telemetry), there, policy, seed * 1000 + at)
            if advice.action is not Action.CHANGE or advice.setting != trial.setting:
                return False
            trial.action = Action.CHANGE
            return True

        verdict = judged(world, decision.setting, current, begin, random, explore, keep)
        explore = trial.action is Action.EXPLORE
        ended = begin + math.ceil(60 * verdict.minutes / TICK)
        trial.result, trial.minutes = verdict.result, verdict.minutes
        found.trials.append(trial)
        if verdict.result == "Promote":
            free = fleet.roll(list(range(1, REPLICAS)), ended, decision.setting)
            if surge:  # the canary stays, in the place of the first
                fleet.runs[0, ended:] = fleet.settings.index(decision.setting)
                fleet.withdraw(free, decision.setting)
            current, changed = decision.setting, tick
            history = replace(history, changed=_EPOCH + free * TICK, speculated=_EPOCH + free * TICK)
        else:
            free = fleet.withdraw(ended, current)
            taught = free if explore else taught
            history = _with_end(history, found.trials, _EPOCH + ended * TICK)
    return found


def _with_end(history: History, trials: list[Trial], at: float) -> History:
    """After a trial that was not promoted."""
    history, began = replace(history, speculated=at), _EPOCH + trials[-1].tick * TICK
    match trials[-1].result:
        case "Explored":
            return replace(history, explored=(at, *history.explored)[:MOST_TRIED])
        case "Rollback":
            return replace(history, rolled_back=at, tried=began)
        case _:
            times = sum(one.result == "Inconclusive" for one in trials[-MOST_TRIED:])  # as many as a status has
            return replace(history, undecided=at, undecided_times=times, tried=began)


def _edges(world: World) -> tuple[float, ...]:
    """Buckets around the objective: engines that have one are started with fitting ones."""
    middle = world.objective if math.isfinite(world.objective) else 0.01
    return tuple(middle * 1.25**power for power in range(-10, 7))


def _feed(
    telemetry: Telemetry, world: World, fleet: Fleet, begin: int, end: int, edges: tuple[float, ...], random: np.random.Generator
) -> None:
    """The windows of some ticks, in order of time."""
    rates = fleet.rates(world)
    readings: list[Reading] = []
    for index, setting in enumerate(fleet.settings):
        replicas, ticks = np.nonzero(fleet.runs[:, begin:end] == index)
        ticks = ticks + begin
        if world.lost is not None:
            seen = world.lost[PLACES[replicas], ticks] == 0
            replicas, ticks = replicas[seen], ticks[seen]
        if not len(ticks):
            continue
        rate, survivals = rates[replicas, ticks], world.survivals[ticks]
        off = disturb(rate, survivals, TICK, random)
        rate = rate * off.work
        rows = steady(world.target, setting, rate, off.survivals, world.slowness[PLACES[replicas], ticks] * off.clock)
        waits = PREFILL * np.exp(0.1 * random.standard_normal(len(ticks)))
        windows = counters(rows, TICK, off.survivals, rate, setting, edges, waits)
        for replica, tick, window in zip(replicas.tolist(), ticks.tolist(), windows, strict=True):
            since = int(fleet.since[replica, tick])
            age = (tick - since) * TICK if since >= 0 else math.inf
            readings.append(Reading(f"pod-{replica}-{since}", _EPOCH + (tick + 1) * TICK, setting, window, age))
    for reading in sorted(readings, key=lambda one: one.end):
        telemetry.add(reading)


def _as_scraped(telemetry: Telemetry) -> Telemetry:
    """With as many windows in each cell as there would have been."""
    cells = {key: replace(cell, windows=SCRAPES * cell.windows) for key, cell in telemetry.cells.items()}
    return replace(telemetry, cells=cells)


def _situation(world: World, fleet: Fleet, current: Setting, tick: int, history: History) -> Situation:
    waiting = 10.0 if _full(world, current, tick) else 0.0
    now, lent = _EPOCH + tick * TICK, 0 if fleet.surge else LENT
    return Situation(world.engine, current, MOST, REPLICAS, now, Objectives(world.objective), history, waiting, lent)


def _full(world: World, current: Setting, tick: int) -> bool:
    """Whether requests wait at the last tick."""
    last = slice(tick - 1, tick)
    rows = steady(world.target, current, world.rates[last] / REPLICAS, world.survivals[last])
    return bool(rows.full[0] > 0.02)


# ---------------------------------------------------------------------------------------------------------------- the truth
def truth(world: World, setting: Setting, begin: int, end: int, moment: int | None = None) -> Forecast:
    """What a perfect tuner would forecast: from the batches that a fleet with the setting has in these ticks, and their
    acceptance, or that of one moment."""
    ticks = np.arange(end - 1, max(begin, 0) - 1, -6)
    survivals = world.survivals[ticks] if moment is None else np.repeat(world.survivals[moment : moment + 1], len(ticks), axis=0)
    rows = steady(world.target, setting, world.rates[ticks] / REPLICAS, survivals)
    at = rows.at.sum(axis=0)
    seen = at > 1e-4 * at.sum()
    gained = np.average(lengths(survivals), axis=0, weights=rows.steps)
    load = Load(np.arange(1, BATCH + 1, dtype=float)[seen], at[seen] / at[seen].sum())
    seconds = world.target.seconds[:, seen]
    return Forecast(load, seconds[None], gained[None], np.zeros(int(seen.sum())), np.ones(1))


def spent(world: World, setting: Setting, begin: int, end: int) -> float:
    """Seconds that users wait for a token with a setting, on the requests of these ticks and the acceptance of the last."""
    ticks = np.arange(end - 1, max(begin, 0) - 1, -6)
    survivals = np.repeat(world.survivals[end - 1 : end], len(ticks), axis=0)
    rows = steady(world.target, setting, world.rates[ticks] / REPLICAS, survivals)
    return float(rows.running.sum() / rows.tokens.sum())


def _covered(decision: Decision, world: World, current: Setting, begin: int, tick: int) -> list[tuple[bool, bool]]:
    if not decision.predictions:
        return []
    found = []
    for one in decision.predictions:
        if one.setting == current or isinstance(one.setting, Adaptive):
            continue
        gain = spent(world, current, begin, tick) / spent(world, one.setting, begin, tick) - 1
        found.append((one.gain[0] <= gain <= one.gain[3], not isinstance(one.setting, Schedule)))
    return found


Cost = tuple[Floats, Floats, Floats]


def cost(world: World, fleet: Fleet) -> Cost:
    """Seconds that users waited and tokens that they got, by tick, and the 95 % point of the time per output token."""
    rates = fleet.rates(world)
    waited, tokens, worst = np.zeros(TICKS), np.zeros(TICKS), np.zeros(TICKS)
    for index, setting in enumerate(fleet.settings):
        replicas, ticks = np.nonzero(fleet.runs == index)
        if not len(ticks):
            continue
        slowness = world.slowness[PLACES[replicas], ticks]
        rows = steady(world.target, setting, rates[replicas, ticks], world.survivals[ticks], slowness)
        np.add.at(waited, ticks, rows.running)
        np.add.at(tokens, ticks, rows.tokens)
        np.maximum.at(worst, ticks, rows.per_token * _TAIL)
    return waited, tokens, worst


# --------------------------------------------------------------------------------------------------------------- the oracle
def oracle(world: World, mine: Fleet) -> tuple[Fleet, Floats]:
    """The reachable oracle's fleet; and, by half hour, what the best setting would gain over the one that `mine` runs."""
    fleet, current, free = Fleet.of(world.start, surge=mine.surge), world.start, 0
    gate = 2 * TICK / (DAY * TICK)
    gaps = []
    for tick in range(INTERVAL, TICKS, INTERVAL):
        ticks = np.arange(tick - 1, max(-1, tick - 1 - DAY), -8)
        rates = world.rates[ticks] / REPLICAS
        survivals = np.repeat(world.survivals[tick : tick + 1], len(ticks), axis=0)
        running = mine.settings[int(np.bincount(np.maximum(mine.runs[:REPLICAS, tick], 0)).argmax())]
        options: list[Setting] = [Off(), *(Static(k) for k in range(1, MOST + 1)), current, running]
        schedule = truth(world, current, tick - DAY, tick, tick).schedule(world.engine, current)
        if schedule is not None:
            options.append(schedule)
        spent = {}
        for setting in dict.fromkeys(options):
            rows = steady(world.target, setting, rates, survivals)
            spent[setting] = float(rows.running.sum() / rows.tokens.sum())
        best = min(spent, key=lambda one: spent[one])
        gaps.append(spent[running] / spent[best] - 1)
        if tick >= free and spent[current] / spent[best] - 1 > gate:
            free, current = fleet.roll(list(range(REPLICAS)), tick, best), best
    return fleet, np.array(gaps)


# --------------------------------------------------------------------------------------------------------------- one figure
@dataclass(frozen=True)
class Figures:
    """What one run came to. Shares of 1; hours."""

    regret: float
    """Of a user's speed, against the oracle."""
    gain: float
    """Of the same over no change."""
    possible: float
    """The oracle's."""
    worst: float
    """The most that any six hours were slower than without any change."""
    worst_possible: float
    """The oracle's."""
    worst_replaced: float
    """The most that any six hours were slower than with the setting kept that ran at their beginning."""
    worst_replaced_possible: float
    """The oracle's."""
    violations: int
    """Windows beyond the objective that would not have been without the tuner."""
    hours: float | None
    """From the beginning, or the event, until the right setting ran; infinite if it never did; None where the first was right."""
    canaries: int
    """Until then."""
    rolls: int
    changes: int
    """Canaries that were meant to change something, in the whole run."""
    explored: int
    promoted: int
    wrong: int
    """Of those, how many were slower than what ran before."""
    inside: int
    predictions: int
    decisions: int
    insufficient: int
    trials: tuple[str, ...]


def run(name: str, number: int, *, surge: bool = True) -> Figures:
    """A run of a scenario."""
    world = draw(name, number)
    found = tuned(world, number + 1, surge=surge)
    best, gaps = oracle(world, found.fleet)
    mine, theirs, none = (cost(world, fleet) for fleet in (found.fleet, best, Fleet.of(world.start)))
    each = [waited.sum() / tokens.sum() for waited, tokens, _ in (mine, theirs, none)]
    each[1] = min(each[1], each[2])
    promoted = [one for one in found.trials if one.result == "Promote"]
    hours, canaries, rolls = _right(world, gaps, found)
    return Figures(
        regret=1 - each[1] / each[0],
        gain=each[2] / each[0] - 1,
        possible=each[2] / each[1] - 1,
        worst=_worst(mine, none),
        worst_possible=_worst(theirs, none),
        worst_replaced=worst_replaced(world, found.fleet, mine),
        worst_replaced_possible=worst_replaced(world, best, theirs),
        violations=int(((mine[2] > world.objective) & (none[2] <= world.objective)).sum()),
        hours=hours,
        canaries=canaries,
        rolls=rolls,
        changes=sum(one.action is Action.CHANGE for one in found.trials),
        explored=sum(one.action is Action.EXPLORE for one in found.trials),
        promoted=len(promoted),
        wrong=sum(_slower(world, found, one) for one in promoted),
        inside=sum(hit for hit, _ in found.inside),
        predictions=len(found.inside),
        decisions=found.decisions,
        insufficient=found.insufficient,
        trials=tuple(
            f"{one.tick / HOUR:.1f} h {one.action.value} {one.setting}: {one.result} after {one.minutes:.0f} min"
            for one in found.trials
        ),
    )


def _worst(costs: Cost, none: Cost) -> float:
    """The most that any six hours were slower than without any change."""
    return float((_windows(*costs[:2]) / _windows(*none[:2])).max()) - 1


def worst_replaced(world: World, fleet: Fleet, costs: Cost) -> float:
    """The most that any six hours were slower than with the setting kept that most replicas ran at their beginning. `costs`: the
    fleet's."""
    windows = _windows(*costs[:2])
    columns = fleet.runs[:REPLICAS, : len(windows)].T
    incumbents = np.array([np.bincount(column[column >= 0]).argmax() for column in columns])
    worst = 0.0
    for index in np.unique(incumbents):
        kept = _windows(*cost(world, Fleet.of(fleet.settings[index]))[:2])
        worst = max(worst, float((windows / kept)[incumbents == index].max()) - 1)
    return worst


def _windows(waited: Floats, tokens: Floats, length: int = 6 * HOUR) -> Floats:
    """Seconds per token in every stretch of six hours."""
    sums = [np.concatenate([[0.0], np.cumsum(each)]) for each in (waited, tokens)]
    spans = [each[length:] - each[:-length] for each in sums]
    return np.asarray(spans[0] / spans[1])


def _right(world: World, gaps: Floats, found: Outcome) -> tuple[float | None, int, int]:
    """Hours until the right setting ran, and canaries and rolls until then."""
    first = world.event // INTERVAL + (2 if world.event else 0)
    if gaps[min(first, len(gaps) - 1)] < WORTH:
        return None, 0, 0
    near = np.flatnonzero(gaps[first:] < NEAR)
    last = (first + int(near[0]) + 1) * INTERVAL if len(near) else TICKS
    before = [one for one in found.trials if world.event <= one.tick < last]
    hours = (last - world.event) / HOUR if len(near) else math.inf
    return hours, len(before), sum(one.result == "Promote" for one in before)


def _slower(world: World, found: Outcome, trial: Trial) -> bool:
    """Whether what was promoted is slower than what ran before, in the six hours from then on."""
    before = world.start
    for one in found.trials:
        if one.tick >= trial.tick:
            break
        before = one.setting if one.result == "Promote" else before
    ticks = slice(trial.tick, min(trial.tick + 6 * HOUR, TICKS))
    rows = [steady(world.target, one, world.rates[ticks] / REPLICAS, world.survivals[ticks]) for one in (before, trial.setting)]
    return bool(rows[1].running.sum() / rows[1].tokens.sum() > rows[0].running.sum() / rows[0].tokens.sum())
