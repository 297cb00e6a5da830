"""Results of a fleet's run under the tuner, compared with the oracle's and with no change.

Where the oracle's changes are worse than none, the regret is against no change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from aerie.tuning.decision.types import TuningAction
from benchmarks._tuning_fleet import INTERVAL, Cost, Fleet, cost, six_hours
from benchmarks._tuning_fleet_model import Floats, steady
from benchmarks._tuning_fleet_oracle import oracle
from benchmarks._tuning_fleet_scenarios import HOUR, REPLICAS, TICKS, World, draw
from benchmarks._tuning_fleet_tuner import Outcome, Trial, run_tuned

NEAR = 0.02
"""Possible gain below which a setting is the right one."""
WORTH = 0.03
"""Possible gain from which another setting is right: the least gain that the tuner acts on."""
TOLERATED = 0.01
"""Share of 1 by which six hours may be slower than without a change without counting as worse."""


@dataclass(frozen=True)
class Figures:
    """Results of one run. Shares of 1; hours."""

    regret: float
    """Share of a user's speed lost against the oracle."""
    gain: float
    """Gain in a user's speed over no change."""
    possible: float
    """The oracle's gain."""
    worst: float
    """The most that any six hours were slower than without any change."""
    worst_possible: float
    """The oracle's."""
    worst_replaced: float
    """The most that any six hours were slower than with their initial setting."""
    worst_replaced_possible: float
    """The oracle's."""
    violations: int
    """Windows beyond the objective that would have met it without the tuner."""
    hours: float | None
    """Hours from the start, or the event, until the right setting ran; infinite if it never did; None if the first was right."""
    canaries: int
    """Canaries until then."""
    rolls: int
    changes: int
    """Canaries for a change, in the whole run."""
    explored: int
    promoted: int
    wrong: int
    """Promoted settings that were slower than the one before."""
    inside: int
    predictions: int
    decisions: int
    insufficient: int
    trials: tuple[str, ...]


def run(name: str, number: int, *, surge: bool = True) -> Figures:
    """Run a scenario."""
    world = draw(name, number)
    outcome = run_tuned(world, number + 1, surge=surge)
    best, gaps = oracle(world, outcome.fleet)
    tuned_cost, oracle_cost, unchanged_cost = (cost(world, fleet) for fleet in (outcome.fleet, best, Fleet.of(world.start)))
    seconds_per_token = [waited.sum() / tokens.sum() for waited, tokens, _ in (tuned_cost, oracle_cost, unchanged_cost)]
    seconds_per_token[1] = min(seconds_per_token[1], seconds_per_token[2])
    promoted = [trial for trial in outcome.trials if trial.result == "Promote"]
    hours, canaries, rolls = _right(world, gaps, outcome)
    return Figures(
        regret=1 - seconds_per_token[1] / seconds_per_token[0],
        gain=seconds_per_token[2] / seconds_per_token[0] - 1,
        possible=seconds_per_token[2] / seconds_per_token[1] - 1,
        worst=_worst(tuned_cost, unchanged_cost),
        worst_possible=_worst(oracle_cost, unchanged_cost),
        worst_replaced=worst_replaced(world, outcome.fleet, tuned_cost),
        worst_replaced_possible=worst_replaced(world, best, oracle_cost),
        violations=int(((tuned_cost[2] > world.objective) & (unchanged_cost[2] <= world.objective)).sum()),
        hours=hours,
        canaries=canaries,
        rolls=rolls,
        changes=sum(trial.action is TuningAction.CHANGE for trial in outcome.trials),
        explored=sum(trial.action is TuningAction.EXPLORE for trial in outcome.trials),
        promoted=len(promoted),
        wrong=sum(_slower(world, outcome, trial) for trial in promoted),
        inside=sum(hit for hit, _ in outcome.inside),
        predictions=len(outcome.inside),
        decisions=outcome.decisions,
        insufficient=outcome.insufficient,
        trials=tuple(
            f"{trial.tick / HOUR:.1f} h {trial.action.value} {trial.setting}: {trial.result} after {trial.minutes:.0f} min"
            for trial in outcome.trials
        ),
    )


def _worst(costs: Cost, unchanged: Cost) -> float:
    """Return the most that any six hours were slower than without any change."""
    return float((six_hours(*costs[:2]) / six_hours(*unchanged[:2])).max()) - 1


def worst_replaced(world: World, fleet: Fleet, costs: Cost) -> float:
    """Return the most that any six hours were slower than with the setting that most replicas ran at their beginning.

    `costs`: those of the fleet.
    """
    stretches = six_hours(*costs[:2])
    columns = fleet.runs[:REPLICAS, : len(stretches)].T
    incumbents = np.array([np.bincount(column[column >= 0]).argmax() for column in columns])
    worst = 0.0
    for index in np.unique(incumbents):
        unchanged = six_hours(*cost(world, Fleet.of(fleet.settings[index]))[:2])
        worst = max(worst, float((stretches / unchanged)[incumbents == index].max()) - 1)
    return worst


def _right(world: World, gaps: Floats, outcome: Outcome) -> tuple[float | None, int, int]:
    """Return the hours until the right setting ran, and canaries and rolls until then."""
    first = world.event // INTERVAL + (2 if world.event else 0)
    if gaps[min(first, len(gaps) - 1)] < WORTH:
        return None, 0, 0
    near = np.flatnonzero(gaps[first:] < NEAR)
    last = (first + int(near[0]) + 1) * INTERVAL if len(near) else TICKS
    before = [trial for trial in outcome.trials if world.event <= trial.tick < last]
    hours = (last - world.event) / HOUR if len(near) else math.inf
    return hours, len(before), sum(trial.result == "Promote" for trial in before)


def _slower(world: World, outcome: Outcome, trial: Trial) -> bool:
    """Whether the promoted setting is slower than the one before, in the next six hours."""
    previous = world.start
    for earlier in outcome.trials:
        if earlier.tick >= trial.tick:
            break
        previous = earlier.setting if earlier.result == "Promote" else previous
    ticks = slice(trial.tick, min(trial.tick + 6 * HOUR, TICKS))
    rows = [
        steady(world.target, setting, world.rates[ticks] / REPLICAS, world.survivals[ticks])
        for setting in (previous, trial.setting)
    ]
    return bool(rows[1].running.sum() / rows[1].tokens.sum() > rows[0].running.sum() / rows[0].tokens.sum())
