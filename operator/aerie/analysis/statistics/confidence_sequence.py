"""Anytime-valid bounds and e-values, so that a rollout may evaluate them after each block and stop when they suffice.

There are two tests:

* The *t confidence sequence* is for a mean of block scores. It is a normal mixture over the effect, in units of the unknown
  standard deviation, with the right-Haar measure on the latter (Lindon, Ham, Tingley, Bojinov, arXiv 2210.08589).
* The *conditional binomial e-value* is for rare events (Lindon and Malek, "Anytime-Valid Inference for Multinomial Count Data",
  NeurIPS 2022).

The score of a block is Y = canary - ratio * control - offset. Its mean is 0 exactly when the arms are at that ratio, whatever
both drift by. A mean of ratios or of their logarithms would be biased where a control value is small.

Three parameters widen the sequence beyond its textbook form, each measured on stable pods against stable pods (`calibration`):

* `inflation` (phi): blocks are correlated in time, so n of them are worth n / phi. In-sample estimates of it (Newey-West) are not
  enough: nominal 5 % become 9 to 27 %, by simulation.
* `prior` (`VariancePrior`): the calibrated variance counts as nu0 degrees of freedom. So the first few blocks do not depend on
  their own variance alone. This is empirical Bayes: no longer an exact martingale.
* `pod_effect_sd`: pods differ permanently by their nodes, and no number of blocks averages that out. It is added in quadrature,
  as the quantile of a sum of two independent deviations. Few pods give a poor estimate of it, so the quantile is Student's t, on
  the degrees of freedom of the standard deviation's estimate (`pod_effect_degrees_of_freedom`).

Guarantee, for independent normal scores, inflation 1, no prior and no pod effect: P(some bound is ever wrong) <= alpha. In other
cases the rates are simulated (`benchmarks/canary.py`), not proven.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

_DEGREES_OF_FREEDOM = (1.0, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 60.0, math.inf)
_STUDENT_QUANTILES = {
    0.975: (12.706, 4.303, 3.182, 2.776, 2.447, 2.228, 2.086, 2.0, 1.96),
    0.9975: (127.321, 14.089, 7.453, 5.598, 4.317, 3.581, 3.153, 2.915, 2.807),
    0.99: (31.821, 6.965, 4.541, 3.747, 3.143, 2.764, 2.528, 2.39, 2.326),
}
"""Quantiles of Student's t, by probability; one for each of `_DEGREES_OF_FREEDOM`."""


@lru_cache(maxsize=256)
def pod_effect_quantile(degrees_of_freedom: float, share: float = 0.975) -> float:
    """Return the quantile of Student's t by which a bound is widened, in standard deviations of the pod effect.

    The share is the part of the pod effects below the quantile. The table is interpolated by 1 / degrees of freedom, to some 2 %
    from 2 degrees on; fewer than 1 count as 1.

    >>> pod_effect_quantile(3.0), pod_effect_quantile(math.inf), pod_effect_quantile(3.0, 0.99)
    (3.182, 1.96, 4.541)
    """
    inverse = 1 / max(1.0, degrees_of_freedom)
    rows = [(1 / degrees, quantile) for degrees, quantile in zip(_DEGREES_OF_FREEDOM, _STUDENT_QUANTILES[share], strict=True)]
    for (left, left_quantile), (right, right_quantile) in itertools.pairwise(rows):
        if inverse >= right:
            return right_quantile + (left_quantile - right_quantile) * (inverse - right) / (left - right)
    raise AssertionError("1 / freedom is at least 0.")


@dataclass(frozen=True, slots=True)
class PairedMoments:
    """Count, means and centred second moments of pairs (canary, control): enough for the scores of every ratio and offset.

    The order of the fields is the saved format.
    """

    count: int = 0
    """Pairs, one of each block."""
    canary_mean: float = 0.0
    """Mean of the canary's values."""
    control_mean: float = 0.0
    """Mean of the control's values."""
    canary_squares: float = 0.0
    """Sum of squared deviations of the canary's values from their mean."""
    control_squares: float = 0.0
    """Sum of squared deviations of the control's values from their mean."""
    cross_products: float = 0.0
    """Sum of products of both deviations."""

    def add_pair(self, canary: float, control: float) -> PairedMoments:
        """Return the moments with one more pair. Welford's update: stable where sums of squares would cancel."""
        count = self.count + 1
        canary_deviation, control_deviation = canary - self.canary_mean, control - self.control_mean
        canary_mean, control_mean = self.canary_mean + canary_deviation / count, self.control_mean + control_deviation / count
        return PairedMoments(
            count,
            canary_mean,
            control_mean,
            self.canary_squares + canary_deviation * (canary - canary_mean),
            self.control_squares + control_deviation * (control - control_mean),
            self.cross_products + canary_deviation * (control - control_mean),
        )

    def score_mean(self, ratio: float, offset: float = 0.0) -> float:
        """Return the mean of the scores Y = canary - ratio * control - offset."""
        return self.canary_mean - ratio * self.control_mean - offset

    def score_variance(self, ratio: float) -> float:
        """Return the sample variance of the scores, with denominator n - 1; 0 of fewer than 2."""
        if self.count < 2:
            return 0.0
        squares = self.canary_squares - 2 * ratio * self.cross_products + ratio * ratio * self.control_squares
        return max(0.0, squares) / (self.count - 1)


@dataclass(frozen=True, slots=True)
class VariancePrior:
    """Variance of a score by calibration, worth `degrees_of_freedom` (nu0)."""

    variance: float = 0.0
    degrees_of_freedom: float = 0.0


NO_PRIOR = VariancePrior()


@dataclass(frozen=True, slots=True)
class SequenceParameters:
    """Parameters of a confidence sequence; all of them fixed before the first block."""

    alpha: float
    """Chance that the one-sided bound is ever wrong."""
    tightest_block_count: float
    """Effective blocks (n*) at which the bound is tightest; matters for its width, not for its validity."""
    inflation: float = 1.0
    """phi: variance of a mean of many blocks, relative to that of independent ones."""
    prior: VariancePrior = NO_PRIOR
    pod_effect_sd: float = 0.0
    """Standard deviation of the permanent difference of two equal arms, in the unit of the score."""
    pod_effect_degrees_of_freedom: float = math.inf
    """Degrees of freedom of that estimate."""
    pod_effect_share: float = 0.975
    """Share of the permanent differences that the bound is widened for."""

    @property
    def pod_effect_bound(self) -> float:
        """Distance from 0 up to which permanent differences of equal arms are expected, in the unit of the score."""
        return pod_effect_quantile(self.pod_effect_degrees_of_freedom, self.pod_effect_share) * self.pod_effect_sd

    @property
    def mixture_precision(self) -> float:
        """g of the two-sided sequence at 2 alpha."""
        return mixture_precision(2 * self.alpha, self.tightest_block_count)


def mixture_precision(alpha: float, tightest_block_count: float) -> float:
    """Return g, the variance of the mixture over effect / sd.

    With it the two-sided sequence is tightest after `tightest_block_count` blocks.
    g = (-2 ln a + ln(1 - 2 ln a)) / n*: Howard, Ramdas, McAuliffe, Sekhon (Ann. Stat. 2021), section 3.5, first-order.
    """
    minus_two_log_alpha = -2 * math.log(alpha)
    return (minus_two_log_alpha + math.log1p(minus_two_log_alpha)) / tightest_block_count


def t_test_e_value(t_squared: float, blocks: float, degrees_of_freedom: float, g: float) -> float:
    """Return the e-value against mean 0, after `blocks` effective blocks with this squared t statistic.

    k = 1 + n g;  E = k^(-1/2) * [(1 + t^2/nu) / (1 + t^2/(nu k))]^((nu + 1)/2): arXiv 2210.08589, the t-test. An anytime-valid
    p-value is min(1, 1/E).
    """
    k = 1 + blocks * g
    log_e_value = (degrees_of_freedom + 1) / 2 * (
        math.log1p(t_squared / degrees_of_freedom) - math.log1p(t_squared / (degrees_of_freedom * k))
    ) - math.log(k) / 2
    return math.exp(min(log_e_value, 700.0))


def critical_t_squared(blocks: float, degrees_of_freedom: float, g: float, alpha: float) -> float:
    """Return the squared t statistic at which `t_test_e_value` is 1 / alpha; infinite while no statistic reaches it.

    c = (sqrt(k)/alpha)^(2/(nu + 1));  t^2 = nu (c - 1) / (1 - c/k).
    """
    if degrees_of_freedom <= 0:
        return math.inf
    k = 1 + blocks * g
    c = math.exp(2 / (degrees_of_freedom + 1) * (math.log(k) / 2 - math.log(alpha)))
    return degrees_of_freedom * (c - 1) / (1 - c / k) if c < k else math.inf


def half_width(count: float, variance: float, parameters: SequenceParameters) -> float:
    """Return the distance of the one-sided bound from the mean of `count` scores with this sample variance.

    It is sqrt(s^2 phi/n * t^2), with n_e = n/phi and nu = n_e - 1 + nu0, and s^2 = (nu0 s0^2 + (n_e - 1) s^2) / nu pooled with
    the prior; the pod effect is added in quadrature. One-sided at alpha is two-sided at 2 alpha, by symmetry. Infinite while
    there are too few blocks.
    """
    effective_blocks = count / parameters.inflation
    sample_degrees = effective_blocks - 1
    degrees_of_freedom = sample_degrees + parameters.prior.degrees_of_freedom
    if sample_degrees <= 0 or degrees_of_freedom <= 0:
        return math.inf
    t_squared = critical_t_squared(effective_blocks, degrees_of_freedom, parameters.mixture_precision, 2 * parameters.alpha)
    if t_squared == math.inf:
        return math.inf
    pooled_variance = (
        parameters.prior.degrees_of_freedom * parameters.prior.variance + sample_degrees * variance
    ) / degrees_of_freedom
    return math.sqrt(pooled_variance / effective_blocks * t_squared + parameters.pod_effect_bound**2)


def mean_lower_bound(pairs: PairedMoments, ratio: float, offset: float, parameters: SequenceParameters) -> float:
    """Return the lower bound of the mean score at this ratio and offset."""
    return pairs.score_mean(ratio, offset) - half_width(pairs.count, pairs.score_variance(ratio), parameters)


def mean_upper_bound(pairs: PairedMoments, ratio: float, offset: float, parameters: SequenceParameters) -> float:
    """Return the upper bound of the mean score at this ratio and offset."""
    return pairs.score_mean(ratio, offset) + half_width(pairs.count, pairs.score_variance(ratio), parameters)


def ratio_bounds(
    pairs: PairedMoments, lower_parameters: SequenceParameters, upper_parameters: SequenceParameters
) -> tuple[float, float]:
    """Return the bounds of the ratios canary / control that neither test excludes.

    Beyond the bounds the tests that decide have rejected. The method is Fieller's inversion. With C = t^2/n_e,

        (a - r b)^2 = C s^2(r) + (pod effect bound)^2

    is quadratic in r, because both the mean and the variance of the scores are polynomials in it. A bound is infinite where its
    test cannot reject yet, or the control's mean is not significantly above 0.
    """
    return _ratio_bound(pairs, lower_parameters, -1), _ratio_bound(pairs, upper_parameters, 1)


def _ratio_bound(pairs: PairedMoments, parameters: SequenceParameters, sign: int) -> float:
    """Return the lower (sign -1) or upper (sign 1) bound of canary / control: a root of the quadratic in `ratio_bounds`."""
    effective_blocks = pairs.count / parameters.inflation
    sample_degrees = effective_blocks - 1
    degrees_of_freedom = sample_degrees + parameters.prior.degrees_of_freedom
    unbounded = sign * math.inf
    if sample_degrees <= 0 or pairs.control_mean <= 0:
        return unbounded
    t_squared = critical_t_squared(effective_blocks, degrees_of_freedom, parameters.mixture_precision, 2 * parameters.alpha)
    if t_squared == math.inf:
        return unbounded
    sample_weight = t_squared / effective_blocks * sample_degrees / degrees_of_freedom / (pairs.count - 1)
    prior = parameters.prior
    fixed_part = t_squared / effective_blocks * prior.degrees_of_freedom * prior.variance / degrees_of_freedom
    fixed_part += parameters.pod_effect_bound**2
    quadratic = pairs.control_mean**2 - sample_weight * pairs.control_squares
    if quadratic <= 0:
        return unbounded
    half_linear = pairs.canary_mean * pairs.control_mean - sample_weight * pairs.cross_products
    constant = pairs.canary_mean**2 - sample_weight * pairs.canary_squares - fixed_part
    return (half_linear + sign * math.sqrt(max(0.0, half_linear * half_linear - quadratic * constant))) / quadratic


def blocks_until_half_width(
    distance: float, variance: float, parameters: SequenceParameters, max_blocks: int = 20_000
) -> int | None:
    """Return the number of blocks after which the bound is within `distance` of the mean, if mean and variance stay.

    Return None where it takes more than `max_blocks`, or no number of blocks suffices.
    """
    if distance <= parameters.pod_effect_bound or half_width(max_blocks, variance, parameters) > distance:
        return None
    low, high = 1, max_blocks
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if half_width(middle, variance, parameters) <= distance else (middle, high)
    return high


# ------------------------------------------------------------------------------------------------------------ rare events
@dataclass(frozen=True, slots=True)
class RareEvents:
    """Rare events of both arms, such as failed requests. The order of the fields is the saved format."""

    canary_events: float = 0.0
    """Events of the canary."""
    control_events: float = 0.0
    """Events of the control."""
    expected_canary_events: float = 0.0
    """Events expected on the canary if it were as good: the sum, over blocks, of events times its share of the exposure."""
    log_null: float = 0.0
    """Logarithm of the likelihood of the split, if it were as good."""

    def add_block(self, canary: float, control: float, share: float) -> RareEvents:
        """Return the sums with the events of one block, in which the canary had this share of the exposure, such as requests.

        Raise ValueError unless the share lies between 0 and 1.
        """
        if not 0 < share < 1:
            raise ValueError(f"the canary's share of the exposure lies between 0 and 1, not at {share}.")
        log_likelihood = canary * math.log(share) + control * math.log1p(-share)
        return RareEvents(
            self.canary_events + canary,
            self.control_events + control,
            self.expected_canary_events + (canary + control) * share,
            self.log_null + log_likelihood,
        )

    @property
    def e_value(self) -> float:
        """E-value against "each event falls on the canary with the probability of its share".

        Given N = x_c + x_s events, x_c is binomial. The alternative is a uniform mixture of all shares:
        E = B(1 + x_c, 1 + x_s) / (share^x_c (1 - share)^x_s). It is a martingale from event to event, so it is anytime-valid.
        Where events come in bursts, count the bursts.
        """
        log_mixture = (
            math.lgamma(1 + self.canary_events)
            + math.lgamma(1 + self.control_events)
            - math.lgamma(2 + self.canary_events + self.control_events)
        )
        return math.exp(min(log_mixture - self.log_null, 700.0))

    def is_canary_worse(self, alpha: float) -> bool:
        """Return whether the canary has significantly more events: E >= 1 / alpha, and more than expected."""
        return self.canary_events > self.expected_canary_events and self.e_value >= 1 / alpha


# --------------------------------------------------------------------------------------------------------------- deadline
_SPENT_ALPHA_SHARES = (
    (0.0, 0.5),
    (1.0, 0.5),
    (2.0, 0.5),
    (3.0, 0.53),
    (4.0, 0.57),
    (6.0, 0.62),
    (8.0, 0.65),
    (16.0, 0.72),
    (32.0, 0.78),
)
"""(deadline / tightest block count, share of alpha spent by the deadline), simulated."""


def alpha_with_deadline(alpha: float, deadline_block_count: float, tightest_block_count: float) -> float:
    """Return the level of a sequence that errs with probability `alpha` by a deadline after `deadline_block_count` blocks.

    A sequence keeps a part of its alpha for the time after the deadline, which is never used. The table has the part that is
    spent by `deadline_block_count / tightest_block_count`, simulated for normal scores of known variance at alpha 0.05 (the test
    repeats it). At smaller alphas less is spent. Both numbers are of effective blocks, n / phi. The level is never more than
    twice alpha.
    """
    horizon = deadline_block_count / tightest_block_count
    for (left, left_share), (right, right_share) in itertools.pairwise(_SPENT_ALPHA_SHARES):
        if horizon <= right:
            return alpha / (left_share + (right_share - left_share) * (horizon - left) / (right - left))
    return alpha / (_SPENT_ALPHA_SHARES[-1][1] if horizon <= 2 * _SPENT_ALPHA_SHARES[-1][0] else 1.0)
