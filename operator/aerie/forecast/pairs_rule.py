"""The rule of `aerie.analysis.paired` on arrays: the same tests on the pairs of many evaluations at once.

tests/unit/analysis/test_shadow_benchmark.py compares it with the operator's functions, run by run. Answers are equal and no
request fails here; the alphas of these tests are exact, and add 0.4 % to the rollbacks.

A canary with an effect takes 1 / (1 + effect) of the steps in every pair. So a test of it at a ratio is the test of an equal
canary at (1 + effect) times the ratio, and all effects are evaluated on the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aerie.analysis.paired.plan import PairedPlan, PairedTest
from aerie.analysis.paired.sums import BUCKETS
from aerie.analysis.statistics.confidence_sequence import mixture_precision
from aerie.forecast.outcomes import Bools, Floats, Ints

FIRST_CHECK_SECONDS, CHECK_GROWTH = 10.0, 1.01
"""The operator fetches pairs each few seconds; checks are as dense here, up to a hundredth of the elapsed time."""


class PairSumsOfRuns:
    """`PairSums` of many runs."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self._counts, self._canary, self._control = (np.zeros((runs, BUCKETS)) for _ in range(3))
        self._canary_squares, self._cross_products, self._control_squares = (np.zeros(runs) for _ in range(3))

    def add(self, bucket: Ints, canary: Floats, control: Floats) -> None:
        """Add the parts of pairs, by run and pair."""
        runs = len(bucket)
        cells = (np.arange(runs)[:, None] * BUCKETS + bucket).ravel()

        def by_bucket(values: Floats | None) -> Floats:
            weights = None if values is None else values.ravel()
            return np.bincount(cells, weights, minlength=runs * BUCKETS).reshape(runs, BUCKETS).astype(float)

        self._counts += by_bucket(None)
        self._canary += by_bucket(canary)
        self._control += by_bucket(control)
        self._canary_squares += (canary * canary).sum(axis=1)
        self._cross_products += (canary * control).sum(axis=1)
        self._control_squares += (control * control).sum(axis=1)

    def is_met(self, test: PairedTest, effect: float) -> Bools:
        """Return whether a test is significant in each run, for a canary with this effect."""
        pairs, ratio = self._counts.sum(axis=1), test.max_ratio * (1 + effect)
        buckets = pairs**2 / (self._counts**2).sum(axis=1)
        score = self._canary - ratio * self._control
        total = score.sum(axis=1)
        between = ((score - self._counts * (total / pairs)[:, None]) ** 2).sum(axis=1)
        squares = self._canary_squares - 2 * ratio * self._cross_products + ratio * ratio * self._control_squares
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            variance = np.maximum(between, squares) * buckets / (buckets - 1)
            k = 1 + pairs * squares / variance * mixture_precision(2 * test.level.alpha, test.level.tightest_pair_count)
            c = np.exp(2 / buckets * (np.log(k) / 2 - np.log(2 * test.level.alpha)))
            critical = np.where(c < k, (buckets - 1) * (c - 1) / (1 - c / k), np.inf)
            effective_pairs = self._control.sum(axis=1) ** 2 / self._control_squares
            met = (test.sign * total > 0) & (total * total >= critical * variance) & (buckets > 1)
        return np.asarray(met & (effective_pairs >= test.min_pairs))


def decide_pairs(steps: PairSumsOfRuns, seconds: PairSumsOfRuns, effect: float, plan: PairedPlan) -> tuple[Bools, Bools]:
    """Return whether a canary with this effect is rolled back, and whether it is accepted, by run."""

    def is_met(sums: PairSumsOfRuns, test: PairedTest, *, is_compared: bool, otherwise: bool = False) -> Bools:
        return sums.is_met(test, effect) if is_compared else np.full(sums.runs, otherwise)

    tokens, time = plan.compares_tokens, plan.compares_time
    faster = is_met(seconds, plan.faster, is_compared=time)
    rollback = is_met(steps, plan.fewer_tokens, is_compared=tokens) & ~faster
    rollback |= is_met(seconds, plan.slower, is_compared=time)
    accepted = is_met(steps, plan.enough_tokens, is_compared=tokens, otherwise=True) | faster
    accepted &= is_met(seconds, plan.fast_enough, is_compared=time, otherwise=True)
    return rollback, ~rollback & accepted & (tokens or time)


def check_times(seconds: float) -> Iterator[float]:
    """Yield the times of the checks, up to the deadline."""
    time = 0.0
    while time < seconds:
        time = min(seconds, max(time + FIRST_CHECK_SECONDS, time * CHECK_GROWTH))
        yield time
