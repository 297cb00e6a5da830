"""What a fleet's run under the tuner came to, beside the oracle's and beside no change.

Where the oracle would have done better to change nothing, that is what its regret is held against.
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
from benchmarks._tuning_fleet_tuner import Outcome, Trial, tuned

NEAR = 0.02
"""Gain still to be had below which a setting is the right one."""
WORTH = 0.03
"""And from which on a run is one in which another setting is right: the least gain that is acted on."""
TOLERATED = 0.01
"""Share of 1 by which six hours may be slower than without a change and still count as no worse."""


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
        changes=sum(one.action is TuningAction.CHANGE for one in found.trials),
        explored=sum(one.action is TuningAction.EXPLORE for one in found.trials),
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
    return float((six_hours(*costs[:2]) / six_hours(*none[:2])).max()) - 1


def worst_replaced(world: World, fleet: Fleet, costs: Cost) -> float:
    """The most that any six hours were slower than with the setting kept that most replicas ran at their beginning. `costs`: the
    fleet's."""
    stretches = six_hours(*costs[:2])
    columns = fleet.runs[:REPLICAS, : len(stretches)].T
    incumbents = np.array([np.bincount(column[column >= 0]).argmax() for column in columns])
    worst = 0.0
    for index in np.unique(incumbents):
        kept = six_hours(*cost(world, Fleet.of(fleet.settings[index]))[:2])
        worst = max(worst, float((stretches / kept)[incumbents == index].max()) - 1)
    return worst


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
