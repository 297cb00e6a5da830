"""The rule of `aerie.analysis.switchback` on arrays: the same tests on the windows of many runs at once.

tests/unit/analysis/test_switchback_benchmark.py compares it with the operator's functions, run by run. Times per output token
are those of the steps, which take equally long here; times to first token pass, and no request fails. The measured
carry-over, which can only delay a promotion, is left out.
"""

from __future__ import annotations

import statistics
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aerie.analysis.statistics.crash_rate import SECONDS_PER_HOUR, CrashCounts
from aerie.analysis.statistics.shares import ShareCounts
from aerie.analysis.switchback.carryover import shown_share
from aerie.analysis.switchback.plan import (
    ANSWER_TOKENS_CRITERION,
    CRASHES_ALPHA,
    FAILURE_MARGIN,
    FAILURE_RATIO,
    PROMOTE_ALPHA,
    PROMOTE_DEADLINE_ALPHA,
    PROMOTE_TESTS,
    TIME_TO_FIRST_TOKEN,
    SwitchbackPlan,
)
from aerie.analysis.switchback.sign_flip import MIN_UNITS_AT_DEADLINE, STRENGTH, WEIGHTS
from aerie.analysis.switchback.verdict import MAX_LOST_PAIR_SHARE
from benchmarks._canary_model import Bools, Floats
from benchmarks._inplace_model import EARLIER_HOURS, WindowTotals

NO_PAIR = 1 << 30
Ints = npt.NDArray[np.int64]


class Outcomes(NamedTuple):
    """The outcome of each run, and the minutes after which it came; NaN without."""

    rolled_back: Bools
    promoted: Bools
    minutes: Floats


class _Test:
    """`SignFlipTest` of many runs."""

    def __init__(self, runs: int, times: tuple[float, ...]) -> None:
        self.bet = STRENGTH / np.sqrt(np.array(times))[:, None]
        self.units = np.zeros(runs, dtype=np.int64)
        self.score_sum, self.squares, self.seconds = np.zeros(runs), np.zeros(runs), np.zeros(runs)
        self.log_wealth = np.zeros((len(times), runs))

    def add_unit(self, score: Floats, seconds: float) -> None:
        counts = score != 0
        self.units += counts
        self.score_sum += score
        self.squares += score * score
        self.seconds += np.where(counts, seconds, 0.0)
        scale = np.sqrt(np.divide(self.seconds, self.squares, out=np.zeros_like(score), where=self.squares > 0))
        bet = np.abs(self.bet * (score * scale))
        self.log_wealth += np.where(score < 0, -bet, bet) - bet - np.log1p(np.exp(-2 * bet)) + np.log(2)

    def is_significant(self, alpha: float) -> Bools:
        largest = self.log_wealth.max(axis=0)
        mean = (np.array(WEIGHTS)[:, None] * np.exp(self.log_wealth - largest)).sum(axis=0)
        return np.asarray(largest + np.log(mean) >= -np.log(alpha))

    def is_significant_at_deadline(self, alpha: float) -> Bools:
        quantile = statistics.NormalDist().inv_cdf(1 - alpha)
        return np.asarray((self.units >= MIN_UNITS_AT_DEADLINE) & (self.score_sum >= quantile * np.sqrt(self.squares)))


def decide(totals: WindowTotals, effect: int, canary: Bools, plan: SwitchbackPlan) -> Outcomes:
    """Return the outcomes of the runs for one of the effects. `canary`: where a pod drafts with the canary."""
    runs, pods, windows = canary.shape
    tests = {name: test for name, test in plan.tests.items() if test.criterion.name != TIME_TO_FIRST_TOKEN}
    evidence = {name: _Test(runs, plan.tuned_times) for name in tests}
    lost, counted, finished = np.zeros(runs), np.zeros(runs), np.zeros(runs)
    crashes = np.stack([totals.earlier_restarts, np.zeros(runs, dtype=np.int64)])
    outcomes = Outcomes(np.zeros(runs, dtype=bool), np.zeros(runs, dtype=bool), np.full(runs, np.nan))
    enough_requests = _least_requests()
    previous = np.zeros((runs, pods), dtype=bool)
    for pair in range(windows // 2):
        both = slice(2 * pair, 2 * pair + 2)
        window, order = plan.schedule.window(2 * pair), canary[..., 2 * pair]
        tokens, steps, done = (
            _by_drafter(part[..., both], order) for part in (totals.tokens, totals.steps[effect], totals.finished)
        )
        ended = _by_drafter(totals.restarts[..., both], order)
        valid = totals.valid[..., both].all(axis=-1)
        lost += (~valid).sum(axis=1)
        counted += valid.sum(axis=1)
        finished += np.where(valid, done[1], 0).sum(axis=1)
        crashes += ended.sum(axis=-1).astype(np.int64)
        usable = valid & (tokens > 0).all(axis=0)
        base = np.where(usable, tokens.sum(axis=0), 1.0)
        stable_part = np.where(usable, steps[0] * tokens[1] / base, 0.0)
        canary_part = np.where(usable, steps[1] * tokens[0] / base, 0.0)
        repeats = order == previous
        previous = canary[..., 2 * pair + 1]
        shares = np.where(
            repeats, *(shown_share(window, plan.schedule.carryover_seconds, is_repeat=flag) for flag in (True, False))
        )
        for name, test in tests.items():
            ratio = 1 + test.limit * (shares if test.is_attenuated else 1.0)
            upper, lower = (stable_part, canary_part) if test.criterion.is_inverse else (canary_part, stable_part)
            if test.criterion is ANSWER_TOKENS_CRITERION:
                upper, lower = (np.where(valid, part / 2, 0.0) for part in (tokens[1], tokens[0]))
            score = test.sign * (upper - ratio * lower)
            for pod in range(0, pods, 2):
                evidence[name].add_unit(score[:, pod : pod + 2].sum(axis=1), window.counted_seconds)
        met = {name: evidence[name].is_significant(test.alpha) for name, test in tests.items()}
        if plan.schedule.window(2 * pair + 3).end_seconds > plan.max_duration_seconds:  # the last whole pair before the deadline
            for name in met.keys() & set(PROMOTE_TESTS):
                met[name] |= evidence[name].is_significant_at_deadline(PROMOTE_DEADLINE_ALPHA)
        hours = pods * plan.schedule.window(2 * pair + 1).end_seconds / 2 / SECONDS_PER_HOUR
        worse, suspicious = _crash_flags(crashes, pods * EARLIER_HOURS, round(hours, 9))
        rollback = worse | (met["FewerTokens"] & ~met["FasterOutput"]) | met["SlowerOutput"] | met["FewerAnswerTokens"]
        promote = (met["EnoughTokens"] | met["FasterOutput"]) & met["FastEnoughOutput"] & (finished >= enough_requests)
        promote &= (lost <= MAX_LOST_PAIR_SHARE * (lost + counted)) & ~suspicious & ~rollback
        open_runs = ~(outcomes.rolled_back | outcomes.promoted)
        outcomes.rolled_back[open_runs & rollback] = True
        outcomes.promoted[open_runs & promote] = True
        outcomes.minutes[open_runs & (rollback | promote)] = plan.schedule.window(2 * pair + 1).end_seconds / 60
        if (outcomes.rolled_back | outcomes.promoted).all():
            break
    return outcomes


def _by_drafter(values: Floats | Ints, canary_first: Bools) -> Floats:
    """Return the values of a pair's two windows as those of stable drafter and canary, by drafter, run and pod."""
    first, second = values[..., 0], values[..., 1]
    return np.stack([np.where(canary_first, second, first), np.where(canary_first, first, second)])


@cache
def _least_requests() -> float:
    """Return the number of the canary's requests without a failure that suffices, where the stable drafter has as many."""
    requests = 1.0
    while not ShareCounts(0.0, requests, 0.0, requests).is_below(FAILURE_RATIO, FAILURE_MARGIN, PROMOTE_ALPHA):
        requests += 1.0
    return requests


def _crash_flags(crashes: Ints, earlier_hours: float, hours: float) -> tuple[Bools, Bools]:
    """Return whether the canary's engines end more often, and whether they are suspected to."""
    rows = [_crash_flag(int(stable), int(canary), earlier_hours, hours) for stable, canary in crashes.T]
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows])


@cache
def _crash_flag(stable: int, canary: int, earlier_hours: float, hours: float) -> tuple[bool, bool]:
    counts = CrashCounts(canary, stable, hours, earlier_hours + hours)
    return counts.is_canary_worse(CRASHES_ALPHA), counts.is_suspicious
