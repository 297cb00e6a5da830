"""Simulated trials by turns under the rule of `aerie.forecast.turns_rule`, with lost windows and engines that end.

tests/unit/analysis/test_switchback_benchmark.py compares it with the operator's functions, run by run. Times per output token
are those of the steps, which take equally long here.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aerie.analysis.statistics.crash_rate import SECONDS_PER_HOUR, CrashCounts
from aerie.analysis.switchback.plan import CRASHES_ALPHA, SwitchbackPlan
from aerie.analysis.switchback.verdict import MAX_LOST_PAIR_SHARE
from aerie.forecast.turns_rule import PairCounts, TurnsRule
from benchmarks._canary_model import Bools, Floats
from benchmarks._inplace_model import EARLIER_HOURS, WindowTotals

Ints = npt.NDArray[np.int64]


class Outcomes(NamedTuple):
    """The outcome of each run, and the minutes after which it came; NaN without."""

    rolled_back: Bools
    promoted: Bools
    minutes: Floats


def decide(totals: WindowTotals, effect: int, canary: Bools, plan: SwitchbackPlan) -> Outcomes:
    """Return the outcomes of the runs for one of the effects. `canary`: where a pod drafts with the canary."""
    runs, pods, windows = canary.shape
    rule = TurnsRule(plan, runs)
    lost, counted = np.zeros(runs), np.zeros(runs)
    crashes = np.stack([totals.earlier_restarts, np.zeros(runs, dtype=np.int64)])
    previous = np.zeros((runs, pods), dtype=bool)
    for pair in range(windows // 2):
        both = slice(2 * pair, 2 * pair + 2)
        order = canary[..., 2 * pair]
        valid = totals.valid[..., both].all(axis=-1)
        tokens, steps, finished = (
            np.where(valid, _by_drafter(part[..., both], order), 0.0)
            for part in (totals.tokens, totals.steps[effect], totals.finished)
        )
        crashes += _by_drafter(totals.restarts[..., both], order).sum(axis=-1).astype(np.int64)
        lost += (~valid).sum(axis=1)
        counted += valid.sum(axis=1)
        hours = pods * plan.schedule.window(2 * pair + 1).end_seconds / 2 / SECONDS_PER_HOUR
        worse, suspicious = _crash_flags(crashes, pods * EARLIER_HOURS, round(hours, 9))
        is_held = suspicious | (lost > MAX_LOST_PAIR_SHARE * (lost + counted))
        rule.close_pair(pair, PairCounts(tokens, steps, steps, finished), order == previous, fails=worse, is_held=is_held)
        previous = canary[..., 2 * pair + 1]
        if not rule.is_open.any():
            break
    return Outcomes(rule.rolled_back, rule.promoted, rule.end_seconds / 60)


def _by_drafter(values: Floats | Ints, canary_first: Bools) -> Floats:
    """Return the values of a pair's two windows as those of stable drafter and canary, by drafter, run and pod."""
    first, second = values[..., 0], values[..., 1]
    return np.stack([np.where(canary_first, second, first), np.where(canary_first, first, second)])


def _crash_flags(crashes: Ints, earlier_hours: float, hours: float) -> tuple[Bools, Bools]:
    """Return whether the canary's engines end more often, and whether they are suspected to."""
    rows = [_crash_flag(int(stable), int(canary), earlier_hours, hours) for stable, canary in crashes.T]
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows])


@cache
def _crash_flag(stable: int, canary: int, earlier_hours: float, hours: float) -> tuple[bool, bool]:
    counts = CrashCounts(canary, stable, hours, earlier_hours + hours)
    return counts.is_canary_worse(CRASHES_ALPHA), counts.is_suspicious
