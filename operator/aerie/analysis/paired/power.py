"""Forecasts how many pairs a verdict takes, before an evaluation begins: from the same tests that will decide.

A forecast puts the expected sums of n pairs into the tests of a plan. It is the number of pairs at which the expected path of the
evidence reaches the boundary, which is about the median. What pairs differ by is an assumption (`PairNoise`), measured on real
pairs. Clusters are assumed to be small: a forecast for few tenants is too short.

Guarantee: pure; equal plans give equal forecasts. Not guaranteed: the noise of another model, drafter or traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

from aerie.analysis.criteria.criterion import TOKENS_PER_STEP
from aerie.analysis.paired.answers import ANSWERS_ALPHA
from aerie.analysis.paired.plan import ACCEPT_LEVEL, FAILED_REQUESTS_ALPHA, ROLLBACK_LEVEL, SLOWER_LEVEL, PairedPlan, PairedTest
from aerie.analysis.paired.sequence import ScoreMoments
from aerie.analysis.paired.sums import BUCKETS
from aerie.analysis.state import VerdictOutcome

FALSE_ROLLBACK_CHANCE = ROLLBACK_LEVEL.alpha + SLOWER_LEVEL.alpha + FAILED_REQUESTS_ALPHA + ANSWERS_ALPHA
"""Largest chance that an equal canary is rolled back."""
FALSE_ACCEPTANCE_CHANCE = ACCEPT_LEVEL.alpha
"""Largest chance that a canary that is worse by just the margin is accepted."""
MAX_PAIRS = 10**6


@dataclass(frozen=True, slots=True)
class PairNoise:
    """What pairs differ by, apart from the drafters' gain."""

    deviation: float
    """Standard deviation of a pair's ratio."""
    size_dispersion: float = 2.2
    """Mean square of a pair's size over the square of its mean: pairs per effective pair."""


GREEDY_NOISE, SAMPLED_NOISE = PairNoise(0.09), PairNoise(0.14)
"""Noise at temperature 0 and above. Measured on real pairs (EAGLE 3 and EAGLE 3.1, K = 3): standard errors of 1.01 % and 1.6 %
of 166 pairs, which `size_dispersion` is a part of."""


def forecast_verdict(plan: PairedPlan, gain: float, noise: PairNoise) -> tuple[VerdictOutcome, int] | None:
    """Return the expected outcome and the pairs until it, for a canary with this gain in tokens per step and equal times.

    Return None where it takes more than `MAX_PAIRS`.
    """
    outcomes: tuple[tuple[VerdictOutcome, PairedTest], ...] = (("Rollback", plan.fewer_tokens), ("Promote", plan.enough_tokens))
    forecasts = [(pairs, outcome) for outcome, test in outcomes if (pairs := pairs_until_met(test, gain, noise)) is not None]
    return (min(forecasts)[1], min(forecasts)[0]) if forecasts else None


def pairs_until_met(test: PairedTest, gain: float, noise: PairNoise) -> int | None:
    """Return the number of pairs until a test of tokens per step is met; None if more than `MAX_PAIRS`."""
    if test.metric != TOKENS_PER_STEP:
        raise ValueError(f"test.metric is {test.metric}; forecasts are for {TOKENS_PER_STEP}.")
    ratio = 1 / (1 + gain)
    drift = ratio - test.max_ratio

    def is_met(pairs: int) -> bool:
        buckets = 1 / (1 / pairs + 1 / BUCKETS)
        squares = pairs * noise.size_dispersion * ((noise.deviation * ratio) ** 2 + drift * drift)
        moments = ScoreMoments(pairs * drift, squares * buckets / (buckets - 1), pairs * (buckets - 1) / buckets, buckets - 1)
        return pairs >= test.min_pairs * noise.size_dispersion and moments.is_significant(test.sign, test.level)

    if not is_met(MAX_PAIRS):
        return None
    low, high = 1, MAX_PAIRS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_met(middle) else (middle, high)
    return high
