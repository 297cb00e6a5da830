"""Exact bounds of small shares: right at every moment, and no certainty from few requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.statistics.shares import ShareCounts, share_lower_bound, share_upper_bound


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.002, 0.0075, 0.02, 0.2])
def test_bounds_are_rarely_wrong_at_every_peek(share: float) -> None:
    """Requests arrive in groups of 5, up to 5,000: the true share is excluded in fewer than 5 % of the runs, on either side."""
    random = np.random.default_rng(3)
    wrong = 0
    for events in np.cumsum(random.binomial(5, share, (300, 1000)), axis=1):
        counts_at_peeks = [(int(events[index]), 5 * (index + 1)) for index in range(0, 1000, 10)]
        wrong += any(
            share_upper_bound(x, n, 0.005, 0.025) < share or share_lower_bound(x, n, 0.005, 0.025) > share
            for x, n in counts_at_peeks
        )
    assert wrong < 0.05 * 300


def test_upper_bound_needs_a_thousand_requests_without_an_event() -> None:
    assert share_upper_bound(0, 1000, 0.005, 0.025) < 0.005 < share_upper_bound(0, 900, 0.005, 0.025)


@given(st.integers(0, 50), st.integers(1, 5000), st.sampled_from([0.005, 0.05, 0.5]))
def test_bounds_hold_the_share_between_them(events: int, of: int, limit: float) -> None:
    share = min(events, of) / of
    assert 0 <= share_lower_bound(events, of, limit, 0.05) <= share + 1e-9
    assert share - 1e-9 <= share_upper_bound(events, of, limit, 0.05) <= 1
    assert share_upper_bound(events, 2 * of, limit, 0.05) <= share_upper_bound(events, of, limit, 0.05) + 1e-9


def test_the_uncertainty_of_the_control_counts() -> None:
    """Both fail 1 %: to show a share below twice the control's takes many requests, as the control's may be lower."""
    equal = ShareCounts(1, 100, 1, 100)
    assert not equal.scale_by(10).is_below(2.0, 0.005, 0.05)
    assert equal.scale_by(100).is_below(2.0, 0.005, 0.05)
    assert not ShareCounts(3, 100, 1, 100).scale_by(100).is_below(2.0, 0.005, 0.05)


def test_inflation_widens_the_bound() -> None:
    none = ShareCounts(0, 1500, 0, 1500)
    assert none.is_below(2.0, 0.005, 0.05)
    assert not none.is_below(2.0, 0.005, 0.05, inflation=3.0)


def test_no_requests_are_not_below_the_control() -> None:
    assert not ShareCounts().is_below(2.0, 0.005, 0.05)
    assert not ShareCounts(0, 0, 0, 1000).is_below(2.0, 0.005, 0.05)
    assert not ShareCounts(-2, 10, 0, 10).is_below(2.0, 0.005, 0.05), "counters that are not of one instant"
