"""A fleet that tunes itself: the tuner's own code, fed window by window, and what it says done.

`aerie.tuning.telemetry` gets one window of a replica every five minutes. `aerie.tuning.decision.recommend` decides every half
hour, with each window while a canary explores, and once after it; then follow a canary (`_tuning_fleet_trial`) and a rollout.
There is no decision during any other canary, a rollout or a cooldown. In the pause after a failed trial, which ends with its
traffic, and after six hours without a change there is one every hour, unless the acceptance length has moved by 3 %.

A reading of five minutes is the mean of the twenty that a scraper would have taken, and weighs as many in the fit
(`_as_scraped`); only how the batch moved within them is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from aerie.api.status import MAX_TRIAL_RECORDS
from aerie.engine.speculation import Adaptive, Schedule, SpeculationSetting
from aerie.tuning.decision.policy import LatencyObjectives, TrialHistory, TuningPolicy
from aerie.tuning.decision.recommend import decide_setting
from aerie.tuning.decision.types import TuningAction, TuningContext, TuningDecision
from aerie.tuning.telemetry import ReplicaWindow, TuningTelemetry
from benchmarks._tuning_fleet import DAY, INTERVAL, PLACES, Fleet
from benchmarks._tuning_fleet_model import MOST, counters, disturb, lengths, steady
from benchmarks._tuning_fleet_oracle import spent
from benchmarks._tuning_fleet_scenarios import HOUR, REPLICAS, TICK, TICKS, World
from benchmarks._tuning_fleet_trial import PREFILL, judged

QUIET = 6 * HOUR
"""Ticks without a canary after which it is asked half as often."""
MOVED = 0.03
"""By what share the acceptance length has to have moved to be asked as often all the same."""
LENT = 2
"""Canary and control: replicas that become them, or pods on spare GPUs."""
SCRAPES = round(TICK / 15)
"""In a window."""
_EPOCH = 1_750_000_000.0 // 86400 * 86400


@dataclass
class Trial:
    """One canary."""

    tick: int
    setting: SpeculationSetting
    action: TuningAction
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


def tuned(world: World, seed: int, *, surge: bool = True) -> Outcome:
    """The run under the tuner."""
    policy, random = TuningPolicy(), np.random.default_rng([seed, 7])
    fleet, current, history = Fleet.of(world.start, surge=surge), world.start, TrialHistory()
    found = Outcome(fleet)
    telemetry, fed, changed, free, taught, asked = TuningTelemetry(), 0, 0, 0, -1, 1.0
    edges = _edges(world)
    for tick in range(INTERVAL, TICKS):
        if tick % INTERVAL and tick != taught:
            continue
        if world.fresh is not None and fed < world.fresh <= tick:
            telemetry, fed, changed, history = TuningTelemetry(), world.fresh, world.fresh, TrialHistory()
        _feed(telemetry, world, fleet, fed, tick, edges, random)
        fed, now = tick, _EPOCH + tick * TICK
        if tick < free or replace(history, rolled_back_at=None, inconclusive_at=None).change_pause_reason(now, policy):
            continue
        quiet = tick - max(free, changed) > QUIET or history.change_pause_reason(now, policy) is not None
        length = float(lengths(world.survivals[tick])[3])
        if tick != taught and quiet and tick % (2 * INTERVAL) and abs(length / asked - 1) < MOVED:
            continue
        asked = length
        situation = _situation(world, fleet, current, tick, history)
        decision = decide_setting(_as_scraped(telemetry), situation, policy, seed * 1000 + tick)
        found.decisions += 1
        found.insufficient += decision.action is TuningAction.INSUFFICIENT
        found.inside += _covered(decision, world, current, max(changed, tick - DAY), tick)
        if decision.action not in (TuningAction.CHANGE, TuningAction.EXPLORE) or decision.setting is None:
            continue
        explore = policy.exploration_seconds if decision.action is TuningAction.EXPLORE else 0.0
        if explore and history.exploration_times and now < history.exploration_times[0] + policy.cooldown_seconds:
            continue  # as the operator does (`rollout.tuned`)
        for place, setting in zip(fleet.arms, (decision.setting, current), strict=True):
            fleet.reload(place, tick, setting)
        begin = min(tick + 2, TICKS - 1)
        trial = Trial(tick, decision.setting, decision.action)

        def keep(
            at: int,
            trial: Trial = trial,
            telemetry: TuningTelemetry = telemetry,
            current: SpeculationSetting = current,
            history: TrialHistory = history,
        ) -> bool:
            """Whether the canary that explores is to be proven, as the operator asks while it does."""
            nonlocal fed
            if at >= TICKS:
                return False
            _feed(telemetry, world, fleet, fed, at, edges, random)
            fed = at
            there = replace(_situation(world, fleet, current, at, history), explored_setting=trial.setting)
            advice = decide_setting(_as_scraped(telemetry), there, policy, seed * 1000 + at)
            if advice.action is not TuningAction.CHANGE or advice.setting != trial.setting:
                return False
            trial.action = TuningAction.CHANGE
            return True

        verdict = judged(world, decision.setting, current, begin, random, explore, keep)
        explore = trial.action is TuningAction.EXPLORE
        ended = begin + math.ceil(60 * verdict.minutes / TICK)
        trial.result, trial.minutes = verdict.result, verdict.minutes
        found.trials.append(trial)
        if verdict.result == "Promote":
            free = fleet.roll(list(range(1, REPLICAS)), ended, decision.setting)
            if surge:  # the canary stays, in the place of the first
                fleet.runs[0, ended:] = fleet.settings.index(decision.setting)
                fleet.withdraw(free, decision.setting)
            current, changed = decision.setting, tick
            history = replace(history, changed_at=_EPOCH + free * TICK, last_drafted_at=_EPOCH + free * TICK)
        else:
            free = fleet.withdraw(ended, current)
            taught = free if explore else taught
            history = _with_end(history, found.trials, _EPOCH + ended * TICK)
    return found


def _with_end(history: TrialHistory, trials: list[Trial], at: float) -> TrialHistory:
    """After a trial that was not promoted."""
    history, began = replace(history, last_drafted_at=at), _EPOCH + trials[-1].tick * TICK
    match trials[-1].result:
        case "Explored":
            return replace(history, exploration_times=(at, *history.exploration_times)[:MAX_TRIAL_RECORDS])
        case "Rollback":
            return replace(history, rolled_back_at=at, trial_started_at=began)
        case _:
            times = sum(one.result == "Inconclusive" for one in trials[-MAX_TRIAL_RECORDS:])  # as many as a status has
            return replace(history, inconclusive_at=at, inconclusive_count=times, trial_started_at=began)


def _edges(world: World) -> tuple[float, ...]:
    """Buckets around the objective: engines that have one are started with fitting ones."""
    middle = world.objective if math.isfinite(world.objective) else 0.01
    return tuple(middle * 1.25**power for power in range(-10, 7))


def _feed(
    telemetry: TuningTelemetry,
    world: World,
    fleet: Fleet,
    begin: int,
    end: int,
    edges: tuple[float, ...],
    random: np.random.Generator,
) -> None:
    """The windows of some ticks, in order of time."""
    rates = fleet.rates(world)
    readings: list[ReplicaWindow] = []
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
            readings.append(ReplicaWindow(f"pod-{replica}-{since}", _EPOCH + (tick + 1) * TICK, setting, window, age))
    for reading in sorted(readings, key=lambda one: one.end):
        telemetry.add(reading)


def _as_scraped(telemetry: TuningTelemetry) -> TuningTelemetry:
    """With as many windows in each cell as there would have been."""
    cells = {key: replace(cell, windows=SCRAPES * cell.windows) for key, cell in telemetry.cells.items()}
    return replace(telemetry, cells=cells)


def _situation(world: World, fleet: Fleet, current: SpeculationSetting, tick: int, history: TrialHistory) -> TuningContext:
    waiting = 10.0 if _full(world, current, tick) else 0.0
    lent, extra = (0, LENT) if fleet.surge else (LENT, 0)
    now, objectives = _EPOCH + tick * TICK, LatencyObjectives(world.objective)
    return TuningContext(world.engine, current, MOST, REPLICAS, now, objectives, history, waiting, lent, extra)


def _full(world: World, current: SpeculationSetting, tick: int) -> bool:
    """Whether requests wait at the last tick."""
    last = slice(tick - 1, tick)
    rows = steady(world.target, current, world.rates[last] / REPLICAS, world.survivals[last])
    return bool(rows.full[0] > 0.02)


def _covered(
    decision: TuningDecision, world: World, current: SpeculationSetting, begin: int, tick: int
) -> list[tuple[bool, bool]]:
    if not decision.predictions:
        return []
    found = []
    for one in decision.predictions:
        if one.setting == current or isinstance(one.setting, Adaptive):
            continue
        gain = spent(world, current, begin, tick) / spent(world, one.setting, begin, tick) - 1
        found.append((one.gain[0] <= gain <= one.gain[3], not isinstance(one.setting, Schedule)))
    return found
