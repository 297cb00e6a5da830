"""The rule on arrays, with which trials by turns are simulated, against the operator's own functions."""

from __future__ import annotations

import numpy as np
import pytest

import benchmarks.inplace
from aerie.analysis.switchback.plan import SwitchbackPlan, WindowCounts
from aerie.analysis.switchback.state import add_window, close_pair, start_trial
from aerie.analysis.switchback.verdict import evaluate_switchback
from benchmarks._inplace_model import EARLIER_HOURS, TurnsTraffic, WindowTotals, canary_windows, simulate_windows, window_count
from benchmarks._inplace_rule import Outcomes, decide
from benchmarks._inplace_simulation import CELLS, Cell, figures, summary, table_row
from benchmarks._inplace_simulation import EFFECTS as SIMULATED_EFFECTS

EFFECTS = (-0.1, 0.0, 0.1)
RUNS, MINUTES = 6, 40.0
TRAFFIC = TurnsTraffic(rate=4.0, lost=0.03, resets_per_hour=0.3, carryover=30.0)


def operator_outcome(totals: WindowTotals, effect: int, run: int, pods: int, plan: SwitchbackPlan) -> tuple[str, float]:
    """Return the outcome of a run and its minutes, by the operator's functions."""
    state = start_trial(pods * EARLIER_HOURS, int(totals.earlier_restarts[run]))
    for pair in range(totals.tokens.shape[-1] // 2):
        for pod in range(pods):
            for window in (2 * pair, 2 * pair + 1):
                tokens, steps = totals.tokens[run, pod, window], totals.steps[effect, run, pod, window]
                finished = totals.finished[run, pod, window]
                counts = WindowCounts(tokens, steps, steps / 50, 1.0, 0.1, finished)
                valid = totals.valid[run, pod, window]
                state = add_window(state, pod, window, counts if valid else None, int(totals.restarts[run, pod, window]))
        state = close_pair(state, plan, pair, range(pods))
        end = plan.schedule.window(2 * pair + 1).end_seconds
        is_last = plan.schedule.window(2 * pair + 3).end_seconds > plan.max_duration_seconds
        state, verdict = evaluate_switchback(state, plan, plan.max_duration_seconds if is_last else end)
        if verdict.outcome != "Continue":
            return verdict.outcome, end / 60
    return "Continue", float("nan")


@pytest.mark.parametrize("pods", [1, 3])
def test_array_rule_is_the_operators(pods: int) -> None:
    plan = SwitchbackPlan("", TRAFFIC.schedule, max_duration_seconds=60 * MINUTES)
    windows = window_count(TRAFFIC.schedule, 60 * MINUTES)
    canary = canary_windows(pods, windows, 0, RUNS)
    totals = simulate_windows(TRAFFIC, EFFECTS, pods, windows, range(RUNS), seed=3)
    decided = 0
    for effect in range(len(EFFECTS)):
        outcomes = decide(totals, effect, canary, plan)
        for run in range(RUNS):
            run_plan = SwitchbackPlan(str(run), plan.schedule, max_duration_seconds=plan.max_duration_seconds)
            outcome, minutes = operator_outcome(totals, effect, run, pods, run_plan)
            assert bool(outcomes.rolled_back[run]) == (outcome == "Rollback")
            assert bool(outcomes.promoted[run]) == (outcome == "Promote")
            if outcome in ("Rollback", "Promote"):
                decided += 1
                assert outcomes.minutes[run] == pytest.approx(minutes)
    assert decided >= RUNS


def test_results_have_every_key_and_the_worst_cell_counts() -> None:
    """Two runs of the cells that keys name, and one cell that violates the assumption, which does not count."""
    outcomes = Outcomes(np.array([True, False]), np.array([False, True]), np.array([3.0, 5.0]))
    wrong, right = figures(outcomes), figures(Outcomes(np.zeros(2, bool), np.ones(2, bool), np.array([7.0, 9.0])))
    results = {cell: dict.fromkeys(SIMULATED_EFFECTS, right) for cell in CELLS if cell.scenario == "base"}
    results[Cell("lost", 0.2, 1)] = {**dict.fromkeys(SIMULATED_EFFECTS, right), 0.0: wrong, -0.02: wrong}
    results[Cell("beyond", 0.2, 1)] = dict.fromkeys(SIMULATED_EFFECTS, right)
    keys = summary(results)
    assert set(keys) <= set(benchmarks.inplace.__doc__.split())
    assert keys["sim_runs"] == 2
    assert keys["sim_equal_rollback_worst_pct"] == 50.0
    assert keys["sim_m2_promote_worst_pct"] == 100.0
    assert keys["sim_p3_median_20rps_min"] == 8.0
    assert table_row(Cell("lost", 0.2, 1), results[Cell("lost", 0.2, 1)]).endswith("| 50.0 / 50.0, 5 min | 0.0 / 100.0, 8 min |")


def test_a_better_drafter_needs_fewer_steps_for_the_same_tokens() -> None:
    windows = window_count(TRAFFIC.schedule, 1200.0)
    traffic = TurnsTraffic(rate=4.0)
    totals = simulate_windows(traffic, (0.0, 0.25), 2, windows, range(2), seed=1)
    ratio = totals.steps[0] / totals.steps[1]
    assert ratio == pytest.approx(np.where(canary_windows(2, windows, 0, 2), 1.25, 1.0))
