"""An anytime-valid, cluster-robust confidence sequence for the ratio of two amounts per token, from sums over pairs.

The canary's amount per token is rho times the control's exactly when the scores Y = a - rho b of the pairs (`sums`) have the mean
0. Both drafters answer the same requests, so what requests differ by cancels, whatever the correlation of the two answers: it is
in the variance of Y. With S_g the sum of Y over bucket g of G buckets, which have n_g of n pairs:

    W = sum of (S_g - n_g/n S)^2        variance of S if buckets are independent; clusters may depend within as they like
    Q = sum of Y^2                      variance of S if pairs are, and its mean is 0
    V = max(W, Q) * m / (m - 1)         m = n^2 / sum of n_g^2, the effective number of buckets
    T^2 = S^2 / V,   m - 1 degrees of freedom,   n_e = n Q / V effective pairs

Times depend on when they were measured, too: a pod whose processors have other work is slower in all answers of that time. So
they are summed a second time, by time slots instead of clusters. With W' and m' of that sum, and what two-way clusters add:

    V = max(W, Q) * m / (m - 1) + max(0, W' * m' / (m' - 1) - Q)      the smaller one of m and m' gives the degrees of freedom

A test at rho is significant once T^2 exceeds the boundary of the t mixture for n_e effective scores (`critical_t_squared`;
Lindon, Ham, Tingley, Bojinov, arXiv 2210.08589). n_e counts a cluster of equal pairs once. Q is not centred, so T^2 is at most
n: scores that happen to be equal do not seem certain. The estimate is the ratio of sums. Its bounds are the ratios that no test
excludes.

Assumptions: clusters of different buckets are independent, and so are time slots; no few of them dominate the sums. Pairs are
lost, if at all, whatever the drafter. The ratio is that of the requests that are evaluated: where it differs from request to
request, it is their mean, weighted by tokens.
Guarantee: asymptotic. As pairs become many, a test at the true ratio ever becomes significant with a chance of at most alpha
(Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", arXiv
2103.06476), at any correlation of the two answers, and wherever one stops.
Not guaranteed: the level at few pairs, or with few effective buckets or heavy-tailed lengths. `plan` therefore requires a minimum
number of effective pairs, and `benchmarks/shadow.py` simulates the rates. The degrees of freedom and n_e are approximations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from aerie.analysis.paired.sums import PairSums
from aerie.analysis.statistics.confidence_sequence import critical_t_squared, mixture_precision

_MAX_BOUND_FACTOR = 4.0
"""Largest distance of a bound from the estimate, as a factor; beyond it there is none."""
_BISECTION_STEPS = 40


@dataclass(frozen=True, slots=True)
class Level:
    """Parameters of a one-sided bound; fixed before the first pair."""

    alpha: float
    """Chance that the bound is ever wrong."""
    tightest_pair_count: float
    """Effective pairs at which the bound is tightest; matters for its width, not for its validity."""


@dataclass(frozen=True, slots=True)
class ScoreMoments:
    """Moments of the scores Y at a ratio."""

    score_sum: float
    variance: float
    """V: variance of the sum."""
    effective_pairs: float
    degrees_of_freedom: float

    def is_significant(self, sign: Literal[1, -1], level: Level) -> bool:
        """Return whether the mean score is significantly above (sign 1) or below (-1) 0."""
        if sign * self.score_sum <= 0:
            return False
        g = mixture_precision(2 * level.alpha, level.tightest_pair_count)
        critical = critical_t_squared(self.effective_pairs, self.degrees_of_freedom, g, 2 * level.alpha)
        return self.score_sum * self.score_sum >= critical * self.variance

    def scale_by(self, factor: float) -> ScoreMoments:
        """Return the moments of `factor` times as many such scores, for a forecast."""
        return ScoreMoments(
            factor * self.score_sum, factor * self.variance, factor * self.effective_pairs, self.degrees_of_freedom
        )


def score_moments(sums: PairSums, ratio: float, slots: PairSums | None = None) -> ScoreMoments:
    """Return the moments of the scores at this ratio of the canary's amount per token to the control's.

    `slots`: sums over the same pairs by time slots, for times.
    """
    effective_buckets = effective_bucket_count(sums)
    effective_slots = math.inf if slots is None else effective_bucket_count(slots)
    if min(effective_buckets, effective_slots) <= 1:
        return ScoreMoments(0.0, 0.0, 0.0, 0.0)
    squares = max(0.0, sums.canary_squares - 2 * ratio * sums.cross_products + ratio * ratio * sums.control_squares)
    variance = max(_variance_between_buckets(sums, ratio), squares) * effective_buckets / (effective_buckets - 1)
    if slots is not None:
        between_slots = _variance_between_buckets(slots, ratio) * effective_slots / (effective_slots - 1)
        variance += max(0.0, between_slots - squares)
    return ScoreMoments(
        math.fsum(sums.canary) - ratio * math.fsum(sums.control),
        variance,
        sums.pairs * squares / variance if variance > 0 else 0.0,
        min(effective_buckets, effective_slots) - 1,
    )


def _variance_between_buckets(sums: PairSums, ratio: float) -> float:
    """Return W: the sum of the squared deviations of the buckets' scores from their share of all."""
    bucket_sums = [canary - ratio * control for canary, control in zip(sums.canary, sums.control, strict=True)]
    mean = math.fsum(bucket_sums) / sums.pairs
    return math.fsum((value - count * mean) ** 2 for value, count in zip(bucket_sums, sums.counts, strict=True))


def effective_bucket_count(sums: PairSums) -> float:
    """Return the number of equally filled buckets that are worth as much as these; 0 without pairs."""
    squares = sum(count * count for count in sums.counts)
    return sums.pairs**2 / squares if squares else 0.0


def effective_pair_count(sums: PairSums) -> float:
    """Return the number of equally large pairs that are worth as much as these (Kish); 0 without pairs.

    Where a few long answers have most of the tokens, it is far below the number of pairs.
    """
    return sums.control_total**2 / sums.control_squares if sums.control_squares else 0.0


def ratio_bounds(sums: PairSums, lower_level: Level, upper_level: Level, slots: PairSums | None = None) -> tuple[float, float]:
    """Return the bounds of the ratio canary / control that no test excludes: Fieller's inversion, by bisection.

    `slots`: as in `score_moments`. A bound is 0 or infinite where its test cannot exclude any ratio yet.
    """
    if sums.canary_total <= 0 or sums.control_total <= 0:
        return 0.0, math.inf
    estimate = sums.canary_total / sums.control_total

    def find_bound(sign: Literal[1, -1], level: Level, unbounded: float) -> float:
        """Return the bound below (sign 1) or above (-1) the estimate."""

        def is_excluded(ratio: float) -> bool:
            return score_moments(sums, ratio, slots).is_significant(sign, level)

        far = estimate * _MAX_BOUND_FACTOR**-sign
        return _bisect(is_excluded, far, estimate) if is_excluded(far) else unbounded

    return find_bound(1, lower_level, 0.0), find_bound(-1, upper_level, math.inf)


def _bisect(is_excluded: Callable[[float], bool], excluded: float, included: float) -> float:
    """Return the ratio at which the test changes between two ratios."""
    for _ in range(_BISECTION_STEPS):
        middle = (excluded + included) / 2
        excluded, included = (middle, included) if is_excluded(middle) else (excluded, middle)
    return excluded
