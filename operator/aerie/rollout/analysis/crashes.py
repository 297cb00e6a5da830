"""Whether the canary's engine processes end more often than the control's, and than engines usually do: events with an exposure.

A process that ends takes its counters along: what it was answering is neither finished nor failed, and its window is left out. So
pages alone make a canary look better the more often it crashes. The kubelet counts restarts, and blocks tell for how long how
many pods were followed.

The evidence is a Bayes factor, with rates of crashes by pod-hour and x crashes in T pod-hours of each arm:

    as good   both arms crash at one rate: of engines that run well, Gamma(1/2, 336 h), half a crash in two weeks; in one cluster
              of 100 of engines that do not, Gamma(1/2, 24 h), and in one of 1,000 of engines that crash, Gamma(1/2, 1 h)
    worse     the control's rate is drawn so, the canary's from Gamma(1/2, 1 h)

    m(x, T | a, b) = b^a Gamma(a + x) / (Gamma(a) (b + T)^(a + x)),    the marginal likelihood but for factors of both

Two crashes of a canary in an hour against none weigh 2,000, one weighs 100; two against one of the control's 6. (GPUs and their
hosts alone end a process of 8 GPUs once in nine months: 419 interruptions in 54 days on 16,384 GPUs, arXiv 2407.21783, table 5.)

Guarantees: over rates drawn as said, the chance that the factor ever reaches 1 / alpha though the arms are as good is at most
alpha (it is a martingale in time). Not guaranteed: that at every single rate; a cluster whose engines crash every day should
be mended first. Evicted pods and lost nodes are not counted: they tell of a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

HOUR = 3600.0
SHAPE = 0.5
HARMFUL = 1.0
"""Pod-hours of the prior of a canary that crashes."""
CLUSTERS = ((0.989, 336.0), (0.01, 24.0), (0.001, HARMFUL))
"""Of clusters the share, and pod-hours of the prior of their engines."""


@dataclass(frozen=True, slots=True)
class Crashes:
    """What has been counted."""

    canary: int = 0
    control: int = 0
    canary_hours: float = 0.0
    """Pod-hours."""
    control_hours: float = 0.0
    known: dict[str, int] = field(default_factory=dict)
    """Restarts of those pods that have crashed since counting began, by name: so that each is counted once."""

    def followed(self, canary_pods: int, control_pods: int, seconds: float) -> Crashes:
        """After so many seconds with so many pods."""
        return replace(
            self,
            canary_hours=self.canary_hours + canary_pods * seconds / HOUR,
            control_hours=self.control_hours + control_pods * seconds / HOUR,
        )

    def seen(self, canary: dict[str, int], control: dict[str, int]) -> Crashes:
        """With the restarts of all pods whose process has ended since counting began. What is first seen of a pod counts once,
        because how many of its restarts are older is not known."""
        mine, theirs = (
            sum(max(0, restarts - self.known.get(name, restarts - 1)) for name, restarts in arm.items())
            for arm in (canary, control)
        )
        if not mine and not theirs:
            return self
        return replace(self, canary=self.canary + mine, control=self.control + theirs, known={**self.known, **canary, **control})

    @property
    def weight(self) -> float:
        """The Bayes factor against "as good"."""
        worse = _marginal(self.canary, self.canary_hours, HARMFUL) + _any(self.control, self.control_hours)
        both = _any(self.canary + self.control, self.canary_hours + self.control_hours)
        return math.exp(min(worse - both, 700.0))

    def more(self, alpha: float) -> bool:
        """Whether the canary's certainly end more often."""
        return self._often and self.weight >= 1 / alpha

    @property
    def suspicious(self) -> bool:
        """Whether more speaks for the canary's ending more often than against it."""
        return self._often and self.weight > 1

    @property
    def _often(self) -> bool:
        """Whether the canary's have ended more often, by the hour."""
        return self.canary * max(self.control_hours, 1e-9) > self.control * self.canary_hours

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def _any(events: int, hours: float) -> float:
    """Logarithm of m(x, T) in a cluster of which nothing is known."""
    parts = [math.log(share) + _marginal(events, hours, prior) for share, prior in CLUSTERS]
    most = max(parts)
    return most + math.log(math.fsum(math.exp(part - most) for part in parts))


def _marginal(events: int, hours: float, prior: float) -> float:
    """Logarithm of m(x, T), without the factors that all have."""
    return SHAPE * math.log(prior) + math.lgamma(SHAPE + events) - math.lgamma(SHAPE) - (SHAPE + events) * math.log(prior + hours)
