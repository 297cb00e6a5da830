"""The rule of `aerie.analysis.switchback` on arrays: the same tests on the pairs of windows of many trials at once.

tests/unit/analysis/test_switchback_benchmark.py compares it with the operator's functions, run by run. Times to first token pass,
and no request fails. The measured carry-over, which can only delay a promotion, is left out.
"""

from __future__ import annotations

import statistics
from functools import cache
from typing import NamedTuple

import numpy as np

from aerie.analysis.statistics.shares import ShareCounts
from aerie.analysis.switchback.carryover import shown_share
from aerie.analysis.switchback.plan import (
    ANSWER_TOKENS,
    FAILURE_MARGIN,
    FAILURE_RATIO,
    PROMOTE_ALPHA,
    PROMOTE_DEADLINE_ALPHA,
    PROMOTE_TESTS,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    TOKENS_PER_STEP,
    SwitchbackPlan,
)
from aerie.analysis.switchback.sign_flip import MIN_UNITS_AT_DEADLINE, STRENGTH, WEIGHTS
from aerie.analysis.switchback.verdict import MIN_QUIET_PAIRS
from aerie.forecast.outcomes import Bools, Floats


class PairCounts(NamedTuple):
    """Counts of a pair of windows by drafter (the stable one, the canary's), run and pod; 0 where they are lost."""

    tokens: Floats
    steps: Floats
    seconds: Floats
    """Seconds for the tokens, in any unit."""
    finished: Floats


class TurnsRule:
    """Trials by turns with one plan, pair by pair. `min_seconds`: time before which none promotes."""

    def __init__(self, plan: SwitchbackPlan, runs: int, min_seconds: float = 0.0) -> None:
        self._plan, self._min_seconds = plan, min_seconds
        self._tests = {name: test for name, test in plan.tests.items() if test.criterion.name != TIME_TO_FIRST_TOKEN}
        self._evidence = {name: _Test(runs, plan.tuned_times) for name in self._tests}
        self._finished, self._pairs = np.zeros(runs), 0
        self.rolled_back, self.promoted = np.zeros(runs, dtype=bool), np.zeros(runs, dtype=bool)
        self.end_seconds = np.full(runs, np.nan)
        """Time of the verdict; NaN without one."""

    @property
    def is_open(self) -> Bools:
        """Whether a run has no verdict yet."""
        return ~(self.rolled_back | self.promoted)

    def close_pair(
        self, pair: int, counts: PairCounts, is_repeat: Bools, *, fails: Bools | bool = False, is_held: Bools | bool = False
    ) -> None:
        """Add a pair to all runs, and decide those that are open.

        `is_repeat`: whether its first window has the drafter that the pod had before, by run and pod. `fails`, `is_held`: whether
        something else than the tests of means rolls a run back, or prevents its promotion.
        """
        plan, window = self._plan, self._plan.schedule.window(2 * pair)
        end = plan.schedule.window(2 * pair + 1).end_seconds
        is_last = plan.schedule.window(2 * pair + 3).end_seconds > plan.max_duration_seconds
        costs = {
            TOKENS_PER_STEP: _weigh(counts.steps, counts.tokens),
            TIME_PER_OUTPUT_TOKEN: _weigh(counts.seconds, counts.tokens),
            ANSWER_TOKENS: (counts.tokens[0] / 2, counts.tokens[1] / 2),
        }
        repeat, change = (
            shown_share(window, plan.schedule.carryover_seconds, is_repeat=is_repeated) for is_repeated in (True, False)
        )
        shares = np.where(is_repeat, repeat, change)
        for name, test in self._tests.items():
            stable, canary = costs[test.criterion.name]
            upper, lower = (stable, canary) if test.criterion.is_inverse else (canary, stable)
            score = test.sign * (upper - (1 + test.limit * (shares if test.is_attenuated else 1.0)) * lower)
            for pod in range(0, score.shape[1], 2):
                self._evidence[name].add_unit(score[:, pod : pod + 2].sum(axis=1), window.counted_seconds)
        self._finished += counts.finished[1].sum(axis=1)
        self._pairs += counts.tokens.shape[2]
        met = {name: self._evidence[name].is_significant(test.alpha) for name, test in self._tests.items()}
        if is_last:
            for name in met.keys() & set(PROMOTE_TESTS):
                met[name] |= self._evidence[name].is_significant_at_deadline(PROMOTE_DEADLINE_ALPHA * plan.error_share)
        rollback = fails | (met["FewerTokens"] & ~met["FasterOutput"]) | met["SlowerOutput"] | met["FewerAnswerTokens"]
        promote = ~rollback & ~np.asarray(is_held)
        if plan.is_accepted:
            promote &= self._pairs >= MIN_QUIET_PAIRS
        else:
            promote &= (met["EnoughTokens"] | met["FasterOutput"]) & met["FastEnoughOutput"]
            if not plan.is_isolated:
                promote &= self._finished >= least_request_count(PROMOTE_ALPHA * plan.error_share)
        if end < self._min_seconds and not is_last:
            promote &= False
        is_open = self.is_open
        self.rolled_back[is_open & rollback] = True
        self.promoted[is_open & promote] = True
        self.end_seconds[is_open & (rollback | promote)] = end


class _Test:
    """`SignFlipTest` of many runs."""

    def __init__(self, runs: int, times: tuple[float, ...]) -> None:
        self._bet = STRENGTH / np.sqrt(np.array(times))[:, None]
        self._units = np.zeros(runs, dtype=np.int64)
        self._score_sum, self._squares, self._seconds = np.zeros(runs), np.zeros(runs), np.zeros(runs)
        self._log_wealth = np.zeros((len(times), runs))

    def add_unit(self, score: Floats, seconds: float) -> None:
        counts = score != 0
        self._units += counts
        self._score_sum += score
        self._squares += score * score
        self._seconds += np.where(counts, seconds, 0.0)
        scale = np.sqrt(np.divide(self._seconds, self._squares, out=np.zeros_like(score), where=self._squares > 0))
        bet = np.abs(self._bet * (score * scale))
        self._log_wealth += np.where(score < 0, -bet, bet) - bet - np.log1p(np.exp(-2 * bet)) + np.log(2)

    def is_significant(self, alpha: float) -> Bools:
        largest = self._log_wealth.max(axis=0)
        mean = (np.array(WEIGHTS)[:, None] * np.exp(self._log_wealth - largest)).sum(axis=0)
        return np.asarray(largest + np.log(mean) >= -np.log(alpha))

    def is_significant_at_deadline(self, alpha: float) -> Bools:
        quantile = statistics.NormalDist().inv_cdf(1 - alpha)
        return np.asarray((self._units >= MIN_UNITS_AT_DEADLINE) & (self._score_sum >= quantile * np.sqrt(self._squares)))


def _weigh(cost: Floats, tokens: Floats) -> tuple[Floats, Floats]:
    """Return the weighted costs of both drafters, as `weighted_costs` of `aerie.analysis.switchback.state`."""
    usable = (tokens > 0).all(axis=0)
    base = np.where(usable, tokens.sum(axis=0), 1.0)
    return np.where(usable, cost[0] * tokens[1] / base, 0.0), np.where(usable, cost[1] * tokens[0] / base, 0.0)


@cache
def least_request_count(alpha: float) -> int:
    """Return the number of the canary's requests without a failure that suffices, where the stable drafter has as many."""
    requests = 1
    while not ShareCounts(0.0, requests, 0.0, requests).is_below(FAILURE_RATIO, FAILURE_MARGIN, alpha):
        requests += 1
    return requests
