"""The test by the order of windows: its martingale, its level under hostile scores, and what it detects."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.switchback.sign_flip import SignFlipTest

TIMES = (10.0, 320.0, 900.0, 6000.0)
SIZES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=7)


def add_scores(scores: list[float], seconds: float = 10.0) -> SignFlipTest:
    test = SignFlipTest()
    for score in scores:
        test = test.add_unit(score, seconds, TIMES)
    return test


@given(SIZES)
def test_the_mean_over_all_orders_is_1(sizes: list[float]) -> None:
    """Whatever the sizes of the scores, over all signs: an exact martingale."""
    values = [
        math.exp(add_scores([sign * size for sign, size in zip(signs, sizes, strict=True)]).log_e_value)
        for signs in itertools.product((-1, 1), repeat=len(sizes))
    ]
    assert math.fsum(values) / len(values) == pytest.approx(1.0, rel=1e-9)


@given(SIZES, st.floats(1e-3, 1e3))
def test_the_unit_of_the_scores_makes_no_difference(sizes: list[float], factor: float) -> None:
    scaled = add_scores([factor * size for size in sizes]).log_e_value
    assert scaled == pytest.approx(add_scores(sizes).log_e_value, rel=1e-6, abs=1e-9)


@given(SIZES)
def test_units_cannot_show_more_than_their_orders(sizes: list[float]) -> None:
    assert add_scores(sizes).log_e_value <= len(sizes) * math.log(2) + 1e-9


def test_a_score_of_0_changes_nothing() -> None:
    assert add_scores([1.0, 0.0, 0.0]) == add_scores([1.0])
    assert SignFlipTest().log_e_value == 0.0


def test_a_large_effect_shows_after_10_units() -> None:
    assert add_scores([1.0] * 10).is_significant(0.0125)
    assert not add_scores([1.0] * 6).is_significant(0.0125)
    assert not add_scores([-1.0] * 50).is_significant(0.9)


@pytest.mark.parametrize("kind", ["normal", "cauchy", "growing", "correlated sizes"])
def test_equal_drafters_reach_a_level_no_more_often_than_it(kind: str) -> None:
    """2,000 trials of 120 units at alpha 0.05: also for scores without a variance, or with a drifting one."""
    random = np.random.default_rng(3)
    runs, units = 2000, 120
    sizes = np.abs(random.standard_normal((runs, units)))
    if kind == "cauchy":
        sizes = np.abs(random.standard_cauchy((runs, units)))
    elif kind == "growing":
        sizes *= np.linspace(1, 10, units)
    elif kind == "correlated sizes":
        sizes = np.exp(np.cumsum(random.normal(0, 0.3, (runs, units)), axis=1))
    signs = random.choice((-1.0, 1.0), (runs, units))
    crossed = sum(_ever_crosses(row) for row in (signs * sizes).tolist())
    assert crossed <= 0.05 * runs


@pytest.mark.parametrize("kind", ["normal", "cauchy"])
def test_the_look_at_the_deadline_keeps_its_level(kind: str) -> None:
    random = np.random.default_rng(4)
    runs, units = 20_000, 40
    scores = random.standard_normal((runs, units)) if kind == "normal" else random.standard_cauchy((runs, units))
    tests = (
        SignFlipTest(units, float(score_sum), float(squares))
        for score_sum, squares in zip(scores.sum(axis=1), (scores**2).sum(axis=1), strict=True)
    )
    assert sum(test.is_significant_at_deadline(0.01) for test in tests) <= 0.0115 * runs


def test_few_units_are_not_significant_at_the_deadline() -> None:
    assert not add_scores([1.0] * 9).is_significant_at_deadline(0.01)
    assert add_scores([1.0] * 10).is_significant_at_deadline(0.01)


def _ever_crosses(scores: list[float]) -> bool:
    test = SignFlipTest()
    for score in scores:
        test = test.add_unit(score, 10.0, TIMES)
        if test.is_significant(0.05):
            return True
    return False
