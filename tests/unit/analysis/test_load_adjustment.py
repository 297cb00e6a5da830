"""How a metric goes with a pod's output: what is fitted, when nothing is made of it, and that equal arms look equal by it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.statistics.load_adjustment import MAX_ELASTICITY, MIN_CURVE_BLOCKS, LoadCurve, LoadCurveFit

PODS = "abcd"


def told(blocks: int, slope: float, bend: float = 0.0, spread: float = 0.1, noise: float = 0.0, seed: int = 1) -> LoadCurveFit:
    """What so many blocks of four pods tell, around 100 tokens a second, of a metric that follows a curve."""
    random, found = np.random.default_rng(seed), LoadCurveFit()
    for _ in range(blocks):
        logs = random.normal(0, spread, len(PODS))
        values = 0.02 * np.exp(slope * logs + bend * logs**2 + random.normal(0, noise, len(PODS)))
        outputs = 100 * np.exp(logs)
        found = found.add_block(dict(zip(PODS, values.tolist(), strict=True)), dict(zip(PODS, outputs.tolist(), strict=True)))
    return found


def curve(found: LoadCurveFit) -> LoadCurve:
    assert found.curve is not None
    return found.curve


def test_it_is_the_slope_of_logarithms_and_its_change_with_the_output() -> None:
    straight, bent = curve(told(100, 0.5, noise=0.01)), curve(told(100, 0.5, 0.4, noise=0.01))
    assert straight.elasticity(90.0, 110.0) == pytest.approx(0.5, abs=0.03)
    assert bent.elasticity(80.0, 85.0) < bent.elasticity(120.0, 130.0)
    assert bent.elasticity(100.0, 130.0) == pytest.approx(0.5 + 0.4 * math.log(1.3), abs=0.05)


def test_nothing_is_known_of_a_few_blocks_nor_of_one_pod() -> None:
    assert told(MIN_CURVE_BLOCKS, 0.5).curve is None
    assert told(MIN_CURVE_BLOCKS + 3, 0.5).curve is not None
    alone = LoadCurveFit().add_block({"a": 0.02}, {"a": 100.0})
    assert alone == LoadCurveFit() == LoadCurveFit().add_block({"a": 0.02, "b": 0.03}, {"a": 100.0})


def test_pods_of_one_output_tell_nothing_and_of_two_no_bend() -> None:
    same, two = LoadCurveFit(), LoadCurveFit()
    for index in range(50):
        same = same.add_block({"a": 0.02, "b": 0.03}, {"a": 100.0, "b": 100.0})
        two = two.add_block({"a": 0.02, "b": 0.022 if index % 2 else 0.0221}, {"a": 100.0, "b": 120.0})
    assert same.curve is None
    assert curve(two).curvature == 0


@given(st.floats(-4.0, 6.0), st.floats(-3.0, 3.0), st.floats(10.0, 1000.0), st.floats(10.0, 1000.0))
def test_what_is_made_up_for_has_bounds_and_goes_one_way(slope: float, bend: float, output: float, other: float) -> None:
    found = LoadCurve(slope, bend, 100.0)
    assert 0 <= found.elasticity(output, other) <= MAX_ELASTICITY
    there = found.adjust(1.0, output, other)
    assert (there - 1) * (other - output) >= 0, "more output never makes for less"
    assert found.adjust(there, other, output) == pytest.approx(1.0)


def test_an_arm_without_output_is_left_as_it_is() -> None:
    assert LoadCurve(1.0, 0.0, 100.0).adjust(2.0, 0.0, 100.0) == 2.0
    assert LoadCurve(1.0, 0.0, 100.0).adjust(2.0, 100.0, 0.0) == 2.0


def test_where_slow_pods_get_fewer_requests_nothing_is_made_up_for() -> None:
    found = LoadCurveFit()
    for _ in range(50):
        found = found.add_block({"slow": 0.03, "usual": 0.02, "fast": 0.015}, {"slow": 70.0, "usual": 100.0, "fast": 140.0})
    assert curve(found).elasticity(70.0, 140.0) == 0


def test_what_is_long_ago_is_forgotten() -> None:
    found = told(300, 0.2)
    for _ in range(300):
        found = found.add_block({"a": 0.02, "b": 0.02 * 1.2**0.8}, {"a": 100.0, "b": 120.0})
    assert curve(found).elasticity(100.0, 120.0) == pytest.approx(0.8, abs=0.02)
