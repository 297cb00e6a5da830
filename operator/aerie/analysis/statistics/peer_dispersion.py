"""Deviations of equal pods from one another during an analysis: whether a history still fits, and how far equal pods are apart.

A history (`calibration`) knows the dispersion of yesterday's traffic. Where requests are routed otherwise since then, canary and
control may differ for an hour by what their tenants ask, and no block of the two of them shows that it is not the drafter. The
stable pods show it: they are equal, and get the same routing at the same time. In each block, each of them deviates from the mean
of the others. Two statistics follow, both without the canary, so that they favour no verdict:

    mean of a pod's deviations so far      its square is expected to be  variance * inflation / blocks + pod effect ^ 2
    mean over `BATCH_BLOCKS` blocks        likewise, with the blocks of a batch

The first is of the same length and memory as the analysis itself, but there are few pods. The second has more degrees of freedom
the longer the analysis lasts. The history does not fit where either is larger than it makes likely. Three stable pods have two
degrees of freedom, so no test separates a change of routing from chance for certain. The limit of the statistics is the
caller's, by the error that it prefers (`criteria.history_fit`).

Without a history that fits, the first statistic is itself the measure of how far two pods may be apart: pods are then the unit of
the comparison, by Student's t with as many degrees of freedom as there are pods less one.

Guarantees: pure and small: sums of at most `MAX_FOLLOWED_PODS` pods. Not guaranteed: that every change shows, because pods are
alike by chance where their tenants happen to be; and that a fitting history counts, which four of ten do at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aerie.analysis.statistics.calibration import MAX_FOLLOWED_PODS, Dispersion, PodEffect, deviations_from_others
from aerie.analysis.statistics.field_values import field_values

BATCH_BLOCKS = 8
"""Blocks in a batch: a quarter of an hour of two-minute blocks."""
MIN_TESTED_BLOCKS = 5
"""Blocks of a pod from which on it may refute a history."""


@dataclass(frozen=True, slots=True)
class _PodSums:
    """Sums of one pod's deviations. The order of the fields is the saved format."""

    block_count: int = 0
    total: float = 0.0
    batch_total: float = 0.0
    """Sum over the open batch."""

    @property
    def mean(self) -> float:
        """Mean of the deviations."""
        return self.total / self.block_count


@dataclass(frozen=True, slots=True)
class PeerDeviations:
    """Deviations of equal pods from one another in one metric, relative to its level."""

    pods: Mapping[str, _PodSums] = field(default_factory=dict)
    """Sums of each followed pod."""
    batch_count: int = 0
    """Closed batches of all pods."""
    batch_squares: float = 0.0
    """Sum of the squared means of these batches."""

    def add_block(self, values: Mapping[str, float]) -> PeerDeviations:
        """Return the deviations with one more block: the metric's value on each of the equal pods.

        A block of fewer than two pods changes nothing. Of many pods, the first by name are followed; one that has left makes room
        for another.
        """
        present = {name: value for name, value in sorted(values.items()) if value > 0}
        followed_first = sorted(present, key=lambda name: name not in self.pods)
        followed = {name: present[name] for name in followed_first[:MAX_FOLLOWED_PODS]}
        if len(followed) < 2:
            return self
        absent = [name for name in self.pods if name not in followed]
        pods = {name: self.pods[name] for name in absent[: MAX_FOLLOWED_PODS - len(followed)]}
        batch_count, batch_squares = self.batch_count, self.batch_squares
        for name, deviation in deviations_from_others(followed).items():
            sums = self.pods.get(name, _PodSums())
            block_count, batch_total = sums.block_count + 1, sums.batch_total + deviation
            if block_count % BATCH_BLOCKS == 0:
                batch_count, batch_squares, batch_total = batch_count + 1, batch_squares + (batch_total / BATCH_BLOCKS) ** 2, 0.0
            pods[name] = _PodSums(block_count, sums.total + deviation, batch_total)
        return PeerDeviations(pods, batch_count, batch_squares)

    def pod_effect(self, min_blocks: int) -> PodEffect | None:
        """Return how far a pod is from equal ones over all blocks so far, chance included.

        None while fewer than two pods have this many blocks.
        """
        means = [sums.mean for sums in self.pods.values() if sums.block_count >= min_blocks]
        if len(means) < 2:
            return None
        return PodEffect(math.sqrt(math.fsum(mean * mean for mean in means) / len(means)), len(means) - 1.0)

    def is_explained_by(self, history: Dispersion, prior: PodEffect, quantile: float) -> bool:
        """Return whether the history explains the deviations, with the pod effect that it has beside this prior.

        Each statistic has to be below this standard normal quantile. True while fewer than two pods have enough blocks.
        """
        pods = [sums for sums in self.pods.values() if sums.block_count >= MIN_TESTED_BLOCKS]
        if len(pods) < 2:
            return True
        block_variance, effect_variance = history.variance * history.inflation, history.pooled_pod_effect(prior).sd ** 2
        ratio = math.fsum(sums.mean**2 / (block_variance / sums.block_count + effect_variance) for sums in pods) / len(pods)
        if ratio > _ratio_limit(len(pods) - 1, quantile):
            return False
        batch_variance = block_variance / BATCH_BLOCKS + effect_variance
        if not self.batch_count:
            return True
        limit = _ratio_limit(self.batch_count * (1 - 1 / len(self.pods)), quantile)
        return self.batch_squares / self.batch_count <= batch_variance * limit

    def to_dict(self) -> dict[str, Any]:
        return {
            "pods": {name: field_values(sums) for name, sums in self.pods.items()},
            "batches": [self.batch_count, self.batch_squares],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> PeerDeviations:
        return cls({name: _PodSums(*values) for name, values in document["pods"].items()}, *document["batches"])


def _ratio_limit(degrees_of_freedom: float, quantile: float) -> float:
    """Return the limit of a variance, relative to its expectation: Wilson and Hilferty's quantile of chi-squared."""
    spread = 2 / (9 * degrees_of_freedom)
    return float((1 - spread + quantile * math.sqrt(spread)) ** 3)
