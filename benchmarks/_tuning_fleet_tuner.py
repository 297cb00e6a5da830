"""A fleet that tunes itself: the tuner's own code gets every window, and its decisions are applied.

`aerie.tuning.telemetry` gets one window of a replica every five minutes. `aerie.tuning.decision.recommend` decides every half
hour, with each window while a canary explores, and once after it; then follow a canary (`_tuning_fleet_trial`) and a rollout.
There is no decision during any other canary, a rollout or a cooldown. In the pause after a failed trial, which ends with its
traffic, and after six hours without a change there is one every hour, unless the acceptance length has moved by 3 %.

A reading of five minutes is the mean of twenty scrapes, and has their weight in the fit (`_as_scraped`); only changes of the
batch within it are lost.
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
from benchmarks._tuning_fleet_oracle import seconds_per_token
from benchmarks._tuning_fleet_scenarios import HOUR, REPLICAS, TICK, TICKS, World
from benchmarks._tuning_fleet_trial import PREFILL, run_trial

QUIET = 6 * HOUR
"""Ticks without a canary after which decisions are half as frequent."""
LENGTH_CHANGE = 0.03
"""Relative change of the acceptance length at which decisions stay as frequent."""
BORROWED = 2
"""Number of replicas, or of pods on spare GPUs, that become canary and control."""
SCRAPES = round(TICK / 15)
"""Scrapes in a window."""
_EPOCH = 1_750_000_000.0 // 86400 * 86400


@dataclass
class Trial:
    """One canary."""

    tick: int
    setting: SpeculationSetting
    action: TuningAction
    """Purpose of the trial at its end: an exploration may have continued as a trial for a change."""
    result: str = ""
    minutes: float = 0.0


@dataclass
class Outcome:
    """A run under the tuner."""

    fleet: Fleet
    trials: list[Trial] = field(default_factory=list)
    inside: list[tuple[bool, bool]] = field(default_factory=list)
    """Predictions: whether the true gain lies inside the interval, and whether it is of a fixed setting."""
    decisions: int = 0
    insufficient: int = 0


def run_tuned(world: World, seed: int, *, surge: bool = True) -> Outcome:
    """Run the fleet under the tuner."""
    policy, random = TuningPolicy(), np.random.default_rng([seed, 7])
    fleet, current, history = Fleet.of(world.start, surge=surge), world.start, TrialHistory()
    outcome = Outcome(fleet)
    telemetry, fed, changed, free, explored_until, decided_length = TuningTelemetry(), 0, 0, 0, -1, 1.0
    edges = _edges(world)
    for tick in range(INTERVAL, TICKS):
        if tick % INTERVAL and tick != explored_until:
            continue
        if world.fresh is not None and fed < world.fresh <= tick:
            telemetry, fed, changed, history = TuningTelemetry(), world.fresh, world.fresh, TrialHistory()
        _feed(telemetry, world, fleet, fed, tick, edges, random)
        fed, now = tick, _EPOCH + tick * TICK
        if tick < free or replace(history, rolled_back_at=None, inconclusive_at=None).change_pause_reason(now, policy):
            continue
        quiet = tick - max(free, changed) > QUIET or history.change_pause_reason(now, policy) is not None
        length = float(lengths(world.survivals[tick])[3])
        if tick != explored_until and quiet and tick % (2 * INTERVAL) and abs(length / decided_length - 1) < LENGTH_CHANGE:
            continue
        decided_length = length
        context = _make_context(world, fleet, current, tick, history)
        decision = decide_setting(_as_scraped(telemetry), context, policy, seed * 1000 + tick)
        outcome.decisions += 1
        outcome.insufficient += decision.action is TuningAction.INSUFFICIENT
        outcome.inside += _covered(decision, world, current, max(changed, tick - DAY), tick)
        if decision.action not in (TuningAction.CHANGE, TuningAction.EXPLORE) or decision.setting is None:
            continue
        explore = policy.exploration_seconds if decision.action is TuningAction.EXPLORE else 0.0
        if explore and history.exploration_times and now < history.exploration_times[0] + policy.cooldown_seconds:
            continue  # as the operator does
        for place, setting in zip(fleet.arms, (decision.setting, current), strict=True):
            fleet.reload(place, tick, setting)
        begin = min(tick + 2, TICKS - 1)
        trial = Trial(tick, decision.setting, decision.action)

        def keep(
            current_tick: int,
            trial: Trial = trial,
            telemetry: TuningTelemetry = telemetry,
            current: SpeculationSetting = current,
            history: TrialHistory = history,
        ) -> bool:
            """Whether the exploration continues as a trial for a change, as the operator decides while it runs."""
            nonlocal fed
            if current_tick >= TICKS:
                return False
            _feed(telemetry, world, fleet, fed, current_tick, edges, random)
            fed = current_tick
            exploring_context = replace(
                _make_context(world, fleet, current, current_tick, history), explored_setting=trial.setting
            )
            next_decision = decide_setting(_as_scraped(telemetry), exploring_context, policy, seed * 1000 + current_tick)
            if next_decision.action is not TuningAction.CHANGE or next_decision.setting != trial.setting:
                return False
            trial.action = TuningAction.CHANGE
            return True

        verdict = run_trial(world, decision.setting, current, begin, random, explore, keep)
        explore = trial.action is TuningAction.EXPLORE
        ended = begin + math.ceil(60 * verdict.minutes / TICK)
        trial.result, trial.minutes = verdict.result, verdict.minutes
        outcome.trials.append(trial)
        if verdict.result == "Promote":
            free = fleet.roll(list(range(1, REPLICAS)), ended, decision.setting)
            if surge:  # the canary stays, in the place of the first
                fleet.runs[0, ended:] = fleet.settings.index(decision.setting)
                fleet.withdraw(free, decision.setting)
            current, changed = decision.setting, tick
            history = replace(history, changed_at=_EPOCH + free * TICK, last_drafted_at=_EPOCH + free * TICK)
        else:
            free = fleet.withdraw(ended, current)
            explored_until = free if explore else explored_until
            history = _add_failed_trial(history, outcome.trials, _EPOCH + ended * TICK)
    return outcome


def _add_failed_trial(history: TrialHistory, trials: list[Trial], ended_at: float) -> TrialHistory:
    """Add a trial that was not promoted to the history."""
    history, began = replace(history, last_drafted_at=ended_at), _EPOCH + trials[-1].tick * TICK
    match trials[-1].result:
        case "Explored":
            return replace(history, exploration_times=(ended_at, *history.exploration_times)[:MAX_TRIAL_RECORDS])
        case "Rollback":
            return replace(history, rolled_back_at=ended_at, trial_started_at=began)
        case _:
            times = sum(trial.result == "Inconclusive" for trial in trials[-MAX_TRIAL_RECORDS:])  # as many as a status has
            return replace(history, inconclusive_at=ended_at, inconclusive_count=times, trial_started_at=began)


def _edges(world: World) -> tuple[float, ...]:
    """Return the buckets around the objective, with which engines are started."""
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
    """Add the windows of some ticks to the telemetry, in order of time."""
    rates = fleet.rates(world)
    readings: list[ReplicaWindow] = []
    for index, setting in enumerate(fleet.settings):
        replicas, ticks = np.nonzero(fleet.runs[:, begin:end] == index)
        ticks = ticks + begin
        if world.lost is not None:
            scraped = world.lost[PLACES[replicas], ticks] == 0
            replicas, ticks = replicas[scraped], ticks[scraped]
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
    for reading in sorted(readings, key=lambda window: window.end):
        telemetry.add(reading)


def _as_scraped(telemetry: TuningTelemetry) -> TuningTelemetry:
    """Multiply the windows of each cell by the scrapes in a window."""
    cells = {key: replace(cell, windows=SCRAPES * cell.windows) for key, cell in telemetry.cells.items()}
    return replace(telemetry, cells=cells)


def _make_context(world: World, fleet: Fleet, current: SpeculationSetting, tick: int, history: TrialHistory) -> TuningContext:
    waiting = 10.0 if _full(world, current, tick) else 0.0
    borrowed, surge_pods = (0, BORROWED) if fleet.surge else (BORROWED, 0)
    now, objectives = _EPOCH + tick * TICK, LatencyObjectives(world.objective)
    return TuningContext(world.engine, current, MOST, REPLICAS, now, objectives, history, waiting, borrowed, surge_pods)


def _full(world: World, current: SpeculationSetting, tick: int) -> bool:
    """Whether requests are queued at the last tick."""
    last = slice(tick - 1, tick)
    rows = steady(world.target, current, world.rates[last] / REPLICAS, world.survivals[last])
    return bool(rows.full[0] > 0.02)


def _covered(
    decision: TuningDecision, world: World, current: SpeculationSetting, begin: int, tick: int
) -> list[tuple[bool, bool]]:
    if not decision.predictions:
        return []
    covered = []
    for prediction in decision.predictions:
        if prediction.setting == current or isinstance(prediction.setting, Adaptive):
            continue
        gain = seconds_per_token(world, current, begin, tick) / seconds_per_token(world, prediction.setting, begin, tick) - 1
        covered.append((prediction.gain[0] <= gain <= prediction.gain[3], not isinstance(prediction.setting, Schedule)))
    return covered
