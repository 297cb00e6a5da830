"""Anytime-valid exact bounds of a small share, such as that of failed requests, from counts; they test it against a limit.

A mean of block shares with a sample variance ignores how many requests a block holds. Where no request has failed, its width is
zero, as if none ever would. So small shares are tested by the counts themselves. The bounds invert a likelihood ratio against a
Beta mixture (Robbins 1970; Howard, Ramdas, McAuliffe, Sekhon, Ann. Stat. 2021, section 3): with x of n,

    E(p) = B(A + x, B + n - x) / (B(A, B) p^x (1 - p)^(n - x)),    p is excluded once E(p) >= 1 / alpha

    no event yet, limit 0.5 %:   about 1,000 requests exclude it at alpha 0.025

Guarantee: for independent requests the chance that a bound is ever wrong is at most alpha, for every mixture. Not guaranteed:
that requests fail independently. Where they fail in bursts, set `inflation`: the number of requests that count as one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIXTURE_BETA_A = 0.5
"""A of the mixture Beta(A, B). The mixture's mean is at the limit that is tested, where the bounds are tightest."""
_BISECTION_STEPS = 40


@dataclass(frozen=True, slots=True)
class ShareCounts:
    """Events and totals of both arms. The order of the fields is the saved format."""

    canary_events: float = 0.0
    canary_total: float = 0.0
    control_events: float = 0.0
    control_total: float = 0.0

    def add_block(self, canary: tuple[float, float], control: tuple[float, float]) -> ShareCounts:
        """Return the counts with those of one more block: (events, total) of each arm."""
        return ShareCounts(
            self.canary_events + canary[0],
            self.canary_total + canary[1],
            self.control_events + control[0],
            self.control_total + control[1],
        )

    def scale_by(self, factor: float) -> ShareCounts:
        """Return all counts multiplied by the factor, for a forecast."""
        return ShareCounts(
            *(factor * count for count in (self.canary_events, self.canary_total, self.control_events, self.control_total))
        )

    def is_below(self, ratio: float, offset: float, alpha: float, inflation: float = 1.0) -> bool:
        """Return whether the canary's share is below ratio * the control's + offset; ever wrong with chance alpha at most."""
        if self.canary_total <= 0 or self.control_total <= 0:
            return False
        limit = max(offset, ratio * self.control_events / self.control_total + offset)
        control_lower_bound = (
            share_lower_bound(self.control_events / inflation, self.control_total / inflation, limit, alpha / 2)
            if ratio > 0
            else 0.0
        )
        return (
            share_upper_bound(self.canary_events / inflation, self.canary_total / inflation, limit, alpha / 2)
            < ratio * control_lower_bound + offset
        )


def share_upper_bound(events: float, total: float, limit: float, alpha: float) -> float:
    """Return the largest share that is not excluded, with the mixture set for shares around `limit`."""
    events, total = _clip_counts(events, total)
    log_mixture = _log_mixture_likelihood(events, total, limit)
    low, high = (events / total if total > 0 else 0.0), 1.0
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _is_excluded(middle, events, total, log_mixture, alpha) else (middle, high)
    return high


def share_lower_bound(events: float, total: float, limit: float, alpha: float) -> float:
    """Return the smallest share that is not excluded, with the mixture set for shares around `limit`."""
    events, total = _clip_counts(events, total)
    log_mixture = _log_mixture_likelihood(events, total, limit)
    low, high = 0.0, (events / total if total > 0 else 1.0)
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _is_excluded(middle, events, total, log_mixture, alpha) else (low, middle)
    return low


def _clip_counts(events: float, total: float) -> tuple[float, float]:
    """Return events and total with 0 <= events <= total: two counters not read at one instant may differ by a few."""
    return max(0.0, min(events, total)), max(0.0, total)


def _log_mixture_likelihood(events: float, total: float, limit: float) -> float:
    """Return the logarithm of the likelihood of the counts under the mixture."""
    b = MIXTURE_BETA_A * (1 - limit) / limit if 0 < limit < 1 else MIXTURE_BETA_A
    return _log_beta(MIXTURE_BETA_A + events, b + total - events) - _log_beta(MIXTURE_BETA_A, b)


def _is_excluded(share: float, events: float, total: float, log_mixture: float, alpha: float) -> bool:
    """Return whether E(share) >= 1 / alpha."""
    if not 0 < share < 1:
        return events > 0 if share <= 0 else events < total
    return log_mixture - events * math.log(share) - (total - events) * math.log1p(-share) >= -math.log(alpha)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
