"""Histograms: arithmetic on bucket edges, and quantiles that stay inside their bucket."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.engine.metrics.histogram import Histogram, Quantile

EDGES = (0.01, 0.1, 1.0, 10.0, math.inf)


def build_histogram(*buckets: float, total: float = 0.0) -> Histogram:
    """Build a histogram from the counts of the single buckets."""
    return Histogram(EDGES, tuple(accumulate(buckets)), total)


BUCKETS = st.lists(st.integers(0, 1000).map(float), min_size=5, max_size=5)


@given(BUCKETS, st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_of_its_share(buckets: list[float], share: float) -> None:
    histogram = build_histogram(*buckets)
    quantile = histogram.quantile(share)
    if histogram.count == 0:
        assert quantile is None
        return
    assert quantile is not None
    assert quantile.low <= quantile.estimate <= quantile.high
    below = sum(count for edge, count in zip(EDGES, buckets, strict=True) if edge <= quantile.low)
    inside = buckets[EDGES.index(quantile.high)]
    assert inside > 0
    assert below <= share * histogram.count <= below + inside


@given(BUCKETS, st.floats(0, 1), st.floats(0, 1))
def test_quantiles_rise_with_their_share(buckets: list[float], first_share: float, second_share: float) -> None:
    low, high = (
        build_histogram(*buckets).quantile(min(first_share, second_share)),
        build_histogram(*buckets).quantile(max(first_share, second_share)),
    )
    assert low is None or high is None or low.estimate <= high.estimate


@given(BUCKETS, BUCKETS)
def test_the_difference_is_the_inverse_of_the_sum(first: list[float], second: list[float]) -> None:
    assert (build_histogram(*first) + build_histogram(*second)) - build_histogram(*second) == build_histogram(*first)


@given(BUCKETS, st.floats(0, 20))
def test_the_share_within_a_limit_is_bounded_by_its_edges(buckets: list[float], limit: float) -> None:
    histogram = build_histogram(*buckets)
    bounds = histogram.share_within(limit)
    if histogram.count == 0:
        assert bounds is None
        return
    assert bounds is not None
    assert 0 <= bounds[0] <= bounds[1] <= 1
    assert bounds[0] == bounds[1] or limit not in EDGES


def test_quantiles_means_and_shares_of_examples() -> None:
    assert build_histogram(0, 10, 10, 0, 0).quantile(0.5) == Quantile(0.01, 0.1, 0.1)
    assert build_histogram(0, 10, 10, 0, 0).quantile(0.75) == Quantile(0.1, 1.0, 0.1 + 0.9 * 0.5)
    assert build_histogram(0, 10, 0, 0, 10).quantile(0.9) == Quantile(10.0, math.inf, 10.0)
    assert build_histogram(4, 0, 0, 0, 0).quantile(0.5) == Quantile(0.0, 0.01, 0.005)
    assert build_histogram(0, 4, 0, 0, 0).quantile(0) == Quantile(0.01, 0.1, 0.01)
    assert build_histogram(1, 1, 2, 0, 0, total=8.0).mean == 2.0
    assert build_histogram(0, 0, 0, 0, 0).mean is None
    assert build_histogram(1, 1, 2, 0, 0).share_within(0.1) == (0.5, 0.5)
    assert build_histogram(1, 1, 2, 0, 0).share_within(0.5) == (0.5, 1.0)
    assert build_histogram(1, 1, 2, 0, 0).share_within(-1) == (0.0, 0.25)


def test_histograms_of_different_edges_cannot_be_added() -> None:
    other = Histogram((1.0, math.inf), (1.0, 1.0), 1.0)
    with pytest.raises(ValueError, match="different edges"):
        build_histogram(1, 0, 0, 0, 0) + other
    with pytest.raises(ValueError, match="different edges"):
        build_histogram(1, 0, 0, 0, 0) - other


@pytest.mark.parametrize(
    ("edges", "counts"), [((), ()), ((1.0,), (1.0,)), ((1.0, math.inf), (1.0,)), ((2.0, 1.0, math.inf), (1.0, 1.0, 1.0))]
)
def test_invalid_edges_and_counts_are_rejected(edges: tuple[float, ...], counts: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="histogram"):
        Histogram(edges, counts, 0.0)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_outside_0_to_1_is_rejected(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        build_histogram(1, 0, 0, 0, 0).quantile(share)
