"""The benchmark's fleet simulation: its windows, rolls, oracle, trials and results."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from aerie.engine.speculation import Off, Schedule, ScheduleTier, Static
from aerie_lab.engine.step import STEP_TIME_FORMULAS
from benchmarks import _tuning_fleet as fleets
from benchmarks import _tuning_fleet_figures as fleet_figures
from benchmarks import _tuning_fleet_model as model
from benchmarks import _tuning_fleet_oracle as oracles
from benchmarks import _tuning_fleet_report as report
from benchmarks import _tuning_fleet_trial as trial
from benchmarks._tuning_fleet_calibration import Point, agreement
from benchmarks._tuning_fleet_scenarios import HOUR, REPLICAS, TICK, TICKS, World, draw, world
from benchmarks._tuning_fleet_trial import run_trial
from benchmarks._tuning_fleet_tuner import run_tuned

TARGET = model.Target.of(STEP_TIME_FORMULAS["dense-32b"])
SURVIVALS = model.survival("math", np.zeros(1))


@pytest.fixture(scope="module")
def steady_world() -> World:
    """A world with forty requests a replica, without disturbances."""
    return world(np.random.default_rng(1), TARGET, batch=(40.0, 40.0))


def test_a_rate_keeps_the_requested_batch() -> None:
    rate = TARGET.rate(24.0, 3, float(model.lengths(SURVIVALS)[0, 3]))
    rows = model.steady(TARGET, Static(3), np.array([rate]), SURVIVALS)
    assert float(rows.steps[0] / rows.iterations[0]) == pytest.approx(24.0, rel=0.03)
    assert float(rows.tokens[0]) == pytest.approx(rate * (model.ANSWER - 1), rel=1e-3)  # what comes is served
    assert float(rows.full[0]) < 1e-6


def test_a_rate_beyond_capacity_fills_the_engine() -> None:
    rows = model.steady(TARGET, Static(3), np.array([1000.0]), SURVIVALS)
    assert float(rows.full[0]) > 0.5
    assert float(rows.running[0]) > 200
    assert float(rows.tokens[0]) < 1000 * (model.ANSWER - 1)


def test_a_window_has_the_counts_of_its_state() -> None:
    rates = np.array([8.0])
    schedule = Schedule((ScheduleTier(1, 12, 5), ScheduleTier(13, 256, 2)), 5)
    rows = model.steady(TARGET, schedule, rates, SURVIVALS)
    (window,) = model.counters(rows, 300.0, SURVIVALS, rates, schedule, (0.005, 0.02), np.array([0.05]))
    assert window.speculation is not None
    assert window.generation_tokens - window.first_tokens == pytest.approx(window.request_steps + window.speculation.accepted)
    assert window.step_seconds / window.request_steps == pytest.approx(float(rows.running[0] / rows.steps[0]))
    assert 2 < window.speculation.draft_tokens / window.speculation.drafts < 5
    assert list(window.speculation.accepted_per_position) == sorted(window.speculation.accepted_per_position, reverse=True)
    assert window.time_per_output_token.count == pytest.approx(8.0 * 300)
    off = model.counters(model.steady(TARGET, Off(), rates, SURVIVALS), 300.0, SURVIVALS, rates, Off(), (0.02,), np.array([0.05]))
    assert off[0].speculation is None


def test_answers_of_a_full_engine_have_the_same_length() -> None:
    rates = np.array([8.0, 1000.0])
    rows = model.steady(TARGET, Static(3), rates, np.repeat(SURVIVALS, 2, axis=0))
    some, full = model.counters(rows, 300.0, SURVIVALS, rates, Static(3), (0.02,), np.array([0.05, 0.05]))
    assert full.first_tokens < 0.5 * 1000 * 300
    for window in (some, full):
        assert window.generation_tokens / window.first_tokens == pytest.approx(model.ANSWER, rel=0.01)


def test_acceptance_is_that_of_the_simulator() -> None:
    rows = model.steady(TARGET, Static(3), np.array([8.0]), SURVIVALS)
    (window,) = model.counters(rows, 300.0, SURVIVALS, np.array([8.0]), Static(3), (0.02,), np.array([0.05]))
    assert window.speculation is not None
    counted = 1 + window.speculation.accepted / window.speculation.drafts
    assert counted == pytest.approx(float(model.lengths(SURVIVALS)[0, 3]), rel=1e-6)
    worse = model.survival("math", np.array([-0.5]))
    assert (worse[0, 3, :3] < SURVIVALS[0, 3, :3]).all()
    half = model.mix_classes(SURVIVALS, worse, np.array([0.5]))
    assert (worse[0, 3, :3] < half[0, 3, :3]).all()
    assert (half[0, 3, :3] < SURVIVALS[0, 3, :3]).all()


def test_disturbed_windows_have_the_same_mean() -> None:
    rates, many = np.full(4000, 4.0), np.repeat(SURVIVALS, 4000, axis=0)
    off = model.disturb(rates, many, TICK, np.random.default_rng(1))
    assert float(off.work.mean()) == pytest.approx(1.0, abs=0.005)
    assert off.survivals.mean(axis=0) == pytest.approx(SURVIVALS[0], abs=0.005)
    assert (np.diff(off.survivals[:, 5, :5], axis=1) <= 0).all()


@pytest.mark.slow
def test_windows_are_those_of_the_step_level_simulator() -> None:
    agreement_of_windows = agreement(Point("dense-32b", "math", Static(3), 4.0), seconds=1500.0)
    assert np.abs(agreement_of_windows.error).max() < 0.1


def test_a_roll_takes_one_replica_and_the_others_serve_its_load(steady_world: World) -> None:
    fleet = fleets.Fleet.of(Static(3), surge=False)
    done = fleet.roll(list(range(REPLICAS)), 10, Static(5))
    assert done == 10 + REPLICAS
    assert ((fleet.runs[:REPLICAS] == -1).sum(axis=0) <= 1).all()
    assert (fleet.runs[:REPLICAS, done:] == fleet.settings.index(Static(5))).all()
    assert fleet.rates(steady_world).sum(axis=0) == pytest.approx(steady_world.rates)
    rolled, untouched = (fleets.cost(steady_world, each) for each in (fleet, fleets.Fleet.of(Static(3))))
    assert rolled[0][10] > untouched[0][10]
    assert rolled[1][10] == pytest.approx(untouched[1][10], rel=0.02)


def test_spare_gpus_leave_the_load_of_the_replicas_unchanged(steady_world: World) -> None:
    fleet, untouched = (fleets.Fleet.of(Static(3)) for _ in range(2))
    for place in fleet.arms:
        fleet.reload(place, 10, Static(3))
    done = fleet.withdraw(20, Static(3))
    assert fleet.roll(list(range(REPLICAS)), done, Static(3)) == 20 + REPLICAS
    assert (fleet.runs[:REPLICAS] >= 0).all()
    assert ((fleet.runs[REPLICAS:] >= 0).sum(axis=0) == [2 if 10 < tick < 20 else 0 for tick in range(TICKS)]).all()
    assert fleet.rates(steady_world)[:REPLICAS] == pytest.approx(untouched.rates(steady_world)[:REPLICAS])
    with_spares, without = (fleets.cost(steady_world, simulated) for simulated in (fleet, untouched))
    seconds_per_token = [waited / tokens for waited, tokens, _ in (with_spares, without)]
    assert seconds_per_token[0] == pytest.approx(seconds_per_token[1], rel=0.05)
    own = steady_world.shares[:2, 15].sum() / steady_world.shares[:, 15].sum()
    assert with_spares[1][15] == pytest.approx(without[1][15] * (1 + own), rel=0.02)


@pytest.mark.slow
def test_the_oracle_is_no_worse_than_no_change(steady_world: World) -> None:
    untouched = fleets.Fleet.of(steady_world.start)
    best, gaps = oracles.oracle(steady_world, untouched)
    oracle_cost, unchanged_cost = fleets.cost(steady_world, best), fleets.cost(steady_world, untouched)
    assert oracle_cost[0].sum() / oracle_cost[1].sum() <= unchanged_cost[0].sum() / unchanged_cost[1].sum() + 1e-12
    assert (gaps >= 0).all()
    from_best = replace(steady_world, start=best.settings[-1])
    assert oracles.oracle(from_best, fleets.Fleet.of(from_best.start))[1][-1] < 0.02


def test_the_current_setting_has_no_true_gain(steady_world: World) -> None:
    true = oracles.true_forecast(steady_world, Static(3), 0, 12 * HOUR)
    assert float(true.gain(Static(3), Static(3))[0]) == 0
    assert float(true.gain(Off(), Static(3))[0]) < 0


def test_only_a_much_faster_canary_is_promoted(steady_world: World) -> None:
    random = np.random.default_rng(3)
    slow = replace(steady_world, start=Off())
    assert run_trial(slow, Static(3), Off(), HOUR, random).result == "Promote"
    assert run_trial(slow, Off(), Static(3), HOUR, random).result == "Rollback"
    explored = run_trial(slow, Static(3), Off(), HOUR, random, explore=1800.0)
    assert (explored.result, explored.minutes) == ("Explored", 30)


def test_an_exploration_becomes_a_trial_when_it_is_kept(steady_world: World) -> None:
    slow, ticks = replace(steady_world, start=Off()), list[int]()

    def keep(tick: int) -> bool:
        ticks.append(tick)
        return tick >= HOUR + 4

    verdict = run_trial(slow, Static(3), Off(), HOUR, np.random.default_rng(3), 1800.0, keep)
    assert ticks == [HOUR + 1, HOUR + 2, HOUR + 3, HOUR + 4]
    assert verdict.result == "Promote"


def test_shed_requests_have_no_prefill() -> None:
    """More requests are shed beyond saturation, and the output is unchanged."""
    rows = model.steady(TARGET, Static(3), np.array([20.0, 40.0, 80.0]) * 10, np.repeat(SURVIVALS, 3, axis=0))
    assert (rows.full > 0.5).all()
    assert rows.tokens[2] == pytest.approx(rows.tokens[1], rel=0.02)


def test_a_tier_without_drafts_counts_no_drafts(steady_world: World) -> None:
    blocks = np.full(3, HOUR)
    random = np.random.default_rng(1)
    never = Schedule((ScheduleTier(1, 256, 0), ScheduleTier(257, 300, 3)), 3)
    assert [side.counts.drafts for side in trial._counts(steady_world, never, 0, blocks, random)] == [0.0] * 3


def test_a_draw_is_reproducible() -> None:
    first, repeated, other = draw("misfit", 2), draw("misfit", 2), draw("misfit", 3)
    assert (first.rates == repeated.rates).all()
    assert first.rates[0] != other.rates[0]
    assert first.rates.shape == (TICKS,)


def test_six_hours_are_compared_with_their_initial_setting() -> None:
    world = draw("stationary", 0)
    slow, quick = Off(), Static(3)
    unchanged, faster, slower = fleets.Fleet.of(slow), fleets.Fleet.of(slow), fleets.Fleet.of(quick)
    faster.roll(list(range(REPLICAS)), 30 * HOUR, quick)
    slower.roll(list(range(REPLICAS)), 30 * HOUR, slow)
    worst = [fleet_figures.worst_replaced(world, fleet, fleets.cost(world, fleet)) for fleet in (unchanged, faster, slower)]
    assert worst[0] == 0
    assert 0 < worst[1] < 0.02, "only the roll costs, each replica for five minutes"
    # Six hours that begin just before the roll have all of it; those that begin after it are compared with the slow setting.
    ticks = slice(30 * HOUR + REPLICAS, 36 * HOUR)
    each = [
        model.steady(world.target, setting, world.rates[ticks] / REPLICAS, world.survivals[ticks]) for setting in (slow, quick)
    ]
    ratio = [rows.running.sum() / rows.tokens.sum() for rows in each]
    assert worst[2] == pytest.approx(ratio[0] / ratio[1] - 1, rel=0.1)


def make_figures(**changes: object) -> fleet_figures.Figures:
    defaults = fleet_figures.Figures(
        regret=0.01,
        gain=0.1,
        possible=0.11,
        worst=0.0,
        worst_possible=0.0,
        worst_replaced=0.0,
        worst_replaced_possible=0.0,
        violations=0,
        hours=2.0,
        canaries=1,
        rolls=1,
        changes=1,
        explored=0,
        promoted=1,
        wrong=0,
        inside=9,
        predictions=10,
        decisions=5,
        insufficient=1,
        trials=(),
    )
    return replace(defaults, **changes)  # type: ignore[arg-type]


def test_keys_and_table_summarize_all_runs() -> None:
    figures_by_scenario = {
        "stationary": [
            make_figures(),
            make_figures(regret=0.03, hours=math.inf, worst=0.02, worst_possible=0.02),
            make_figures(hours=None),
        ],
        "same": [make_figures(changes=0, inside=8, hours=None)] * 3,
    }
    keys = report.keys(figures_by_scenario, [10.0, math.nan, 14.0, math.inf])
    assert keys["fleet_mean_regret_pct"] == pytest.approx(100 * ((0.05 / 3) + 0.01) / 2)
    assert keys["aa_false_actions_per_30_replica_days"] == 0
    assert keys["coverage_90_pct"] == pytest.approx(100 * 51 / 60)
    assert keys["never_worse_pct"] == pytest.approx(100 * 5 / 6)
    assert keys["oracle_never_worse_pct"] == pytest.approx(100 * 5 / 6)
    assert keys["never_worse_than_replaced_pct"] == keys["oracle_never_worse_than_replaced_pct"] == 100
    assert keys["right_in_the_end_pct"] == 50
    assert keys["rollback_min"] == 14.0
    assert all(math.isfinite(value) for value in keys.values())
    rows = report.table(figures_by_scenario)
    assert len(rows) == 4
    assert all(row.count("|") == rows[0].count("|") for row in rows)


@pytest.mark.slow
def test_explorations_do_not_violate_the_objective() -> None:
    """K = 5 at every batch overloaded this engine, at batches without measured step times."""
    world = draw("misfit", 29)
    fleet = run_tuned(world, 30).fleet
    tuned_cost, unchanged_cost = fleets.cost(world, fleet), fleets.cost(world, fleets.Fleet.of(world.start))
    assert len(fleet.settings) > 1, "something was tried"
    assert not ((tuned_cost[2] > world.objective) & (unchanged_cost[2] <= world.objective)).any()
