"""Acceptance: survival, drift, and the analytical values that a simulation has to converge to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie_lab.engine.acceptance import (
    CLASS_ACCEPTANCE,
    Acceptance,
    Drift,
    conditionals_from_lengths,
    conditionals_from_rates,
    expected_length,
    expected_survival,
)

conditionals = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5).map(tuple)


@given(q=conditionals, k=st.integers(1, 9), shift=st.floats(-3, 3))
def test_survival_never_rises_and_stays_a_probability(q: tuple[float, ...], k: int, shift: float) -> None:
    survival = Acceptance(q).survival(k, shift)
    assert len(survival) == k
    assert np.all((survival >= 0) & (survival <= 1))
    assert np.all(np.diff(survival) <= 0)


def test_expected_length_without_spread_is_the_sum_of_products() -> None:
    assert expected_length(Acceptance((0.8, 0.5)), 3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert expected_length(Acceptance((0.8, 0.5)), 1) == pytest.approx(1.8)


def test_with_spread_slow_requests_weigh_more() -> None:
    sharp, wide = Acceptance((0.7,)), Acceptance((0.7,), spread=1.0)
    mean_over_requests = 1 + np.mean([wide.survival(3, z).sum() for z in np.random.default_rng(1).normal(size=20_000)])
    assert expected_length(wide, 3) < mean_over_requests
    assert expected_length(Acceptance((0.7,), spread=1e-9), 3) == pytest.approx(expected_length(sharp, 3))
    assert np.all(np.diff(expected_survival(wide, 5)) < 0)


def test_lengths_and_rates_are_inverted() -> None:
    q = conditionals_from_rates((0.73, 0.521, 0.355))
    assert Acceptance(q).survival(3) == pytest.approx([0.73, 0.521, 0.355])
    assert expected_length(
        Acceptance(conditionals_from_lengths({0: 1, 1: 1.813, 2: 2.444, 3: 2.929, 5: 3.6})), 5
    ) == pytest.approx(3.6)


def test_a_shift_changes_every_conditional_rate() -> None:
    worse = CLASS_ACCEPTANCE["chat"].shift_logits(-1.0)
    assert all(a < b for a, b in zip(worse.conditionals, CLASS_ACCEPTANCE["chat"].conditionals, strict=True))
    assert worse.shift_logits(1.0).conditionals == pytest.approx(CLASS_ACCEPTANCE["chat"].conditionals)


def test_drift_adds_context_age_and_hour() -> None:
    drift = Drift(per_1k_context=-0.1, per_hour_of_age=0.02, day_amplitude=0.5)
    assert drift.logit_shift(context=2000, age=7200, time=21600) == pytest.approx(-0.2 + 0.04 + 0.5)
    assert drift
    assert not Drift()


def test_invalid_acceptances_are_rejected() -> None:
    with pytest.raises(ValueError, match="conditionals are"):
        Acceptance((1.2,))
    with pytest.raises(ValueError, match="spread is -1"):
        Acceptance((0.5,), spread=-1)
