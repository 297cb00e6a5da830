"""Load curves: how a metric depends on a pod's output, when no curve is fitted, and which bounds an adjustment has."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.statistics.load_adjustment import MAX_ELASTICITY, MIN_CURVE_BLOCKS, LoadCurve, LoadCurveFit

PODS = "abcd"


def fit_blocks(
    blocks: int, slope: float, bend: float = 0.0, spread: float = 0.1, noise: float = 0.0, seed: int = 1
) -> LoadCurveFit:
    """Fit blocks of four pods, around 100 tokens a second, to a metric that follows a curve."""
    random, fit = np.random.default_rng(seed), LoadCurveFit()
    for _ in range(blocks):
        logs = random.normal(0, spread, len(PODS))
        values = 0.02 * np.exp(slope * logs + bend * logs**2 + random.normal(0, noise, len(PODS)))
        outputs = 100 * np.exp(logs)
        fit = fit.add_block(dict(zip(PODS, values.tolist(), strict=True)), dict(zip(PODS, outputs.tolist(), strict=True)))
    return fit


def require_curve(fit: LoadCurveFit) -> LoadCurve:
    assert fit.curve is not None
    return fit.curve


def test_elasticity_is_the_slope_of_logarithms_and_its_change() -> None:
    straight, bent = require_curve(fit_blocks(100, 0.5, noise=0.01)), require_curve(fit_blocks(100, 0.5, 0.4, noise=0.01))
    assert straight.elasticity(90.0, 110.0) == pytest.approx(0.5, abs=0.03)
    assert bent.elasticity(80.0, 85.0) < bent.elasticity(120.0, 130.0)
    assert bent.elasticity(100.0, 130.0) == pytest.approx(0.5 + 0.4 * math.log(1.3), abs=0.05)


def test_a_few_blocks_or_one_pod_give_no_curve() -> None:
    assert fit_blocks(MIN_CURVE_BLOCKS, 0.5).curve is None
    assert fit_blocks(MIN_CURVE_BLOCKS + 3, 0.5).curve is not None
    alone = LoadCurveFit().add_block({"a": 0.02}, {"a": 100.0})
    assert alone == LoadCurveFit() == LoadCurveFit().add_block({"a": 0.02, "b": 0.03}, {"a": 100.0})


def test_equal_outputs_give_no_curve_and_two_outputs_no_curvature() -> None:
    same, two = LoadCurveFit(), LoadCurveFit()
    for index in range(50):
        same = same.add_block({"a": 0.02, "b": 0.03}, {"a": 100.0, "b": 100.0})
        two = two.add_block({"a": 0.02, "b": 0.022 if index % 2 else 0.0221}, {"a": 100.0, "b": 120.0})
    assert same.curve is None
    assert require_curve(two).curvature == 0


@given(st.floats(-4.0, 6.0), st.floats(-3.0, 3.0), st.floats(10.0, 1000.0), st.floats(10.0, 1000.0))
def test_an_adjustment_is_bounded_and_monotonic(slope: float, bend: float, output: float, other_output: float) -> None:
    curve = LoadCurve(slope, bend, 100.0)
    assert 0 <= curve.elasticity(output, other_output) <= MAX_ELASTICITY
    adjusted = curve.adjust(1.0, output, other_output)
    assert (adjusted - 1) * (other_output - output) >= 0, "more output never makes for less"
    assert curve.adjust(adjusted, other_output, output) == pytest.approx(1.0)


def test_an_arm_without_output_is_not_adjusted() -> None:
    assert LoadCurve(1.0, 0.0, 100.0).adjust(2.0, 0.0, 100.0) == 2.0
    assert LoadCurve(1.0, 0.0, 100.0).adjust(2.0, 100.0, 0.0) == 2.0


def test_slow_pods_with_fewer_requests_give_no_elasticity() -> None:
    fit = LoadCurveFit()
    for _ in range(50):
        fit = fit.add_block({"slow": 0.03, "usual": 0.02, "fast": 0.015}, {"slow": 70.0, "usual": 100.0, "fast": 140.0})
    assert require_curve(fit).elasticity(70.0, 140.0) == 0


def test_old_blocks_are_forgotten() -> None:
    fit = fit_blocks(300, 0.2)
    for _ in range(300):
        fit = fit.add_block({"a": 0.02, "b": 0.02 * 1.2**0.8}, {"a": 100.0, "b": 120.0})
    assert require_curve(fit).elasticity(100.0, 120.0) == pytest.approx(0.8, abs=0.02)
