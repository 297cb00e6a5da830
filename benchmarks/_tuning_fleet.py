"""A fleet of six replicas for three days: which setting each replica runs, and how long users wait for a token.

A roll takes one replica at a time, five minutes each. Canary, control and the loading pods of a roll are on spare GPUs (`surge`,
the default); without them they take the places of replicas, and the others serve the load. The cost is the users' seconds per
token, over all tokens, each setting at the batches that result from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from aerie.engine.speculation import SpeculationSetting
from benchmarks._tuning_fleet_model import USERS, Floats, Ints, steady
from benchmarks._tuning_fleet_scenarios import HOUR, REPLICAS, TICKS, World

INTERVAL = 6
"""Ticks between decisions."""
DAY = 24 * HOUR
PLACES = np.array([*range(REPLICAS), 0, 1])
"""The replica whose router weight and speed each one has: spare ones are like the first two."""
_TAIL = math.exp(1.645 * USERS - USERS**2 / 2)


@dataclass
class Fleet:
    """The setting of each replica, tick by tick; the last two are canary and control on spare GPUs, if there are any."""

    settings: list[SpeculationSetting]
    runs: Ints
    """Replica by tick: index of the setting; -1 while it loads, or does not exist."""
    since: Ints
    """Replica by tick: the start of its engine."""
    surge: bool

    @classmethod
    def of(cls, setting: SpeculationSetting, *, surge: bool = True) -> Fleet:
        runs = np.zeros((len(PLACES), TICKS), dtype=int)
        runs[REPLICAS:] = -1
        return cls([setting], runs, np.full(runs.shape, -HOUR), surge)

    @property
    def arms(self) -> tuple[int, int]:
        """The replicas that are canary and control."""
        return (REPLICAS, REPLICAS + 1) if self.surge else (0, 1)

    def reload(self, replica: int, tick: int, setting: SpeculationSetting) -> None:
        """Reload a replica with the setting: it serves from the next tick on, and is out for this one without spare GPUs."""
        if setting not in self.settings:
            self.settings.append(setting)
        if not self.surge or replica >= REPLICAS:
            self.runs[replica, tick : tick + 1] = -1
        self.runs[replica, tick + 1 :] = self.settings.index(setting)
        self.since[replica, tick + 1 :] = tick + 1

    def roll(self, replicas: list[int], tick: int, setting: SpeculationSetting) -> int:
        """Reload replicas one after the other; return the tick at which all are done."""
        for replica in replicas:
            self.reload(replica, tick, setting)
            tick += 1
        return tick

    def withdraw(self, tick: int, setting: SpeculationSetting) -> int:
        """End canary and control; return the tick at which their replicas run the setting."""
        if self.surge:
            self.runs[REPLICAS:, tick:] = -1
            return tick
        for replica in self.arms:
            self.reload(replica, tick, setting)
        return tick + 1

    def rates(self, world: World) -> Floats:
        """Return the requests per second, replica by tick. Those on spare GPUs get additional requests, by their weights, so that
        they do not change the load of the others."""
        weights = np.where(self.runs >= 0, world.shares[PLACES], 0.0)
        return np.asarray(world.rates * weights / weights[:REPLICAS].sum(axis=0))


Cost = tuple[Floats, Floats, Floats]


def cost(world: World, fleet: Fleet) -> Cost:
    """Return the seconds that users waited and the tokens they got, by tick, and the 95 % point of the time per output token."""
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


def six_hours(waited: Floats, tokens: Floats, length: int = 6 * HOUR) -> Floats:
    """Return the seconds per token of every six hours."""
    sums = [np.concatenate([[0.0], np.cumsum(each)]) for each in (waited, tokens)]
    spans = [each[length:] - each[:-length] for each in sums]
    return np.asarray(spans[0] / spans[1])
