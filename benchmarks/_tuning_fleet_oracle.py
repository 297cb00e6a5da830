"""What is true of a fleet's settings, and what a tuner that knows it would do: what the real one is held against.

* The *oracle* has the same levers, pays the same rolls and does not see ahead: at every half hour it knows the true cost of a
  step, the true acceptance of that moment, and the load of the last 24 hours; it changes at once, without a canary, to the best
  of all fixed settings and the best schedule, where that gains twice what the roll costs.
* A *gain* is true of what users would have waited with each setting, by the true step times, the true acceptance of that moment,
  and the requests of up to 24 hours.
"""

from __future__ import annotations

import numpy as np

from aerie.engine.speculation import Off, SpeculationSetting, Static
from aerie.tuning.decision.forecast import Forecast, LoadDistribution
from benchmarks._tuning_fleet import DAY, INTERVAL, Fleet
from benchmarks._tuning_fleet_model import BATCH, MOST, Floats, lengths, steady
from benchmarks._tuning_fleet_scenarios import REPLICAS, TICK, TICKS, World


def truth(world: World, setting: SpeculationSetting, begin: int, end: int, moment: int | None = None) -> Forecast:
    """What a perfect tuner would forecast: from the batches that a fleet with the setting has in these ticks, and their
    acceptance, or that of one moment."""
    ticks = np.arange(end - 1, max(begin, 0) - 1, -6)
    survivals = world.survivals[ticks] if moment is None else np.repeat(world.survivals[moment : moment + 1], len(ticks), axis=0)
    rows = steady(world.target, setting, world.rates[ticks] / REPLICAS, survivals)
    at = rows.at.sum(axis=0)
    seen = at > 1e-4 * at.sum()
    gained = np.average(lengths(survivals), axis=0, weights=rows.steps)
    load = LoadDistribution(np.arange(1, BATCH + 1, dtype=float)[seen], at[seen] / at[seen].sum())
    seconds = world.target.seconds[:, seen]
    return Forecast(load, seconds[None], gained[None], np.zeros(int(seen.sum())), np.ones(1))


def spent(world: World, setting: SpeculationSetting, begin: int, end: int) -> float:
    """Seconds that users wait for a token with a setting, on the requests of these ticks and the acceptance of the last."""
    ticks = np.arange(end - 1, max(begin, 0) - 1, -6)
    survivals = np.repeat(world.survivals[end - 1 : end], len(ticks), axis=0)
    rows = steady(world.target, setting, world.rates[ticks] / REPLICAS, survivals)
    return float(rows.running.sum() / rows.tokens.sum())


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
        options: list[SpeculationSetting] = [Off(), *(Static(k) for k in range(1, MOST + 1)), current, running]
        schedule = truth(world, current, tick - DAY, tick, tick).build_schedule(world.engine, current)
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
