"""An anytime-valid test of the effect of a drafter by the random order of the windows alone.

A unit's score Y compares its windows with the canary with those with the stable drafter, at the ratio that is tested. If the
canary is exactly at that ratio, the windows would have had the same counts, up to the ratio, in the opposite order. The score
would then have been -Y. The order is a fair coin, so the sign of Y is one too, whatever |Y| is. Hence for every lambda that
depends only on the past and on |Y|

    product over units of  exp(lambda Y) / cosh(lambda Y)

is a martingale with mean 1, and by Ville's inequality it ever reaches 1 / alpha with a chance of alpha at most. This is a
randomisation test (Fisher 1935) as an e-process; see Ramdas, Ruf, Larsson, Koolen, "Testing exchangeability" (2022), and for
design-based inference that may stop at any time Ham, Bojinov, Lindon, Tingley, arXiv 2210.08639.

The test is a mixture of several lambda, each tuned for an effect that shows after another time tau:

    lambda = STRENGTH sqrt(seconds / tau) / sd     sd^2 = seconds * (sum of Y^2 so far) / (sum of seconds so far)

The scale uses magnitudes only, so it costs no validity.

At the deadline, a time that is fixed beforehand, a promotion may use one further look with an alpha of its own: sum of Y /
sqrt(sum of Y^2) against the normal quantile. An e-process keeps a part of its alpha for the time after the deadline. This look
uses what would be lost.

Guarantee, for an effect that is the same ratio in every window: P(E ever reaches 1 / alpha) <= alpha, exactly, for any
distribution of requests, any drift, any correlation over time and pods, and any number of units. n units give at most 2^n.
Not guaranteed: the level of the look at the deadline, which is normal theory. Under random signs its tail exceeds the normal
one by a small factor at most (Pinelis, Ann. Stat. 1994), and heavy-tailed scores lower it (Efron, JASA 1969). Neither is anything
guaranteed exactly for effects that differ from window to window with the mean at the ratio. Then the sum of squares contains
their variance, and the rates hold for many units only (as in Ham et al.).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

STRENGTH = 2.8
"""Standard errors after the time tau that a component is tuned for: about those at which it reaches 1 / alpha."""

TUNED_WINDOWS = (1, 32)
"""The earlier times tau, in first windows: for drafters that do harm, and for effects that are clear after some pairs."""
TUNED_DEADLINE_SHARES = (1 / 16, 1 / 2.4)
"""The later times tau, as shares of the deadline."""
WEIGHTS = (0.25, 0.25, 0.38, 0.12)
"""Weights of the components."""
MIN_UNITS_AT_DEADLINE = 10
"""Units below which the look at the deadline is not normal enough."""


@dataclass(frozen=True, slots=True)
class SignFlipTest:
    """The evidence that the mean score is above 0. The order of the fields is the saved format."""

    units: int = 0
    score_sum: float = 0.0
    squares: float = 0.0
    """Sum of squared scores."""
    seconds: float = 0.0
    """Sum of the seconds of the units."""
    log_wealth: tuple[float, ...] = (0.0,) * len(WEIGHTS)
    """Logarithm of each component's martingale."""

    def add_unit(self, score: float, seconds: float, times: Sequence[float]) -> SignFlipTest:
        """Return the test with the score of one more unit, which was counted for `seconds`. A score of 0 changes nothing.

        `times` are the times tau of the components, the same for every unit.
        """
        if score == 0:
            return self
        squares, total_seconds = self.squares + score * score, self.seconds + seconds
        scaled = STRENGTH * score * math.sqrt(total_seconds / squares)
        bets = [scaled / math.sqrt(time) for time in times]
        wealth = tuple(value + bet - _log_cosh(bet) for value, bet in zip(self.log_wealth, bets, strict=True))
        return SignFlipTest(self.units + 1, self.score_sum + score, squares, total_seconds, wealth)

    @property
    def log_e_value(self) -> float:
        """Logarithm of the e-value against a mean score of 0 or below."""
        largest = max(self.log_wealth)
        return largest + math.log(
            math.fsum(weight * math.exp(value - largest) for weight, value in zip(WEIGHTS, self.log_wealth, strict=True))
        )

    def is_significant(self, alpha: float) -> bool:
        """Return whether the mean score is significantly above 0."""
        return self.log_e_value >= -math.log(alpha)

    def is_significant_at_deadline(self, alpha: float) -> bool:
        """Return whether the mean score is significantly above 0, by one look at a time that was fixed beforehand."""
        quantile = statistics.NormalDist().inv_cdf(1 - alpha)
        return self.units >= MIN_UNITS_AT_DEADLINE and self.score_sum >= quantile * math.sqrt(self.squares)


def _log_cosh(value: float) -> float:
    """Return the logarithm of cosh, without overflow."""
    return abs(value) + math.log1p(math.exp(-2 * abs(value))) - math.log(2)
