"""The rule of `aerie.analysis.paired` on arrays: the same tests on the pairs of many evaluations at once.

tests/unit/analysis/test_shadow_benchmark.py compares it with the operator's functions, run by run. Answers are equal and no
request fails here; the alphas of these tests are exact, and add 0.4 % to the rollbacks.

A canary with an effect takes 1 / (1 + effect) of the steps in every pair. So a test of it at a ratio is the test of an equal
canary at (1 + effect) times the ratio, and all effects are evaluated on the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from aerie.analysis.paired.plan import PairedPlan, PairedTest
from aerie.analysis.paired.sums import BUCKETS, TIME_SLOT_SECONDS
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

    def is_met(self, test: PairedTest, effect: float, slots: PairSumsOfRuns | None = None) -> Bools:
        """Return whether a test is significant in each run, for a canary with this effect. `slots`: by time slots, for times."""
        pairs, ratio = self._counts.sum(axis=1), test.max_ratio * (1 + effect)
        buckets, between, total = self._between_buckets(ratio)
        squares = self._canary_squares - 2 * ratio * self._cross_products + ratio * ratio * self._control_squares
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            variance = np.maximum(between, squares) * buckets / (buckets - 1)
            if slots is not None:
                slot_count, between_slots, _ = slots._between_buckets(ratio)
                variance += np.maximum(0.0, between_slots * slot_count / (slot_count - 1) - squares)
                buckets = np.minimum(buckets, slot_count)
            k = 1 + pairs * squares / variance * mixture_precision(2 * test.level.alpha, test.level.tightest_pair_count)
            c = np.exp(2 / buckets * (np.log(k) / 2 - np.log(2 * test.level.alpha)))
            critical = np.where(c < k, (buckets - 1) * (c - 1) / (1 - c / k), np.inf)
            effective_pairs = self._control.sum(axis=1) ** 2 / self._control_squares
            estimates = self._canary.sum(axis=1) / self._control.sum(axis=1)
            met = (
                (estimates < test.max_estimate * (1 + effect))
                & (test.sign * total > 0)
                & (total * total >= critical * variance)
                & (buckets > 1)
            )
        return np.asarray(met & (effective_pairs >= test.min_pairs))

    def _between_buckets(self, ratio: float) -> tuple[Floats, Floats, Floats]:
        """Return the effective number of buckets, the variance between them, and the sum of the scores, by run."""
        pairs = self._counts.sum(axis=1)
        score = self._canary - ratio * self._control
        total = score.sum(axis=1)
        between = ((score - self._counts * (total / pairs)[:, None]) ** 2).sum(axis=1)
        return pairs**2 / (self._counts**2).sum(axis=1), between, total


class PairedSumsOfRuns(NamedTuple):
    """The sums of `PairedState` of many runs."""

    steps: PairSumsOfRuns
    seconds: PairSumsOfRuns
    slots: PairSumsOfRuns
    """The seconds by time slots."""

    @classmethod
    def create(cls, runs: int) -> PairedSumsOfRuns:
        """Return the sums without pairs."""
        return cls(*(PairSumsOfRuns(runs) for _ in range(3)))

    def add(
        self, bucket: Ints, steps: tuple[Floats, Floats], seconds: tuple[Floats, Floats], period: tuple[float, float]
    ) -> None:
        """Add the parts of pairs, of canary and control, by run and pair; they arrive evenly in this period, in seconds."""
        self.steps.add(bucket, *steps)
        self.seconds.add(bucket, *seconds)
        times = np.linspace(*period, bucket.shape[1], endpoint=False)
        self.slots.add(np.broadcast_to((times // TIME_SLOT_SECONDS).astype(np.int64) % BUCKETS, bucket.shape), *seconds)


def decide_pairs(sums: PairedSumsOfRuns, effect: float, plan: PairedPlan, elapsed_seconds: float) -> tuple[Bools, Bools]:
    """Return whether a canary with this effect is rolled back after this time, and whether it is accepted, by run."""
    steps, seconds, slots = sums

    def is_met(sums: PairSumsOfRuns, test: PairedTest, *, is_compared: bool, otherwise: bool = False) -> Bools:
        return sums.is_met(test, effect, slots if sums is seconds else None) if is_compared else np.full(sums.runs, otherwise)

    tokens, time = plan.compares_tokens, plan.compares_time
    faster = is_met(seconds, plan.faster, is_compared=time)
    rollback = is_met(steps, plan.fewer_tokens, is_compared=tokens) & ~faster
    rollback |= is_met(seconds, plan.slower, is_compared=time)
    accepted = is_met(steps, plan.enough_tokens, is_compared=tokens, otherwise=True) | faster
    accepted &= is_met(seconds, plan.fast_enough, is_compared=time, otherwise=True)
    return rollback, ~rollback & accepted & (tokens or time) & (elapsed_seconds >= plan.min_acceptance_seconds)


def check_times(seconds: float) -> Iterator[float]:
    """Yield the times of the checks, up to the deadline."""
    time = 0.0
    while time < seconds:
        time = min(seconds, max(time + FIRST_CHECK_SECONDS, time * CHECK_GROWTH))
        yield time
