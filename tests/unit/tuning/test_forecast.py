"""What a candidate would give: gains against planted costs, and the best schedule against trying all of them."""

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


def sure(per_token: float = 4e-5) -> Forecast:
    """A dense engine of which everything is known."""
    tokens = np.arange(6)[:, None]
    seconds = 7e-3 + 5e-4 * tokens + per_token * BATCHES * (tokens + 1)
    draws = np.tile(seconds, (10, 1, 1))
    return Forecast(LoadDistribution(BATCHES, np.full(8, 1 / 8)), draws, np.tile(LENGTHS, (10, 1)), np.full(8, 5e-4), np.ones(10))


def test_gains_are_ratios_of_seconds_per_token() -> None:
    one = Forecast(
        LoadDistribution(np.array([10.0]), np.array([1.0])),
        np.tile(np.array([[[8e-3], [10e-3], [12e-3]]]), (4, 1, 1)),
        np.tile(np.array([1.0, 1.8, 2.4]), (4, 1)),
        np.array([1e-3]),
        np.ones(4),
    )
    assert one.gain(Static(2), Static(1)) == pytest.approx(np.full(4, (10 / 1.8) / (12 / 2.4) - 1))
    assert one.gain(Off(), Static(1)) == pytest.approx(np.full(4, (10 / 1.8) / 8 - 1))


def little(tokens: int, current: int, batch: float, per_token: float = 4e-5) -> float:
    """The batch of one K with the requests that make this batch with another: B' = rate t(B'), and t is linear in it."""
    rate = batch * LENGTHS[current] / (7e-3 + 5e-4 * current + per_token * batch * (current + 1))
    fixed, slope = (7e-3 + 5e-4 * tokens) / LENGTHS[tokens], per_token * (tokens + 1) / LENGTHS[tokens]
    return float(rate * fixed / (1 - rate * slope))


@pytest.mark.parametrize(("setting", "current"), [(Static(1), K3), (Static(2), K3), (Static(4), K3), (K3, Static(4))])
def test_the_same_requests_make_another_batch(setting: Static, current: Static) -> None:
    drawn = sure()
    found = drawn.rate_matched_token_seconds(setting, current)[0]
    for batch, seconds in zip(BATCHES.tolist(), found.tolist(), strict=True):
        there = little(setting.tokens, current.tokens, batch)
        assert 1 / 1.5 < there / batch < 1.5, "else this says nothing"
        true = (7e-3 + 5e-4 * setting.tokens + 4e-5 * there * (setting.tokens + 1)) / LENGTHS[setting.tokens]
        assert seconds == pytest.approx(true, rel=0.01)


def test_what_is_faster_gains_the_more_the_busier_the_engine_is() -> None:
    drawn = sure()
    alike = drawn.token_seconds(K3) / drawn.token_seconds(Static(1)) - 1
    lived = drawn.token_seconds(K3) / drawn.rate_matched_token_seconds(Static(1), K3) - 1
    assert (np.sign(alike) == np.sign(lived)).all()
    assert (np.abs(lived) >= np.abs(alike) - 1e-9).all()
    assert lived[0, -1] > 1.3 * alike[0, -1] > 0


def test_a_batch_is_not_taken_to_become_another_one_without_bound() -> None:
    """At 128 requests in a step K = 5 makes hardly more tokens a second, however many wait."""
    drawn = sure(per_token=4e-4)
    seconds = drawn.rate_matched_token_seconds(Static(5), Static(1))
    assert np.isfinite(seconds).all()
    assert (seconds < 3.1 * drawn.token_seconds(Static(5))).all()


def test_where_as_many_run_as_may_the_batch_stays() -> None:
    drawn = sure(per_token=1e-4)
    alike, free = drawn.token_seconds(Static(1)), drawn.rate_matched_token_seconds(Static(1), K3)
    full = replace(drawn, max_num_seqs=130.0).rate_matched_token_seconds(Static(1), K3)
    assert full[:, -1] == pytest.approx(alike[:, -1])
    assert (free[:, -1] < 0.95 * alike[:, -1]).all()
    assert full[:, :-1] == pytest.approx(free[:, :-1])


def test_no_more_run_than_may() -> None:
    drawn = sure(per_token=1e-4)
    free, found = (
        replace(drawn, max_num_seqs=room).rate_matched_token_seconds(Static(5), Static(1))[0, -1] for room in (np.inf, 150.0)
    )
    assert found == pytest.approx((7e-3 + 5e-4 * 5 + 1e-4 * 150 * 6) / LENGTHS[5])
    assert free > 1.1 * found


@pytest.mark.parametrize("setting", [Off(), Static(3), Schedule((ScheduleTier(1, 8, 5), ScheduleTier(9, 64, 1)), 5), Adaptive(4)])
def test_a_setting_gains_nothing_over_itself(setting: SpeculationSetting) -> None:
    assert sure().gain(setting, setting) == pytest.approx(np.zeros(10))


def test_adaptive_verification_verifies_what_is_best_at_each_batch_and_drafts_it_all() -> None:
    found = sure().token_seconds(Adaptive(5))[0]
    verified = sure().step_seconds[0, :, -1] + 5e-4 * (5 - np.arange(6))
    assert found[-1] == pytest.approx((verified / LENGTHS).min())


def test_the_schedule_drafts_less_as_the_batch_grows_and_beats_every_fixed_k() -> None:
    drawn = sure()
    schedule = drawn.build_schedule(ENGINE, K3)
    assert schedule is not None
    tokens = [tier.tokens for tier in schedule.tiers]
    assert tokens == sorted(tokens, reverse=True)
    assert 2 <= len(tokens) <= 4
    best = max(float(drawn.gain(Static(k), K3).mean()) for k in range(1, 6))
    assert float(drawn.gain(schedule, K3).mean()) > best


@pytest.mark.parametrize("current", [Static(1), Static(4), Schedule((ScheduleTier(1, 12, 5), ScheduleTier(13, 1000, 2)), 5)])
def test_a_schedule_may_be_asked_to_lose_nowhere_against_what_runs(current: SpeculationSetting) -> None:
    drawn = sure()
    found = drawn.build_schedule(ENGINE, current, max_loss=0.0)
    assert found is not None
    assert drawn.worst_fifth_gain(found, current) >= -1e-9
    assert drawn.gain(found, current).mean() > 0
    if current == Static(4):
        free = drawn.build_schedule(ENGINE, current)
        assert free is not None
        assert drawn.worst_fifth_gain(free, current) < -0.001


def test_what_runs_stays_beyond_the_batches_that_were_seen() -> None:
    drawn = sure()
    high = math.ceil(BATCHES[-1])
    current = Schedule((ScheduleTier(1, 2 * high - 1, 4), ScheduleTier(2 * high, 4 * high, 1)), 4)
    found = drawn.build_guarded_schedule(Static(5), current, 1, high)
    assert str(found) == f"1-{high}:5,{high + 1}-{2 * high - 1}:4,{2 * high}-{2 * high}:1"
    inside = drawn.build_guarded_schedule(Static(4), current, int(BATCHES[0]), high)
    assert inside == Schedule((ScheduleTier(1, 2 * high - 1, 4), ScheduleTier(2 * high, 2 * high, 1)), 4)
    assert str(drawn.build_guarded_schedule(Static(5), Static(3), 4, math.inf)) == f"1-3:3,4-{high}:5", "on all that are larger"
    assert drawn.build_guarded_schedule(Static(5), Static(5), int(BATCHES[0]), high) is None, "nothing but what runs"
    many = Schedule(tuple(ScheduleTier(high + i, high + i, 5 - i) if i else ScheduleTier(1, high, 5) for i in range(6)), 5)
    assert drawn.build_guarded_schedule(Static(3), many, 1, high) is None, "too many tiers"


def test_what_may_come_is_beyond_what_was_seen_and_as_it_was_before() -> None:
    quiet, day = (LoadDistribution(np.array(batches), np.array([0.5, 0.5])) for batches in ([4.0, 8.0], [2.0, 100.0]))
    for seen, before, near, far in (
        (quiet, quiet, [2.0, 16.0], [16.0, 32.0]),
        (quiet, day, [2.0, 100.0], [100.0, 101.0]),
        (day, quiet, [1.0, 200.0], [200.0, 400.0]),
    ):
        assert [one.batches.tolist() for one in extrapolate_load(seen, before)] == [near, far]


def test_no_schedule_where_one_k_is_best_everywhere() -> None:
    assert sure(per_token=1e-7).build_schedule(ENGINE, K3) is None


def test_no_tier_reaches_beyond_the_captured_graphs() -> None:
    engine = EngineConfig(Version.parse("0.33.0"), EngineArguments(max_cudagraph_capture_size=256), is_moe=False)
    schedule = sure(per_token=1e-7).build_schedule(engine, K3)
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
    found = _optimal_tiers(cost, falling=falling)
    assert found is not None
    by_group: list[int] = []
    for last, tokens in found:
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
    found = telemetry([K3, Static(5)], lambda *_: 0.01, spread(4, 64, 50))
    seen = estimate_load(found.cells)
    assert seen.shares.sum() == pytest.approx(1)
    assert 4 <= seen.quantile(0.05) < seen.quantile(0.95) <= 65
    with pytest.raises(ValueError, match="no load"):
        estimate_load({})
