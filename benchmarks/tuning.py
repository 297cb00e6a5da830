"""Throughput lost by a choice of K against the best K at every batch: Aerie's rule and others', on published grids.

| key                          | what is measured                                                                            |
|------------------------------|---------------------------------------------------------------------------------------------|
| grids, seeds                 | grids, and runs on each                                                                     |
| grid_mean_regret_pct         | Aerie, from two hours of K = 3 and at most one canary: throughput lost against the best K   |
|                              | of the batch, mean over batches, grids and seeds                                            |
| grid_worst_batch_regret_pct  | the same at the worst batch of each grid, mean over grids and seeds                         |
| grid_no_canary_mean_regret_pct, grid_no_canary_worst_batch_regret_pct | the same without any canary                        |
| grid_canaries                | requested canaries, mean                                                                    |
| grid_day_regret_pct          | the first 24 hours: two of K = 3, the canary, one roll, then the choice                     |
| step_time_error_pct          | predicted step times against the grids' captured cells, median; mean over grids and seeds   |
| RULE_mean_regret_pct, RULE_worst_batch_regret_pct | other rules, given the acceptance; the profiled tables also the cells  |
| best_baseline_mean_regret_pct | the least of those                                                                         |
| BANDIT_day_regret_pct        | bandits over the K of the grid, 24 hours at each batch, 5 minutes of reload for each change |
| decision_ms, decision_mib    | a decision for 64 replicas with 24 h of 15 s windows: CPU time, median of 7, and the        |
|                              | memory of process, numpy and telemetry above what it had before; decision_cells: its cells  |

| fleet_mean_regret_pct        | fleet simulation (`_tuning_fleet*`): a user's speed lost against the reachable oracle, mean |
|                              | over runs, then over scenarios; fleet_mean_gain_pct: gained over no change, all runs        |
| fleet_p95_scenario_regret_pct, fleet_p95_run_regret_pct | 95 % point of the scenarios' means; of all runs                  |
| aa_false_actions_per_30_replica_days | canaries meant to change something where nothing is better;                         |
|                              | aa_canaries_per_30_replica_days: those that only explore                                    |
| coverage_90_pct              | predicted gains whose 90 % interval holds the true one, all settings and decisions          |
| never_worse_pct              | runs in which no six hours were more than 1 % slower than without the tuner;                |
|                              | oracle_never_worse_pct: in which the oracle's were not                                      |
| never_worse_than_replaced_pct | the same against what ran when the six hours began, kept for all of them: what the tuner   |
|                              | did in them, and not that what it once chose has become wrong; oracle_... as above          |
| median_hours_to_right        | where another setting gains 3 % or more: hours until no setting gains 2 % any more; 72: in  |
|                              | most runs never; right_in_the_end_pct: in how many                                          |
| median_canaries_to_right, median_rolls_to_right | until then                                                               |
| rollback_min, rollback_p95_min | a planted K that is 10 % slower or worse: minutes from the first block to the rollback,   |
|                              | 240 where it is not rolled back                                                             |
| wrong_promotions, caused_slo_windows | changes that were slower in their first six hours; windows beyond the objective     |
|                              | that without the tuner would have kept it                                                   |
| fleet_runs, fleet_window_error_pct | runs of each scenario; largest error of a window's mean against the step-level simulator |

GRIDS=file.json takes another file of the form of lab/aerie_lab/engine/performance_model/step_time_grids.json, and leaves
decision and fleet out.
RUNS=4 makes the fleet simulation small (0: none). Seeds are fixed. With SAVE=1 the tables in
docs/measurements/tuning.md are written.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import _tuning_fleet_report as fleet
from benchmarks._parts import replace_section
from benchmarks._tuning_replay import REPLICAS, Published, choose, grids
from benchmarks._tuning_rules import BANDITS, DAY_MINUTES, MEASURE_MINUTES, RELOAD_MINUTES, RULES, day

SEEDS = 5
_BANDIT_RUNS = 20
ROOT = Path(__file__).resolve().parent.parent

_rows: list[tuple[str, str]] = []
"""The rows of the last run's table: name and cells."""
_fleet: list[str] = []
"""The lines of the fleet simulation's tables."""


def measure(seeds: int = SEEDS) -> dict[str, float]:
    published = grids()
    _rows.clear()
    figures: dict[str, float] = {"grids": len(published), "seeds": seeds, **_ours(published, seeds)}
    for key, (name, rule) in RULES.items():
        regrets = [_regrets(grid, rule(grid)) for grid in published]
        figures |= _figures(f"{key}_", regrets)
        _row(name, regrets)
    figures["best_baseline_mean_regret_pct"] = min(figures[f"{key}_mean_regret_pct"] for key in RULES)
    for key, (name, bandit) in BANDITS.items():
        random = np.random.default_rng(1)
        lost = [
            statistics.fmean(
                day(grid, column, bandit, random) for _ in range(_BANDIT_RUNS) for column in range(len(grid.batches))
            )
            for grid in published
        ]
        figures[f"{key}_day_regret_pct"] = 100 * statistics.fmean(lost)
        _rows.append((name, f"{_each(lost)} | | | {100 * statistics.fmean(lost):.1f}"))
    if "GRIDS" not in os.environ:
        figures |= decision_cost()
        simulated, lines = fleet.measure()
        figures |= simulated
        _fleet[:] = lines
    print(table([grid.name for grid in published]), flush=True)
    return {key: round(value, 2) for key, value in figures.items()}


def _ours(published: Sequence[Published], seeds: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for canaries, prefix in ((1, "grid_"), (0, "grid_no_canary_")):
        regrets, days, errors, canary_requests = [], [], [], []
        for grid in published:
            own = []
            for seed in range(1, seeds + 1):
                chosen = choose(grid, seed, canaries=canaries)
                own.append(_regrets(grid, chosen.tokens))
                errors.append(chosen.error)
                canary_requests.append(chosen.canary is not None)
                days.append(_first_day(grid, chosen.tokens, chosen.canary is not None))
                if canaries:
                    print(f"{grid.name} seed {seed}: K {chosen.tokens}, canary {chosen.canary}: {chosen.decision.reason}")
            regrets += own
        figures |= _figures(prefix, regrets)
        by_grid = [regrets[i * seeds : (i + 1) * seeds] for i in range(len(published))]
        if canaries:
            figures["grid_canaries"] = statistics.fmean(canary_requests)
            figures["grid_day_regret_pct"] = 100 * statistics.fmean(days)
            figures["step_time_error_pct"] = 100 * statistics.fmean(errors)
        name = "**Aerie, at most one canary**" if canaries else "Aerie, no canary"
        means = [statistics.fmean(statistics.fmean(batches) for batches in runs) for runs in by_grid]
        cells = f"{_each(means)} | {_percent(figures[f'{prefix}mean_regret_pct'])} | "
        cells += f"{_percent(figures[f'{prefix}worst_batch_regret_pct'])} | {100 * statistics.fmean(days):.1f}"
        _rows.append((name, cells))
    return figures


def _regrets(grid: Published, tokens: Sequence[int]) -> list[float]:
    return [grid.regret(k, column) for column, k in enumerate(tokens)]


def _first_day(grid: Published, tokens: Sequence[int], canary: bool) -> float:
    """Return the regret of the first day: two hours as before; a canary costs its replica two reloads; a roll costs every one."""
    before = statistics.fmean(_regrets(grid, [grid.start] * len(grid.batches)))
    after = statistics.fmean(_regrets(grid, tokens))
    waited = 120.0 + (MEASURE_MINUTES + 2 * RELOAD_MINUTES if canary else 0.0)
    down = RELOAD_MINUTES * (1 + (2 / REPLICAS if canary else 0.0))
    return (waited * before + down + (DAY_MINUTES - waited - down) * after) / DAY_MINUTES


def _figures(prefix: str, regrets: Sequence[Sequence[float]]) -> dict[str, float]:
    return {
        f"{prefix}mean_regret_pct": 100 * statistics.fmean(statistics.fmean(batches) for batches in regrets),
        f"{prefix}worst_batch_regret_pct": 100 * statistics.fmean(max(batches) for batches in regrets),
    }


def decision_cost() -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._tuning_cost"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    return {"decision_ms": float(done[0]), "decision_mib": float(done[1]), "decision_cells": float(done[2])}


# --------------------------------------------------------------------------------------------------------------------- page
def _row(name: str, regrets: Sequence[Sequence[float]]) -> None:
    means = [statistics.fmean(batches) for batches in regrets]
    worst = statistics.fmean(max(batches) for batches in regrets)
    _rows.append((name, f"{_each(means)} | {100 * statistics.fmean(means):.1f} | {100 * worst:.1f} | "))


def _each(shares: Sequence[float]) -> str:
    return " | ".join(f"{100 * share:.1f}" for share in shares)


def _percent(value: float) -> str:
    return f"{value:.1f}"


def table(names: Sequence[str]) -> str:
    """Format the regret in per cent by rule: each grid's mean over its batches, then the means over the grids."""
    head = f"| rule | {' | '.join(names)} | mean | worst batch | first day |"
    rows = [f"| {name} | {cells} |" for name, cells in _rows]
    return "\n".join([head, "|---|" + "---:|" * (len(names) + 3), *rows])


def document(docs: Path) -> None:
    """Write the table of the last run into its place in the page."""
    page = docs / "tuning.md"
    text = page.read_text()
    for name, written in (("results", table([grid.name for grid in grids()])), ("fleet", "\n".join(_fleet))):
        if written:
            text = replace_section(text, name, written)
    page.write_text(text)
