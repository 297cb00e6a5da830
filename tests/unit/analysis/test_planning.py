"""Forecasts of trials by turns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.analysis.planning import USERS_DEVIATION, PlannedTraffic, TurnsForecast, forecast_turns, least_request_count
from aerie.analysis.switchback.design import WindowSchedule
from aerie.analysis.switchback.plan import SwitchbackPlan


def forecast(
    rate: float, pods: int, effect: float, *, first_window: float = 15.0, runs: int = 60, goal: str = "NonInferior"
) -> TurnsForecast:
    # Requests of the benchmark take 6.3 s on average: 6.9 s is half of that, times the dispersion of 2.2.
    plan = SwitchbackPlan.from_dict({**SwitchbackPlan("seed", WindowSchedule(first_window, 30.0)).to_dict(), "goal": goal})
    return forecast_turns(plan, PlannedTraffic(rate, USERS_DEVIATION, 6.9, lambda _: pods), effect, runs=runs)


@pytest.mark.parametrize(
    ("rate", "pods", "first_window", "effect", "rollback", "promotion", "minutes"),
    [  # cells of docs/in-place/error-rates.md, scenario base
        (1.0, 4, 15.0, 0.0, 0.008, 0.977, 110),
        (1.0, 4, 15.0, -0.02, 0.915, 0.008, None),
        (1.0, 4, 15.0, 0.03, 0.0, 1.0, 14),
        (1.0, 1, 15.0, 0.0, 0.007, 0.602, None),
        (0.2, 4, 60.0, 0.0, 0.008, 0.551, None),
        (20.0, 4, 15.0, -0.03, 1.0, 0.0, 2),
    ],
)
def test_agrees_with_the_simulation_of_requests(
    rate: float, pods: int, first_window: float, effect: float, rollback: float, promotion: float, minutes: float | None
) -> None:
    result = forecast(rate, pods, effect, first_window=first_window, runs=100)
    assert result.rollback_chance == pytest.approx(rollback, abs=0.1)
    assert result.promotion_chance == pytest.approx(promotion, abs=0.1)
    if minutes is not None:
        assert result.median_seconds is not None
        assert minutes / 1.5 <= result.median_seconds / 60 <= 1.5 * minutes


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([0.0, 0.2, 1.0, 20.0]), st.sampled_from([1, 3, 40, 1000]), st.floats(-0.5, 0.5))
def test_chances_add_up_to_1_and_are_reproducible(rate: float, pods: int, effect: float) -> None:
    result = forecast(rate, pods, effect, runs=5)
    assert result.rollback_chance + result.promotion_chance + result.inconclusive_chance == pytest.approx(1)
    assert (result.median_seconds is None) == (result.inconclusive_chance == 1)
    assert result == forecast(rate, pods, effect, runs=5)


@pytest.mark.parametrize("effect", [-0.1, 0.08])
def test_more_traffic_or_pods_never_take_longer(effect: float) -> None:
    by_rate = [forecast(rate, 4, effect).median_seconds or 1e9 for rate in (0.05, 0.2, 1.0, 20.0)]
    by_pods = [forecast(0.2, pods, effect).median_seconds or 1e9 for pods in (1, 4, 40)]
    assert by_rate == sorted(by_rate, reverse=True)
    assert by_pods == sorted(by_pods, reverse=True)


def test_without_requests_nothing_is_decided() -> None:
    result = forecast(0.0, 40, -0.1)
    assert (result.inconclusive_chance, result.median_seconds, result.mean_canary_requests) == (1.0, None, 0.0)


def test_a_promotion_needs_enough_requests_to_exclude_failures() -> None:
    result = forecast(1.0, 4, 0.5)
    assert result.promotion_chance == 1
    assert result.mean_canary_requests >= least_request_count() > 300


def test_an_equal_drafter_is_not_superior() -> None:
    assert forecast(1.0, 4, 0.0, goal="Superior").promotion_chance <= 0.1
