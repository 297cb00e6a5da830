"""Whether a small share, such as that of failed requests, is certainly below a limit: exact bounds of counts, at every moment.

A mean of block shares with a sample variance knows nothing of how many requests a block holds: where none has failed its width is
zero, as if none ever would. So what is small is judged by the counts themselves. The bounds invert a likelihood ratio against a
Beta mixture (Robbins 1970; Howard, Ramdas, McAuliffe, Sekhon, Ann. Stat. 2021, section 3): with x of n,

    E(p) = B(A + x, B + n - x) / (B(A, B) p^x (1 - p)^(n - x)),    p is excluded once E(p) >= 1 / alpha

    no event yet, limit 0.5 %:   about 1,000 requests exclude it at alpha 0.025

Guarantees: for independent requests the chance that a bound is ever wrong is at most alpha, for every mixture. Not guaranteed:
that requests fail independently. Where they fail in bursts, give `inflation`: how many requests are worth one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

A = 0.5
"""Of the mixture Beta(A, B), whose mean is at the limit that is asked about: there the bounds are tightest."""
_STEPS = 40


@dataclass(frozen=True, slots=True)
class Shares:
    """Events of both arms, and of how many."""

    canary: float = 0.0
    canary_of: float = 0.0
    control: float = 0.0
    control_of: float = 0.0

    def add(self, canary: tuple[float, float], control: tuple[float, float]) -> Shares:
        """With those of one more block: (events, of how many) of each arm."""
        return Shares(
            self.canary + canary[0],
            self.canary_of + canary[1],
            self.control + control[0],
            self.control_of + control[1],
        )

    def times(self, factor: float) -> Shares:
        """As if there were so many times as much of it all."""
        return Shares(*(factor * part for part in (self.canary, self.canary_of, self.control, self.control_of)))

    def below(self, ratio: float, offset: float, alpha: float, inflation: float = 1.0) -> bool:
        """Whether the canary's share is certainly below ratio * the control's + offset; wrong with chance alpha, if ever."""
        if self.canary_of <= 0 or self.control_of <= 0:
            return False
        limit = max(offset, ratio * self.control / self.control_of + offset)
        least = lower(self.control / inflation, self.control_of / inflation, limit, alpha / 2) if ratio > 0 else 0.0
        return upper(self.canary / inflation, self.canary_of / inflation, limit, alpha / 2) < ratio * least + offset


def upper(events: float, of: float, limit: float, alpha: float) -> float:
    """The largest share that is not excluded, with the mixture set for shares around `limit`."""
    events, of = _counts(events, of)
    mixture = _mixture(events, of, limit)
    low, high = (events / of if of > 0 else 0.0), 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _excluded(middle, events, of, mixture, alpha) else (middle, high)
    return high


def lower(events: float, of: float, limit: float, alpha: float) -> float:
    """The smallest share that is not excluded."""
    events, of = _counts(events, of)
    mixture = _mixture(events, of, limit)
    low, high = 0.0, (events / of if of > 0 else 1.0)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _excluded(middle, events, of, mixture, alpha) else (low, middle)
    return low


def _counts(events: float, of: float) -> tuple[float, float]:
    """Counts of two counters that are not read at one instant may miss each other by a few."""
    return max(0.0, min(events, of)), max(0.0, of)


def _mixture(events: float, of: float, limit: float) -> float:
    """Logarithm of the likelihood of the counts under the mixture."""
    b = A * (1 - limit) / limit if 0 < limit < 1 else A
    return _log_beta(A + events, b + of - events) - _log_beta(A, b)


def _excluded(share: float, events: float, of: float, mixture: float, alpha: float) -> bool:
    if not 0 < share < 1:
        return events > 0 if share <= 0 else events < of
    return mixture - events * math.log(share) - (of - events) * math.log1p(-share) >= -math.log(alpha)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
