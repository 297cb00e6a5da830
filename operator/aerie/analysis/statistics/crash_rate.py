"""Tests whether the canary's engine processes end more often than the control's, and than engines usually do.

Crashes are events with an exposure. A process that ends takes its counters along: its running requests are neither finished nor
failed, and its window is excluded. So scrapes alone make a canary appear better the more often it crashes. The kubelet counts
restarts instead, and blocks report how many pods were followed for how long.

The evidence is a Bayes factor, with rates of crashes by pod-hour and x crashes in T pod-hours of each arm:

    as good   both arms crash at one rate. Most clusters: engines that run well, Gamma(1/2, 336 h), half a crash in two weeks.
              One cluster of 100: engines that do not, Gamma(1/2, 24 h). One of 1,000: engines that crash, Gamma(1/2, 1 h)
    worse     the control's rate is drawn likewise, the canary's from Gamma(1/2, 1 h)

    m(x, T | a, b) = b^a Gamma(a + x) / (Gamma(a) (b + T)^(a + x)),    the marginal likelihood but for factors of both

Two crashes of a canary in an hour against none of the control have a factor of 2,000, one has 100; two against one have 6. (GPUs
and their hosts alone end a process of 8 GPUs once in nine months: 419 interruptions in 54 days on 16,384 GPUs, arXiv 2407.21783,
table 5.)

Guarantee, over rates drawn as above: the factor of equally good arms ever reaches 1 / alpha with a chance of at most alpha. It is
a martingale in time. Not guaranteed: the same at every single rate; repair a cluster whose engines crash every day first.
Evicted pods and lost nodes are not counted: their cause is a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

SECONDS_PER_HOUR = 3600.0
GAMMA_PRIOR_SHAPE = 0.5
CRASHING_ENGINE_PRIOR_POD_HOURS = 1.0
"""Pod-hours of the prior on the rate of a canary that crashes."""
CLUSTER_CRASH_PRIORS = ((0.989, 336.0), (0.01, 24.0), (0.001, CRASHING_ENGINE_PRIOR_POD_HOURS))
"""Kinds of clusters: (share of the clusters, pod-hours of the prior on the rate of their engines)."""


@dataclass(frozen=True, slots=True)
class CrashCounts:
    """Crashes and exposure of both arms so far."""

    canary_crashes: int = 0
    control_crashes: int = 0
    canary_pod_hours: float = 0.0
    """Pod-hours of the canary."""
    control_pod_hours: float = 0.0
    """Pod-hours of the control."""
    counted_restarts: dict[str, int] = field(default_factory=dict)
    """Restarts already counted, by name of the pods that have crashed since counting began: each is counted once."""

    def add_exposure(self, canary_pods: int, control_pods: int, seconds: float) -> CrashCounts:
        """Return the counts after `seconds` more with these numbers of pods."""
        return replace(
            self,
            canary_pod_hours=self.canary_pod_hours + canary_pods * seconds / SECONDS_PER_HOUR,
            control_pod_hours=self.control_pod_hours + control_pods * seconds / SECONDS_PER_HOUR,
        )

    def add_restarts(self, canary_restarts: dict[str, int], control_restarts: dict[str, int]) -> CrashCounts:
        """Return the counts with the restarts, by pod name, of all pods whose process has ended since counting began.

        The first number observed of a pod counts as one crash, because how many of its restarts are older is not known.
        Return the same object when nothing is new.
        """
        canary_crashes, control_crashes = (
            sum(max(0, restarts - self.counted_restarts.get(name, restarts - 1)) for name, restarts in arm_restarts.items())
            for arm_restarts in (canary_restarts, control_restarts)
        )
        if not canary_crashes and not control_crashes:
            return self
        return replace(
            self,
            canary_crashes=self.canary_crashes + canary_crashes,
            control_crashes=self.control_crashes + control_crashes,
            counted_restarts={**self.counted_restarts, **canary_restarts, **control_restarts},
        )

    @property
    def bayes_factor(self) -> float:
        """The Bayes factor of "worse" against "as good"."""
        log_worse = _log_marginal(
            self.canary_crashes, self.canary_pod_hours, CRASHING_ENGINE_PRIOR_POD_HOURS
        ) + _log_marginal_of_any_cluster(self.control_crashes, self.control_pod_hours)
        log_as_good = _log_marginal_of_any_cluster(
            self.canary_crashes + self.control_crashes, self.canary_pod_hours + self.control_pod_hours
        )
        return math.exp(min(log_worse - log_as_good, 700.0))

    def is_canary_worse(self, alpha: float) -> bool:
        """Return whether the canary's processes end more often, at this alpha."""
        return self._is_canary_rate_higher and self.bayes_factor >= 1 / alpha

    @property
    def is_suspicious(self) -> bool:
        """True if the evidence is more for than against the canary's processes ending more often."""
        return self._is_canary_rate_higher and self.bayes_factor > 1

    @property
    def _is_canary_rate_higher(self) -> bool:
        """True if the canary's processes have ended more often by the pod-hour."""
        return self.canary_crashes * max(self.control_pod_hours, 1e-9) > self.control_crashes * self.canary_pod_hours

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def _log_marginal_of_any_cluster(events: int, hours: float) -> float:
    """Return the logarithm of m(x, T), averaged over the kinds of clusters."""
    log_parts = [math.log(share) + _log_marginal(events, hours, prior_hours) for share, prior_hours in CLUSTER_CRASH_PRIORS]
    largest = max(log_parts)
    return largest + math.log(math.fsum(math.exp(log_part - largest) for log_part in log_parts))


def _log_marginal(events: int, hours: float, prior_hours: float) -> float:
    """Return the logarithm of m(x, T), without the factors that all have."""
    return (
        GAMMA_PRIOR_SHAPE * math.log(prior_hours)
        + math.lgamma(GAMMA_PRIOR_SHAPE + events)
        - math.lgamma(GAMMA_PRIOR_SHAPE)
        - (GAMMA_PRIOR_SHAPE + events) * math.log(prior_hours + hours)
    )
