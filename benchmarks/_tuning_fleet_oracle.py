"""True gains of a fleet's settings, and a tuner that knows them, with which the real one is compared.

* The *oracle* can make the same changes at the same cost, without knowing the future: every half hour it knows the true cost of
  a step, the true acceptance of that moment, and the load of the last 24 hours; it changes immediately, without a canary, to the
  best of all fixed settings and the best schedule, where that gains twice the cost of the roll.
* A *true gain* is that of the users' waiting times with each setting, by the true step times, the true acceptance of that moment,
  and the requests of up to 24 hours.
"""

from __future__ import annotations

import numpy as np

from aerie.engine.speculation import Off, SpeculationSetting, Static
from aerie.tuning.decision.forecast import Forecast, LoadDistribution
from benchmarks._tuning_fleet import DAY, INTERVAL, Fleet
from benchmarks._tuning_fleet_model import BATCH, MOST, Floats, lengths, steady
from benchmarks._tuning_fleet_scenarios import REPLICAS, TICK, TICKS, World


def true_forecast(world: World, setting: SpeculationSetting, begin: int, end: int, moment: int | None = None) -> Forecast:
    """Return the forecast of a perfect tuner, from the batches of a fleet with the setting in these ticks, and their acceptance,
    or that of one moment."""
    ticks = np.arange(end - 1, max(begin, 0) - 1, -6)
    survivals = world.survivals[ticks] if moment is None else np.repeat(world.survivals[moment : moment + 1], len(ticks), axis=0)
    rows = steady(world.target, setting, world.rates[ticks] / REPLICAS, survivals)
    steps_by_batch = rows.at.sum(axis=0)
    significant = steps_by_batch > 1e-4 * steps_by_batch.sum()
    lengths_by_k = np.average(lengths(survivals), axis=0, weights=rows.steps)
    load = LoadDistribution(
        np.arange(1, BATCH + 1, dtype=float)[significant], steps_by_batch[significant] / steps_by_batch[significant].sum()
    )
    seconds = world.target.seconds[:, significant]
    return Forecast(load, seconds[None], lengths_by_k[None], np.zeros(int(significant.sum())), np.ones(1))


def seconds_per_token(world: World, setting: SpeculationSetting, begin: int, end: int) -> float:
    """Return the seconds per token with a setting, on the requests of these ticks and the acceptance of the last one."""
    ticks = np.arange(end - 1, max(begin, 0) - 1, -6)
    survivals = np.repeat(world.survivals[end - 1 : end], len(ticks), axis=0)
    rows = steady(world.target, setting, world.rates[ticks] / REPLICAS, survivals)
    return float(rows.running.sum() / rows.tokens.sum())


def oracle(world: World, tuned_fleet: Fleet) -> tuple[Fleet, Floats]:
    """Return the oracle's fleet and, by half hour, the gain of the best setting over the one that the tuned fleet runs."""
    fleet, current, free = Fleet.of(world.start, surge=tuned_fleet.surge), world.start, 0
    gate = 2 * TICK / (DAY * TICK)
    gaps = []
    for tick in range(INTERVAL, TICKS, INTERVAL):
        ticks = np.arange(tick - 1, max(-1, tick - 1 - DAY), -8)
        rates = world.rates[ticks] / REPLICAS
        survivals = np.repeat(world.survivals[tick : tick + 1], len(ticks), axis=0)
        running = tuned_fleet.settings[int(np.bincount(np.maximum(tuned_fleet.runs[:REPLICAS, tick], 0)).argmax())]
        options: list[SpeculationSetting] = [Off(), *(Static(k) for k in range(1, MOST + 1)), current, running]
        schedule = true_forecast(world, current, tick - DAY, tick, tick).build_schedule(world.engine, current)
        if schedule is not None:
            options.append(schedule)
        seconds = {}
        for setting in dict.fromkeys(options):
            rows = steady(world.target, setting, rates, survivals)
            seconds[setting] = float(rows.running.sum() / rows.tokens.sum())
        best = min(seconds, key=lambda setting: seconds[setting])
        gaps.append(seconds[running] / seconds[best] - 1)
        if tick >= free and seconds[current] / seconds[best] - 1 > gate:
            free, current = fleet.roll(list(range(REPLICAS)), tick, best), best
    return fleet, np.array(gaps)
