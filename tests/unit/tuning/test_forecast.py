"""Forecasts of candidates: gains against known costs, and the best schedule against an exhaustive search."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.engine.arguments import EngineArguments
from aerie.engine.releases import Version
from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, Static
from aerie.tuning.decision.candidates import EngineConfig
from aerie.tuning.decision.forecast import (
    MIN_TIER_GAIN,
    Forecast,
    LoadDistribution,
    _optimal_tiers,
    estimate_load,
    extrapolate_load,
)
from tests.unit.tuning.windows import K3, spread, telemetry

ENGINE = EngineConfig(Version.parse("0.33.0"), is_moe=False)
BATCHES = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
LENGTHS = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod([0.8, 0.75, 0.7, 0.7, 0.7]))])


def make_forecast(per_token: float = 4e-5) -> Forecast:
    """Make the forecast of a dense engine without uncertainty."""
    tokens = np.arange(6)[:, None]
    seconds = 7e-3 + 5e-4 * tokens + per_token * BATCHES * (tokens + 1)
    draws = np.tile(seconds, (10, 1, 1))
    return Forecast(LoadDistribution(BATCHES, np.full(8, 1 / 8)), draws, np.tile(LENGTHS, (10, 1)), np.full(8, 5e-4), np.ones(10))


def test_gains_are_ratios_of_seconds_per_token() -> None:
    forecast = Forecast(
        LoadDistribution(np.array([10.0]), np.array([1.0])),
        np.tile(np.array([[[8e-3], [10e-3], [12e-3]]]), (4, 1, 1)),
        np.tile(np.array([1.0, 1.8, 2.4]), (4, 1)),
        np.array([1e-3]),
        np.ones(4),
    )
    assert forecast.gain(Static(2), Static(1)) == pytest.approx(np.full(4, (10 / 1.8) / (12 / 2.4) - 1))
    assert forecast.gain(Off(), Static(1)) == pytest.approx(np.full(4, (10 / 1.8) / 8 - 1))


def rate_matched_batch(tokens: int, current: int, batch: float, per_token: float = 4e-5) -> float:
    """Return the batch at another K with the requests of `batch`: B' = rate t(B'), and t is linear in it."""
    rate = batch * LENGTHS[current] / (7e-3 + 5e-4 * current + per_token * batch * (current + 1))
    fixed, slope = (7e-3 + 5e-4 * tokens) / LENGTHS[tokens], per_token * (tokens + 1) / LENGTHS[tokens]
    return float(rate * fixed / (1 - rate * slope))


@pytest.mark.parametrize(("setting", "current"), [(Static(1), K3), (Static(2), K3), (Static(4), K3), (K3, Static(4))])
def test_equal_request_rates_give_another_batch(setting: Static, current: Static) -> None:
    forecast = make_forecast()
    token_seconds = forecast.rate_matched_token_seconds(setting, current)[0]
    for batch, seconds in zip(BATCHES.tolist(), token_seconds.tolist(), strict=True):
        matched_batch = rate_matched_batch(setting.tokens, current.tokens, batch)
        assert 1 / 1.5 < matched_batch / batch < 1.5, "else this says nothing"
        true = (7e-3 + 5e-4 * setting.tokens + 4e-5 * matched_batch * (setting.tokens + 1)) / LENGTHS[setting.tokens]
        assert seconds == pytest.approx(true, rel=0.01)


def test_the_gain_of_a_faster_setting_grows_with_the_load() -> None:
    forecast = make_forecast()
    same_batch = forecast.token_seconds(K3) / forecast.token_seconds(Static(1)) - 1
    same_rate = forecast.token_seconds(K3) / forecast.rate_matched_token_seconds(Static(1), K3) - 1
    assert (np.sign(same_batch) == np.sign(same_rate)).all()
    assert (np.abs(same_rate) >= np.abs(same_batch) - 1e-9).all()
    assert same_rate[0, -1] > 1.3 * same_batch[0, -1] > 0


def test_the_rate_matched_batch_is_bounded() -> None:
    """K = 5 at 128 requests in a step makes hardly more tokens a second, however many are queued."""
    forecast = make_forecast(per_token=4e-4)
    seconds = forecast.rate_matched_token_seconds(Static(5), Static(1))
    assert np.isfinite(seconds).all()
    assert (seconds < 3.1 * forecast.token_seconds(Static(5))).all()


def test_a_full_engine_keeps_its_batch() -> None:
    forecast = make_forecast(per_token=1e-4)
    same_batch, unlimited = forecast.token_seconds(Static(1)), forecast.rate_matched_token_seconds(Static(1), K3)
    limited = replace(forecast, max_num_seqs=130.0).rate_matched_token_seconds(Static(1), K3)
    assert limited[:, -1] == pytest.approx(same_batch[:, -1])
    assert (unlimited[:, -1] < 0.95 * same_batch[:, -1]).all()
    assert limited[:, :-1] == pytest.approx(unlimited[:, :-1])


def test_the_batch_is_limited_by_max_num_seqs() -> None:
    forecast = make_forecast(per_token=1e-4)
    unlimited, limited = (
        replace(forecast, max_num_seqs=room).rate_matched_token_seconds(Static(5), Static(1))[0, -1] for room in (np.inf, 150.0)
    )
    assert limited == pytest.approx((7e-3 + 5e-4 * 5 + 1e-4 * 150 * 6) / LENGTHS[5])
    assert unlimited > 1.1 * limited


@pytest.mark.parametrize("setting", [Off(), Static(3), Schedule((ScheduleTier(1, 8, 5), ScheduleTier(9, 64, 1)), 5), Adaptive(4)])
def test_a_setting_gains_nothing_over_itself(setting: SpeculationSetting) -> None:
    assert make_forecast().gain(setting, setting) == pytest.approx(np.zeros(10))


def test_adaptive_verification_verifies_the_best_k_of_each_batch() -> None:
    token_seconds = make_forecast().token_seconds(Adaptive(5))[0]
    verified = make_forecast().step_seconds[0, :, -1] + 5e-4 * (5 - np.arange(6))
    assert token_seconds[-1] == pytest.approx((verified / LENGTHS).min())


def test_the_best_schedule_drafts_less_at_larger_batches() -> None:
    forecast = make_forecast()
    schedule = forecast.build_schedule(ENGINE, K3)
    assert schedule is not None
    tokens = [tier.tokens for tier in schedule.tiers]
    assert tokens == sorted(tokens, reverse=True)
    assert 2 <= len(tokens) <= 4
    best = max(float(forecast.gain(Static(k), K3).mean()) for k in range(1, 6))
    assert float(forecast.gain(schedule, K3).mean()) > best


@pytest.mark.parametrize("current", [Static(1), Static(4), Schedule((ScheduleTier(1, 12, 5), ScheduleTier(13, 1000, 2)), 5)])
def test_max_loss_limits_a_schedule_at_every_load(current: SpeculationSetting) -> None:
    forecast = make_forecast()
    schedule = forecast.build_schedule(ENGINE, current, max_loss=0.0)
    assert schedule is not None
    assert forecast.worst_fifth_gain(schedule, current) >= -1e-9
    assert forecast.gain(schedule, current).mean() > 0
    if current == Static(4):
        unlimited = forecast.build_schedule(ENGINE, current)
        assert unlimited is not None
        assert forecast.worst_fifth_gain(unlimited, current) < -0.001


def test_a_guarded_schedule_keeps_the_setting_beyond_known_batches() -> None:
    forecast = make_forecast()
    high = math.ceil(BATCHES[-1])
    current = Schedule((ScheduleTier(1, 2 * high - 1, 4), ScheduleTier(2 * high, 4 * high, 1)), 4)
    schedule = forecast.build_guarded_schedule(Static(5), current, 1, high)
    assert str(schedule) == f"1-{high}:5,{high + 1}-{2 * high - 1}:4,{2 * high}-{2 * high}:1"
    inside = forecast.build_guarded_schedule(Static(4), current, int(BATCHES[0]), high)
    assert inside == Schedule((ScheduleTier(1, 2 * high - 1, 4), ScheduleTier(2 * high, 2 * high, 1)), 4)
    assert str(forecast.build_guarded_schedule(Static(5), Static(3), 4, math.inf)) == f"1-3:3,4-{high}:5", (
        "on all that are larger"
    )
    assert forecast.build_guarded_schedule(Static(5), Static(5), int(BATCHES[0]), high) is None, "nothing but what runs"
    many = Schedule(tuple(ScheduleTier(high + i, high + i, 5 - i) if i else ScheduleTier(1, high, 5) for i in range(6)), 5)
    assert forecast.build_guarded_schedule(Static(3), many, 1, high) is None, "too many tiers"


def test_extrapolated_loads_include_the_earlier_loads() -> None:
    quiet, day = (LoadDistribution(np.array(batches), np.array([0.5, 0.5])) for batches in ([4.0, 8.0], [2.0, 100.0]))
    for recent, earlier, near, far in (
        (quiet, quiet, [2.0, 16.0], [16.0, 32.0]),
        (quiet, day, [2.0, 100.0], [100.0, 101.0]),
        (day, quiet, [1.0, 200.0], [200.0, 400.0]),
    ):
        assert [load.batches.tolist() for load in extrapolate_load(recent, earlier)] == [near, far]


def test_no_schedule_where_one_k_is_best_everywhere() -> None:
    assert make_forecast(per_token=1e-7).build_schedule(ENGINE, K3) is None


def test_no_tier_reaches_beyond_the_captured_graphs() -> None:
    engine = EngineConfig(Version.parse("0.33.0"), EngineArguments(max_cudagraph_capture_size=256), is_moe=False)
    schedule = make_forecast(per_token=1e-7).build_schedule(engine, K3)
    assert schedule is not None
    for batch in BATCHES.tolist():
        assert batch * (schedule.tokens_at(round(batch)) + 1) <= 256


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.floats(1.0, 10.0), min_size=5, max_size=5), min_size=3, max_size=3),
    st.booleans(),
)
def test_tiers_are_the_cheapest_of_all(costs: list[list[float]], falling: bool) -> None:
    cost = np.array(costs)
    tiers = _optimal_tiers(cost, falling=falling)
    assert tiers is not None
    by_group: list[int] = []
    for last, tokens in tiers:
        by_group += [tokens] * (last + 1 - len(by_group))
    assert len(by_group) == 5
    assert not falling or by_group == sorted(by_group, reverse=True)

    def total(plan: tuple[int, ...]) -> float:
        return float(sum(cost[tokens, group] for group, tokens in enumerate(plan)))

    plans = [
        plan
        for plan in itertools.product(range(3), repeat=5)
        if sum(a != b for a, b in itertools.pairwise(plan)) <= 3 and (not falling or list(plan) == sorted(plan, reverse=True))
    ]
    assert total(tuple(by_group)) <= min(map(total, plans)) * (1 + MIN_TIER_GAIN) ** 3 + 1e-9


def test_the_load_is_that_of_all_windows_where_nothing_changed() -> None:
    windows = telemetry([K3, Static(5)], lambda *_: 0.01, spread(4, 64, 50))
    load = estimate_load(windows.cells)
    assert load.shares.sum() == pytest.approx(1)
    assert 4 <= load.quantile(0.05) < load.quantile(0.95) <= 65
    with pytest.raises(ValueError, match="no load"):
        estimate_load({})
