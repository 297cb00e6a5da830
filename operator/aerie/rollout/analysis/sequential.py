"""Bounds and e-values that hold at every moment, so that a rollout may look after each block and stop when it is sure.

Two tests. The *t confidence sequence* for a mean of block scores: a normal mixture over the effect in units of the unknown
standard deviation, with the right-Haar measure on the latter (Lindon, Ham, Tingley, Bojinov, arXiv 2210.08589). The *conditional
binomial e-value* for rare events (Lindon and Malek, "Anytime-Valid Inference for Multinomial Count Data", NeurIPS 2022).

What is scored: Y = canary - ratio * control - offset, per block. Its mean is 0 exactly when the arms are at that ratio, whatever
both drift by; a mean of ratios or of their logarithms would be biased where a control value is small.

Three things widen the sequence beyond its textbook form, each measured on stable pods against stable pods (`calibration`):

* `inflation` (phi): blocks are alike in time, so n of them are worth n / phi. In-sample estimates of it (Newey-West) are not
  enough: nominal 5 % become 9 to 27 %, by simulation.
* `Prior`: the variance that history knows counts as nu0 degrees of freedom, so that a first handful of blocks is not at the mercy
  of its own variance. Empirical Bayes: no longer an exact martingale.
* `offset_sd`: pods differ for good by their nodes, which no number of blocks averages out. It is added in quadrature, as the
  quantile of a sum of two independent deviations. As few pods tell little of it, the quantile is Student's t, on the degrees of
  freedom that the standard deviation was estimated with (`offset_freedom`).

Guarantee, for independent normal scores, inflation 1, no prior and no offset: P(some bound is ever wrong) <= alpha. Beyond that
the rates are simulated (`benchmarks/canary.py`), not proven.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

_FREEDOMS = (1.0, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 60.0, math.inf)
_STUDENT = {
    0.975: (12.706, 4.303, 3.182, 2.776, 2.447, 2.228, 2.086, 2.0, 1.96),
    0.9975: (127.321, 14.089, 7.453, 5.598, 4.317, 3.581, 3.153, 2.915, 2.807),
    0.99: (31.821, 6.965, 4.541, 3.747, 3.143, 2.764, 2.528, 2.39, 2.326),
}
"""Quantiles of Student's t by these degrees of freedom."""


@lru_cache(maxsize=256)
def offset_quantile(freedom: float, share: float = 0.975) -> float:
    """How many standard deviations of the pods' lasting differences a bound keeps clear of: this share of them is on this side.

    Between the rows of the table 1 / freedom is interpolated, to some 2 % from 2 degrees on; fewer than 1 count as 1.

    >>> offset_quantile(3.0), offset_quantile(math.inf), offset_quantile(3.0, 0.99)
    (3.182, 1.96, 4.541)
    """
    place = 1 / max(1.0, freedom)
    rows = [(1 / row, quantile) for row, quantile in zip(_FREEDOMS, _STUDENT[share], strict=True)]
    for (left, above), (right, below) in itertools.pairwise(rows):
        if place >= right:
            return below + (above - below) * (place - right) / (left - right)
    raise AssertionError("1 / freedom is at least 0.")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Count, means and centred second moments of pairs (canary, control): enough for the scores of every ratio and offset."""

    count: int = 0
    canary: float = 0.0
    control: float = 0.0
    canary_squares: float = 0.0
    control_squares: float = 0.0
    products: float = 0.0

    def add(self, canary: float, control: float) -> Pairs:
        """With one more pair. Welford's update: stable where sums of squares would cancel."""
        count = self.count + 1
        to_canary, to_control = canary - self.canary, control - self.control
        mean_canary, mean_control = self.canary + to_canary / count, self.control + to_control / count
        return Pairs(
            count,
            mean_canary,
            mean_control,
            self.canary_squares + to_canary * (canary - mean_canary),
            self.control_squares + to_control * (control - mean_control),
            self.products + to_canary * (control - mean_control),
        )

    def mean(self, ratio: float, offset: float = 0.0) -> float:
        """Mean of the scores Y = canary - ratio * control - offset."""
        return self.canary - ratio * self.control - offset

    def variance(self, ratio: float) -> float:
        """Variance of the scores, with n - 1 below."""
        if self.count < 2:
            return 0.0
        squares = self.canary_squares - 2 * ratio * self.products + ratio * ratio * self.control_squares
        return max(0.0, squares) / (self.count - 1)


@dataclass(frozen=True, slots=True)
class Prior:
    """The variance of a score that history knows, worth `freedom` (nu0) degrees of freedom."""

    variance: float = 0.0
    freedom: float = 0.0


NO_PRIOR = Prior()


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a sequence is tuned to; all of it fixed before the first block."""

    alpha: float
    """Chance that its one-sided bound is ever wrong."""
    blocks: float
    """Effective blocks (n*) at which it is tightest; matters for its width, not for its validity."""
    inflation: float = 1.0
    """phi: by how much the variance of a mean of many blocks exceeds that of independent ones."""
    prior: Prior = NO_PRIOR
    offset_sd: float = 0.0
    """Standard deviation of the lasting difference of two equal arms, in the unit of the score."""
    offset_freedom: float = math.inf
    """Degrees of freedom that it was estimated with."""
    offset_share: float = 0.975
    """Of the lasting differences that the bound keeps clear of."""

    @property
    def offset(self) -> float:
        """How far lasting differences of equal arms may lie from 0, in the unit of the score."""
        return offset_quantile(self.offset_freedom, self.offset_share) * self.offset_sd

    @property
    def precision(self) -> float:
        return precision(2 * self.alpha, self.blocks)


def precision(alpha: float, blocks: float) -> float:
    """g, the variance of the mixture over effect / sd, that makes the two-sided sequence tightest after `blocks` blocks.

    g = (-2 ln a + ln(1 - 2 ln a)) / n*: Howard, Ramdas, McAuliffe, Sekhon (Ann. Stat. 2021), section 3.5, first-order.
    """
    log = -2 * math.log(alpha)
    return (log + math.log1p(log)) / blocks


def e_value(t_squared: float, blocks: float, freedom: float, g: float) -> float:
    """E-value against mean 0, after `blocks` effective blocks with a squared t statistic on `freedom` degrees of freedom.

    k = 1 + n g;  E = k^(-1/2) * [(1 + t^2/nu) / (1 + t^2/(nu k))]^((nu + 1)/2): arXiv 2210.08589, the t-test. An anytime-valid
    p-value is min(1, 1/E).
    """
    k = 1 + blocks * g
    log = (freedom + 1) / 2 * (math.log1p(t_squared / freedom) - math.log1p(t_squared / (freedom * k))) - math.log(k) / 2
    return math.exp(min(log, 700.0))


def critical(blocks: float, freedom: float, g: float, alpha: float) -> float:
    """The squared t statistic at which `e_value` is 1 / alpha; infinite while no value of it would be.

    c = (sqrt(k)/alpha)^(2/(nu + 1));  t^2 = nu (c - 1) / (1 - c/k).
    """
    if freedom <= 0:
        return math.inf
    k = 1 + blocks * g
    c = math.exp(2 / (freedom + 1) * (math.log(k) / 2 - math.log(alpha)))
    return freedom * (c - 1) / (1 - c / k) if c < k else math.inf


def half_width(count: float, variance: float, tuning: Tuning) -> float:
    """Distance of the one-sided bound from the mean of `count` scores with this sample variance.

    sqrt(s^2 phi/n * t^2), with n_e = n/phi and nu = n_e - 1 + nu0, and s^2 = (nu0 s0^2 + (n_e - 1) s^2) / nu pooled with the
    prior; the offset joins in quadrature. One-sided at alpha is two-sided at 2 alpha, by symmetry.
    """
    effective = count / tuning.inflation
    own = effective - 1
    freedom = own + tuning.prior.freedom
    if own <= 0 or freedom <= 0:
        return math.inf
    t_squared = critical(effective, freedom, tuning.precision, 2 * tuning.alpha)
    pooled = (tuning.prior.freedom * tuning.prior.variance + own * variance) / freedom
    return math.sqrt(pooled / effective * t_squared + tuning.offset**2) if t_squared < math.inf else math.inf


def lower(pairs: Pairs, ratio: float, offset: float, tuning: Tuning) -> float:
    """Lower bound of the mean score at this ratio and offset."""
    return pairs.mean(ratio, offset) - half_width(pairs.count, pairs.variance(ratio), tuning)


def upper(pairs: Pairs, ratio: float, offset: float, tuning: Tuning) -> float:
    """Upper bound of the mean score at this ratio and offset."""
    return pairs.mean(ratio, offset) + half_width(pairs.count, pairs.variance(ratio), tuning)


def ratio_bounds(pairs: Pairs, lowest: Tuning, highest: Tuning) -> tuple[float, float]:
    """The ratios canary / control that neither test excludes: beyond them the very tests that decide have rejected.

    Fieller's inversion. With C = t^2/n_e, (a - r b)^2 = C s^2(r) + offset^2 is quadratic in r, because both the mean and the
    variance of the scores are polynomials in it. Infinite where a test cannot reject yet, or the control's mean is not
    certainly above 0.
    """
    return _edge(pairs, lowest, -1), _edge(pairs, highest, 1)


def _edge(pairs: Pairs, tuning: Tuning, sign: int) -> float:
    effective = pairs.count / tuning.inflation
    own = effective - 1
    freedom = own + tuning.prior.freedom
    unbounded = sign * math.inf
    if own <= 0 or pairs.control <= 0:
        return unbounded
    t_squared = critical(effective, freedom, tuning.precision, 2 * tuning.alpha)
    if t_squared == math.inf:
        return unbounded
    share = t_squared / effective * own / freedom / (pairs.count - 1)
    fixed = t_squared / effective * tuning.prior.freedom * tuning.prior.variance / freedom
    fixed += tuning.offset**2
    square = pairs.control**2 - share * pairs.control_squares
    if square <= 0:
        return unbounded
    half = pairs.canary * pairs.control - share * pairs.products
    constant = pairs.canary**2 - share * pairs.canary_squares - fixed
    return (half + sign * math.sqrt(max(0.0, half * half - square * constant))) / square


def blocks_until(distance: float, variance: float, tuning: Tuning, most: int = 20_000) -> int | None:
    """After how many blocks the bound comes within `distance` of the mean, if mean and variance stay; None: not within `most`."""
    if distance <= tuning.offset or half_width(most, variance, tuning) > distance:
        return None
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if half_width(middle, variance, tuning) <= distance else (middle, high)
    return high


# ------------------------------------------------------------------------------------------------------------ rare events
@dataclass(frozen=True, slots=True)
class Events:
    """Rare events of both arms, such as failed requests."""

    canary: float = 0.0
    control: float = 0.0
    expected: float = 0.0
    """Events expected on the canary if it were as good: the sum, over blocks, of events times its share of the exposure."""
    log_null: float = 0.0
    """Logarithm of the likelihood of the split, if it were as good."""

    def add(self, canary: float, control: float, share: float) -> Events:
        """With the events of one block, in which the canary had this share of the exposure, such as requests."""
        if not 0 < share < 1:
            raise ValueError(f"the canary's share of the exposure lies between 0 and 1, not at {share}.")
        likelihood = canary * math.log(share) + control * math.log1p(-share)
        return Events(
            self.canary + canary,
            self.control + control,
            self.expected + (canary + control) * share,
            self.log_null + likelihood,
        )

    @property
    def e_value(self) -> float:
        """E-value against "each event falls on the canary with the probability of its share".

        Given N = x_c + x_s events, x_c is binomial. Against it a uniform mixture of all shares:
        E = B(1 + x_c, 1 + x_s) / (share^x_c (1 - share)^x_s). It is a martingale from event to event, so it may be looked at
        always. Where events come in bursts, count the bursts.
        """
        log = math.lgamma(1 + self.canary) + math.lgamma(1 + self.control) - math.lgamma(2 + self.canary + self.control)
        return math.exp(min(log - self.log_null, 700.0))

    def more(self, alpha: float) -> bool:
        """Whether the canary certainly has more of them: E >= 1 / alpha, and more than expected."""
        return self.canary > self.expected and self.e_value >= 1 / alpha


# ----------------------------------------------------------------------------------------------------------- with an end
_SPENT = ((0.0, 0.5), (1.0, 0.5), (2.0, 0.5), (3.0, 0.53), (4.0, 0.57), (6.0, 0.62), (8.0, 0.65), (16.0, 0.72), (32.0, 0.78))


def with_deadline(alpha: float, horizon: float, blocks: float) -> float:
    """The level of a sequence tuned to `blocks` that errs with probability `alpha` by a deadline after `horizon` blocks.

    A sequence keeps a part of its alpha for the time after the deadline, which never comes. The table is the part that is spent
    by `horizon / blocks`, simulated for normal scores of known variance at alpha 0.05 (the test does it again); at smaller alphas
    less is spent. Both numbers are of effective blocks, n / phi. Never more than twice alpha.
    """
    at = horizon / blocks
    for (left, low), (right, high) in itertools.pairwise(_SPENT):
        if at <= right:
            return alpha / (low + (high - low) * (at - left) / (right - left))
    return alpha / (_SPENT[-1][1] if at <= 2 * _SPENT[-1][0] else 1.0)
