"""The rule on arrays, with which trials by turns are simulated, against the operator's own functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import benchmarks._inplace_vllm
import benchmarks.inplace
from aerie.analysis.switchback.plan import SwitchbackPlan, WindowCounts
from aerie.analysis.switchback.state import add_window, close_pair, start_trial
from aerie.analysis.switchback.verdict import evaluate_switchback
from benchmarks._cell_file import CellFile, Figures
from benchmarks._inplace_model import EARLIER_HOURS, TurnsTraffic, WindowTotals, canary_windows, simulate_windows, window_count
from benchmarks._inplace_rule import Outcomes, decide
from benchmarks._inplace_simulation import CELLS, MODULES, Cell, figures, summary, table_row
from benchmarks._inplace_simulation import EFFECTS as SIMULATED_EFFECTS
from benchmarks._parts import choose_parts

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


def test_cells_are_kept_for_the_next_run(tmp_path: Path) -> None:
    file, cell, by_effect = tmp_path / "cells.json", CELLS[1], {0.0: {"runs": 2.0, "promote_min": float("nan")}}
    CellFile(file, Cell, MODULES, 2, 1).add(cell, by_effect)
    read = CellFile(file, Cell, MODULES, 2, 1)
    assert repr(read.results) == repr({cell: by_effect})  # nan is not equal to itself
    read.add(CELLS[0], by_effect)
    assert list(CellFile(file, Cell, MODULES, 2, 1).results) == [cell, CELLS[0]]
    with pytest.raises(SystemExit, match=r"cells\.json has cells with runs 2, not 3: name a new file"):
        CellFile(file, Cell, MODULES, 3, 1)
    in_memory = CellFile(None, Cell, MODULES, 2, 1)
    in_memory.add(cell, by_effect)
    assert in_memory.results == {cell: by_effect}


def test_a_run_continues_after_the_cells_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, *others = (Cell("base", rate, 4) for rate in (1.0, 20.0, 0.2))
    right = figures(Outcomes(np.zeros(2, bool), np.ones(2, bool), np.array([7.0, 9.0])))
    started: list[Cell] = []

    def run_cells(_: object, cells: tuple[Cell, ...], runs: int, seed: int) -> Iterator[tuple[Cell, Figures]]:
        assert (runs, seed) == (2, benchmarks.inplace.SEED)
        for cell in cells:
            started.append(cell)
            if len(started) == 2:
                raise KeyboardInterrupt
            yield cell, dict.fromkeys(SIMULATED_EFFECTS, right)

    monkeypatch.setattr(benchmarks.inplace, "CELLS", (base, *others))
    monkeypatch.setattr(benchmarks.inplace, "run_cells", run_cells)
    with pytest.raises(KeyboardInterrupt):
        benchmarks.inplace.simulate(2, tmp_path / "cells.json")
    assert benchmarks.inplace.simulate(2, tmp_path / "cells.json")["sim_runs"] == 2
    assert started == [base, others[0], *others]


@pytest.mark.parametrize(
    ("text", "parts"), [("", ["vllm", "vllm-0.33", "rollouts", "aa", "fleet", "sim"]), ("sim, vllm", ["vllm", "sim"])]
)
def test_parts_are_chosen_by_name(text: str, parts: list[str]) -> None:
    assert choose_parts(benchmarks.inplace.PARTS, text) == parts


@pytest.mark.parametrize(("parts", "name"), [("", "inplace"), ("sim,vllm", "inplace-vllm-sim")])
def test_results_of_some_parts_have_a_file_of_their_own(parts: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTS", parts)
    assert benchmarks.inplace.result_name() == name


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(
        SystemExit, match=r"PARTS names 'gpu': use some of vllm, vllm-0\.33, rollouts, aa, fleet, sim, separated by commas"
    ):
        choose_parts(benchmarks.inplace.PARTS, "vllm,gpu")


def test_keys_of_an_engine_have_its_family_and_the_parts_that_did_not_run_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.inplace, "ensure_family", lambda family, _: Path(family))
    monkeypatch.setattr(benchmarks.inplace, "measure_engine", lambda vllm, swaps: {"failed": 0, f"swaps_of_{vllm}": swaps})
    monkeypatch.setenv("PARTS", "vllm-0.33,vllm")
    monkeypatch.setenv("SWAPS", "7")
    assert benchmarks.inplace.measure() == {
        "vllm_failed": 0,
        "vllm_swaps_of_vllm": 7,
        "vllm_0_33_failed": 0,
        "vllm_0_33_swaps_of_vllm-0.33": 7,
    }


def test_evicting_prompts_share_no_beginning() -> None:
    short, prefix = (benchmarks._inplace_vllm.prompts_by_kind()[kind] for kind in ("short", "prefix"))
    assert len({messages[0]["content"][:900] for messages in prefix}) == 1
    assert max(len(messages[0]["content"]) for messages in short) < 300
    evicting = [messages[0]["content"] for messages in benchmarks._inplace_vllm.evicting_prompts()]
    assert len({text.split(" ")[0] for text in evicting}) == len(evicting)
    assert min(map(len, evicting)) > 900
