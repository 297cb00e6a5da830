"""The rule of `aerie.analysis.paired` on arrays: the same tests on the pairs of many runs at once.

tests/unit/analysis/test_shadow_benchmark.py compares it with the operator's functions, run by run. Answers are equal and no
request fails here; the alphas of these tests are exact, and add 0.4 % to the rollbacks.

A canary with an effect takes 1 / (1 + effect) of the steps in every pair. So a test of it at a ratio is the test of an equal
canary at (1 + effect) times the ratio, and all effects are evaluated on the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from aerie.analysis.paired.plan import PairedPlan, PairedTest
from aerie.analysis.paired.sums import BUCKETS
from aerie.analysis.statistics.confidence_sequence import mixture_precision
from benchmarks._canary_model import Bools, Floats
from benchmarks._shadow_model import Ints, PairParts, PairStream, ShadowTraffic

FIRST_CHECK_SECONDS, CHECK_GROWTH = 10.0, 1.01
"""The operator fetches pairs each few seconds; checks are as dense here, up to a hundredth of the elapsed time."""


class Outcomes(NamedTuple):
    """The outcome of each run, with the minutes and the pairs after which it came; NaN without."""

    rolled_back: Bools
    promoted: Bools
    minutes: Floats
    pairs: Floats


class _Sums:
    """`PairSums` of many runs."""

    def __init__(self, runs: int) -> None:
        self.counts, self.canary, self.control = (np.zeros((runs, BUCKETS)) for _ in range(3))
        self.canary_squares, self.cross_products, self.control_squares = (np.zeros(runs) for _ in range(3))

    def add(self, bucket: Ints, canary: Floats, control: Floats) -> None:
        runs = len(bucket)
        cells = (np.arange(runs)[:, None] * BUCKETS + bucket).ravel()

        def by_bucket(values: Floats | None) -> Floats:
            weights = None if values is None else values.ravel()
            return np.bincount(cells, weights, minlength=runs * BUCKETS).reshape(runs, BUCKETS).astype(float)

        self.counts += by_bucket(None)
        self.canary += by_bucket(canary)
        self.control += by_bucket(control)
        self.canary_squares += (canary * canary).sum(axis=1)
        self.cross_products += (canary * control).sum(axis=1)
        self.control_squares += (control * control).sum(axis=1)

    def is_met(self, test: PairedTest, effect: float) -> Bools:
        """Return whether a test is significant in each run, for a canary with this effect."""
        pairs, ratio = self.counts.sum(axis=1), test.max_ratio * (1 + effect)
        buckets = pairs**2 / (self.counts**2).sum(axis=1)
        score = self.canary - ratio * self.control
        total = score.sum(axis=1)
        between = ((score - self.counts * (total / pairs)[:, None]) ** 2).sum(axis=1)
        squares = self.canary_squares - 2 * ratio * self.cross_products + ratio * ratio * self.control_squares
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            variance = np.maximum(between, squares) * buckets / (buckets - 1)
            k = 1 + pairs * squares / variance * mixture_precision(2 * test.level.alpha, test.level.tightest_pair_count)
            c = np.exp(2 / buckets * (np.log(k) / 2 - np.log(2 * test.level.alpha)))
            critical = np.where(c < k, (buckets - 1) * (c - 1) / (1 - c / k), np.inf)
            effective_pairs = self.control.sum(axis=1) ** 2 / self.control_squares
            met = (test.sign * total > 0) & (total * total >= critical * variance) & (buckets > 1)
        return np.asarray(met & (effective_pairs >= test.min_pairs))


def check_times(seconds: float) -> Iterator[float]:
    """Yield the times of the checks, up to the deadline."""
    time = 0.0
    while time < seconds:
        time = min(seconds, max(time + FIRST_CHECK_SECONDS, time * CHECK_GROWTH))
        yield time


def decide(
    traffic: ShadowTraffic, effects: Sequence[float], plan: PairedPlan, runs: int, random: np.random.Generator
) -> list[Outcomes]:
    """Return the outcomes of the runs, by effect."""
    stream, steps, seconds = PairStream(traffic, runs, random), _Sums(runs), _Sums(runs)
    results = [Outcomes(np.zeros(runs, bool), np.zeros(runs, bool), *(np.full(runs, np.nan) for _ in range(2))) for _ in effects]
    pairs = 0
    for time in check_times(plan.max_duration_seconds):
        count = round(time * traffic.pairs_per_second) - pairs
        if count == 0:
            continue
        add_parts(steps, seconds, stream.draw(count, time))
        pairs += count
        for effect, result in zip(effects, results, strict=True):
            _decide_open_runs(result, steps, seconds, effect, plan, time, pairs)
        if all((result.rolled_back | result.promoted).all() for result in results):
            break
    return results


def add_parts(steps: _Sums, seconds: _Sums, parts: PairParts) -> None:
    """Add pairs to both sums."""
    steps.add(parts.bucket, parts.canary_steps, parts.control_steps)
    seconds.add(parts.bucket, parts.canary_seconds, parts.control_seconds)


def _decide_open_runs(
    result: Outcomes, steps: _Sums, seconds: _Sums, effect: float, plan: PairedPlan, time: float, pairs: int
) -> None:
    """Set the outcome of the runs that have none yet and get one now."""
    is_open = ~(result.rolled_back | result.promoted)
    if not is_open.any():
        return
    faster = seconds.is_met(plan.faster, effect)
    rollback = is_open & ((steps.is_met(plan.fewer_tokens, effect) & ~faster) | seconds.is_met(plan.slower, effect))
    promote = is_open & ~rollback & (steps.is_met(plan.enough_tokens, effect) | faster)
    promote &= seconds.is_met(plan.fast_enough, effect)
    result.rolled_back[rollback] = True
    result.promoted[promote] = True
    result.minutes[rollback | promote] = time / 60
    result.pairs[rollback | promote] = pairs
