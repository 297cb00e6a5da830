"""Histograms: arithmetic on bucket edges, and quantiles that stay inside their bucket."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.engine.metrics.histogram import Histogram, Quantile

EDGES = (0.01, 0.1, 1.0, 10.0, math.inf)


def of(*buckets: float, total: float = 0.0) -> Histogram:
    """From the counts of the single buckets."""
    return Histogram(EDGES, tuple(accumulate(buckets)), total)


BUCKETS = st.lists(st.integers(0, 1000).map(float), min_size=5, max_size=5)


@given(BUCKETS, st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_that_holds_it(buckets: list[float], share: float) -> None:
    histogram = of(*buckets)
    found = histogram.quantile(share)
    if histogram.count == 0:
        assert found is None
        return
    assert found is not None
    assert found.low <= found.estimate <= found.high
    below = sum(count for edge, count in zip(EDGES, buckets, strict=True) if edge <= found.low)
    inside = buckets[EDGES.index(found.high)]
    assert inside > 0
    assert below <= share * histogram.count <= below + inside


@given(BUCKETS, st.floats(0, 1), st.floats(0, 1))
def test_quantiles_rise_with_their_share(buckets: list[float], one: float, other: float) -> None:
    low, high = of(*buckets).quantile(min(one, other)), of(*buckets).quantile(max(one, other))
    assert low is None or high is None or low.estimate <= high.estimate


@given(BUCKETS, BUCKETS)
def test_difference_undoes_the_sum(one: list[float], other: list[float]) -> None:
    assert (of(*one) + of(*other)) - of(*other) == of(*one)


@given(BUCKETS, st.floats(0, 20))
def test_the_share_within_a_limit_is_bounded_by_its_edges(buckets: list[float], limit: float) -> None:
    histogram = of(*buckets)
    bounds = histogram.share_within(limit)
    if histogram.count == 0:
        assert bounds is None
        return
    assert bounds is not None
    assert 0 <= bounds[0] <= bounds[1] <= 1
    assert bounds[0] == bounds[1] or limit not in EDGES


def test_examples() -> None:
    assert of(0, 10, 10, 0, 0).quantile(0.5) == Quantile(0.01, 0.1, 0.1)
    assert of(0, 10, 10, 0, 0).quantile(0.75) == Quantile(0.1, 1.0, 0.1 + 0.9 * 0.5)
    assert of(0, 10, 0, 0, 10).quantile(0.9) == Quantile(10.0, math.inf, 10.0)
    assert of(4, 0, 0, 0, 0).quantile(0.5) == Quantile(0.0, 0.01, 0.005)
    assert of(0, 4, 0, 0, 0).quantile(0) == Quantile(0.01, 0.1, 0.01)
    assert of(1, 1, 2, 0, 0, total=8.0).mean == 2.0
    assert of(0, 0, 0, 0, 0).mean is None
    assert of(1, 1, 2, 0, 0).share_within(0.1) == (0.5, 0.5)
    assert of(1, 1, 2, 0, 0).share_within(0.5) == (0.5, 1.0)
    assert of(1, 1, 2, 0, 0).share_within(-1) == (0.0, 0.25)


def test_other_edges_are_another_histogram() -> None:
    other = Histogram((1.0, math.inf), (1.0, 1.0), 1.0)
    with pytest.raises(ValueError, match="different edges"):
        of(1, 0, 0, 0, 0) + other
    with pytest.raises(ValueError, match="different edges"):
        of(1, 0, 0, 0, 0) - other


@pytest.mark.parametrize(
    ("edges", "counts"), [((), ()), ((1.0,), (1.0,)), ((1.0, math.inf), (1.0,)), ((2.0, 1.0, math.inf), (1.0, 1.0, 1.0))]
)
def test_what_is_no_histogram(edges: tuple[float, ...], counts: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="histogram"):
        Histogram(edges, counts, 0.0)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_is_between_0_and_1(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        of(1, 0, 0, 0, 0).quantile(share)
