"""Forecasts of analyses of canary pods, which call the operator's functions."""

from __future__ import annotations

import numpy as np
import pytest

from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.measurement.blocks import BlockRule
from aerie.forecast.assumptions import Requests
from aerie.forecast.live import LiveAnalysis, forecast_live
from aerie.forecast.outcomes import Outcomes

STEADY = Requests(1.0, step_time_deviation=0.02, pod_deviation=0.0)


def forecast(
    effects: list[float], requests: Requests = STEADY, *, stable_pods: int = 0, runs: int = 4, pods: int = 1
) -> list[Outcomes]:
    plan = AnalysisPlan(max_duration_seconds=7200.0, pod_counts=(pods, pods))
    return forecast_live(LiveAnalysis(plan, BlockRule(), stable_pods), requests, effects, runs, 1)


def test_worse_drafters_are_rolled_back_and_the_minimum_duration_is_kept() -> None:
    worse, better = forecast([-0.3, 0.3])
    assert worse.rolled_back.all()
    assert better.promoted.all()
    assert better.seconds.min() >= AnalysisPlan().min_duration_seconds
    assert (worse.user_requests == worse.seconds).all()


def test_blocks_wait_for_enough_requests() -> None:
    """20 requests and 2,000 drafts take ten blocks' time here."""
    (slow,) = forecast([-0.3], Requests(0.02, step_time_deviation=0.0), runs=2)
    assert (slow.seconds / np.maximum(slow.samples, 1)).min() > 900


@pytest.mark.parametrize("pods", [1, 3])
def test_without_requests_nothing_is_decided(pods: int) -> None:
    (outcomes,) = forecast([0.3], Requests(0.0), runs=2, pods=pods)
    assert not (outcomes.promoted | outcomes.rolled_back).any()
    assert (outcomes.seconds == 7200).all()
    assert (outcomes.samples == 0).all()


def test_effects_meet_the_same_requests_and_forecasts_are_reproducible() -> None:
    first, second = forecast([0.1, 0.1])
    (repeated,) = forecast([0.1])
    assert first.seconds.tolist() == second.seconds.tolist() == repeated.seconds.tolist()


@pytest.mark.slow
def test_a_history_of_stable_pods_shortens_an_analysis() -> None:
    without, with_history = (forecast([0.03], stable_pods=pods, runs=12)[0] for pods in (0, 3))
    assert with_history.promoted.mean() > without.promoted.mean() or np.median(with_history.seconds) < np.median(without.seconds)


@pytest.mark.slow
def test_agrees_with_the_documented_simulation_where_a_drafter_is_better() -> None:
    """docs/measurements/verdict-checks.md: +9 %, steps as long, with a history: all promoted, 30 minutes in the median."""
    deviation = float(np.sqrt(0.043**2 * 120 / 2.2))  # 4.3 % in blocks of 120 requests
    requests = Requests(1.0, tokens=400.0, deviation=deviation, step_time_deviation=0.03, pod_deviation=0.0)
    (outcomes,) = forecast([0.09], requests, stable_pods=3, runs=20)
    assert outcomes.promoted.all()
    assert 20 <= np.median(outcomes.seconds) / 60 <= 45
