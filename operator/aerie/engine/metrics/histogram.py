"""Histograms as Prometheus writes them: cumulative counts on bucket edges, and what they do and do not tell.

Guarantees: a quantile never claims more than its bucket's two edges; the estimate inside is said to be one. Sums and differences
are exact on the counts. Not guaranteed: the sum of the observations to more than double precision.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantile:
    """Where a quantile lies: above `low`, at most `high`, both edges of one bucket, in the histogram's unit.

    `high` is infinite when it lies beyond the last finite edge; `estimate` is then that edge.
    """

    low: float
    high: float
    estimate: float
    """By linear interpolation inside the bucket, as PromQL's histogram_quantile does."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts of observations up to and including each edge, and the sum of the observations."""

    edges: tuple[float, ...]
    """Upper edges, rising; the last is +Inf."""
    counts: tuple[float, ...]
    """Cumulative, one for each edge; floats because Prometheus has no integers."""
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
        """None without observations."""
        return self.sum / self.count if self.count > 0 else None

    def __add__(self, other: Histogram) -> Histogram:
        """Both together. Raises ValueError when the edges differ."""
        return self._combine(other, 1)

    def __sub__(self, other: Histogram) -> Histogram:
        """What was observed since `other`. Raises ValueError when the edges differ; after a reset, counts are negative."""
        return self._combine(other, -1)

    def _combine(self, other: Histogram, sign: int) -> Histogram:
        if self.edges != other.edges:
            raise ValueError(f"histograms with different edges cannot be combined: {self.edges} and {other.edges}.")
        counts = tuple(mine + sign * theirs for mine, theirs in zip(self.counts, other.counts, strict=True))
        return Histogram(self.edges, counts, self.sum + sign * other.sum)

    def quantile(self, share: float) -> Quantile | None:
        """Where the observation at this share (0..1) of all lies; None without observations.

        The first bucket begins at 0: all that vLLM measures with histograms is a duration or a count.
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
        """Bounds of the share of observations that are at most `limit`; None without observations.

        Both are equal when `limit` is an edge.
        """
        if self.count <= 0:
            return None
        index = bisect_left(self.edges, limit)
        upper = self.counts[index] / self.count
        if self.edges[index] == limit:
            return upper, upper
        return (self.counts[index - 1] / self.count if index else 0.0), upper
