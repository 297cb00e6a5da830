"""Histograms in Prometheus's form: cumulative counts on bucket edges, and what they do and do not identify.

Guarantees: a quantile is never narrower than the two edges of its bucket; the estimate inside the bucket is marked as one. Sums
and differences are exact on the counts. Not guaranteed: the sum of the observations beyond double precision.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantile:
    """Interval that contains a quantile: above `low`, at most `high`, both edges of one bucket, in the histogram's unit.

    `high` is infinite if the quantile lies beyond the last finite edge; `estimate` is then that edge.
    """

    low: float
    high: float
    estimate: float
    """Linear interpolation inside the bucket, as in PromQL's histogram_quantile."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts of observations up to and including each edge, and the sum of the observations."""

    edges: tuple[float, ...]
    """Upper edges, increasing; the last is +Inf."""
    counts: tuple[float, ...]
    """Cumulative counts, one for each edge; floats because Prometheus has no integers."""
    sum: float

    def __post_init__(self) -> None:
        if not self.edges or len(self.edges) != len(self.counts) or self.edges[-1] != math.inf:
            raise ValueError(
                f"a histogram needs one count for each edge and a last edge of +Inf, not {self.edges}, {self.counts}."
            )
        if any(left >= right for left, right in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError(f"the edges of a histogram rise, not {self.edges}.")

    @property
    def count(self) -> float:
        """Number of observations."""
        return self.counts[-1]

    @property
    def mean(self) -> float | None:
        """Mean of the observations; None without observations."""
        return self.sum / self.count if self.count > 0 else None

    def __add__(self, other: Histogram) -> Histogram:
        """Return the sum of both histograms. Raises ValueError if the edges differ."""
        return self._combine(other, 1)

    def __sub__(self, other: Histogram) -> Histogram:
        """Return the observations since `other`. Raises ValueError if the edges differ. After a reset, counts are negative."""
        return self._combine(other, -1)

    def _combine(self, other: Histogram, sign: int) -> Histogram:
        if self.edges != other.edges:
            raise ValueError(f"histograms with different edges cannot be combined: {self.edges} and {other.edges}.")
        counts = tuple(count + sign * other_count for count, other_count in zip(self.counts, other.counts, strict=True))
        return Histogram(self.edges, counts, self.sum + sign * other.sum)

    def quantile(self, share: float) -> Quantile | None:
        """Return the bucket and estimate of the quantile at a share (0..1); None without observations.

        The first bucket begins at 0, because every vLLM histogram measures a duration or a count.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"a quantile is a share between 0 and 1, not {share}.")
        if self.count <= 0:
            return None
        rank = share * self.count
        index = bisect_left(self.counts, rank) if rank > 0 else bisect_right(self.counts, 0)
        low = self.edges[index - 1] if index else 0.0
        high = self.edges[index]
        below = self.counts[index - 1] if index else 0.0
        if high == math.inf:
            return Quantile(low, high, low)
        return Quantile(low, high, low + (high - low) * (rank - below) / (self.counts[index] - below))

    def share_within(self, limit: float) -> tuple[float, float] | None:
        """Return bounds of the share of observations that are at most `limit`; None without observations.

        The bounds are equal if `limit` is an edge.
        """
        if self.count <= 0:
            return None
        index = bisect_left(self.edges, limit)
        upper = self.counts[index] / self.count
        if self.edges[index] == limit:
            return upper, upper
        return (self.counts[index - 1] / self.count if index else 0.0), upper
