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

Guarantee, for an effect that is the same ratio in every window: P(E ever reaches 1 / alpha) <= alpha, exactly, for any
distribution of requests, any drift, any correlation over time and pods, and any number of units. n units give at most 2^n.
Not guaranteed: effects that differ from window to window with the mean at the ratio. Then the sum of squares contains their
variance, and the rate holds for many units only (as in Ham et al.).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STRENGTH = 2.7
"""Standard errors after the time tau that a component is tuned for: about those at which it reaches 1 / alpha."""


def tuned_times(first_seconds: float, last_seconds: float, count: int = 5) -> tuple[float, ...]:
    """Return the times tau of the components, in seconds: a geometric series.

    >>> tuned_times(10.0, 1000.0, 3)
    (10.0, 100.0, 1000.0)
    """
    step = (last_seconds / first_seconds) ** (1 / (count - 1))
    return tuple(round(first_seconds * step**index, 6) for index in range(count))


@dataclass(frozen=True, slots=True)
class SignFlipTest:
    """The evidence that the mean score is above 0. The order of the fields is the saved format."""

    squares: float = 0.0
    """Sum of squared scores."""
    seconds: float = 0.0
    """Sum of the seconds of the units."""
    log_wealth: tuple[float, ...] = ()
    """Logarithm of each component's martingale; empty before the first unit."""

    def add_unit(self, score: float, seconds: float, times: Sequence[float]) -> SignFlipTest:
        """Return the test with the score of one more unit, which was counted for `seconds`. A score of 0 changes nothing.

        `times` are the tuned times of the components, the same for every unit.
        """
        if score == 0:
            return self
        squares, total_seconds = self.squares + score * score, self.seconds + seconds
        scaled = STRENGTH * score * math.sqrt(total_seconds / squares)
        wealth = self.log_wealth or (0.0,) * len(times)
        bets = [scaled / math.sqrt(time) for time in times]
        return SignFlipTest(
            squares, total_seconds, tuple(value + bet - _log_cosh(bet) for value, bet in zip(wealth, bets, strict=True))
        )

    @property
    def log_e_value(self) -> float:
        """Logarithm of the e-value against a mean score of 0 or below."""
        if not self.log_wealth:
            return 0.0
        largest = max(self.log_wealth)
        return largest + math.log(math.fsum(math.exp(value - largest) for value in self.log_wealth) / len(self.log_wealth))

    def is_significant(self, alpha: float) -> bool:
        """Return whether the mean score is significantly above 0."""
        return self.log_e_value >= -math.log(alpha)


def _log_cosh(value: float) -> float:
    """Return the logarithm of cosh, without overflow."""
    return abs(value) + math.log1p(math.exp(-2 * abs(value))) - math.log(2)
