"""Forecasts of shadow evaluations: near the medians of simulated evaluations, and monotone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.paired.plan import PairedPlan
from aerie.analysis.paired.power import GREEDY_NOISE, SAMPLED_NOISE, PairNoise, forecast_verdict, pairs_until_met

PLAN = PairedPlan()


@pytest.mark.parametrize(
    ("gain", "outcome", "pairs"), [(-0.03, "Rollback", 220), (0.0, "Promote", 490), (0.03, "Promote", 130), (0.09, "Promote", 90)]
)
def test_forecasts_are_near_the_medians_of_resampled_real_pairs(gain: float, outcome: str, pairs: int) -> None:
    """The medians are of 400 evaluations that draw from the 166 real pairs at temperature 0."""
    forecast = forecast_verdict(PLAN, gain, GREEDY_NOISE)
    assert forecast is not None
    assert forecast[0] == outcome
    assert forecast[1] == pytest.approx(pairs, rel=0.35)


def test_sampled_pairs_take_longer_and_an_equal_drafter_is_never_superior() -> None:
    sampled, greedy = (pairs_until_met(PLAN.enough_tokens, 0.0, noise) for noise in (SAMPLED_NOISE, GREEDY_NOISE))
    assert sampled is not None
    assert greedy is not None
    assert sampled > 1.5 * greedy
    assert forecast_verdict(replace(PLAN, goal="Superior"), 0.0, GREEDY_NOISE) is None


@given(st.floats(-0.015, 0.3), st.floats(0.001, 0.1))
def test_a_better_drafter_is_never_later(gain: float, more: float) -> None:
    noise = PairNoise(0.1)
    later, sooner = (pairs_until_met(PLAN.enough_tokens, value, noise) for value in (gain, gain + more))
    assert later is not None
    assert sooner is not None
    assert sooner <= later


def test_times_are_not_forecast() -> None:
    with pytest.raises(ValueError, match=r"test\.metric is TimePerOutputToken; forecasts are for TokensPerStep"):
        pairs_until_met(PLAN.slower, 0.0, GREEDY_NOISE)
