"""Whether harmful canaries are rolled back, and good ones promoted: the operator's verdicts on many kinds of simulated rollouts.

| key                                | what is measured, in percent; the worst of its cells                                      |
|------------------------------------|-------------------------------------------------------------------------------------------|
| runs                               | rollouts in each cell                                                                     |
| crash_promoted_pct                 | engines crash at random: still promoted after the monitoring                              |
| crash_oracle_pct                   | of that cell: rollouts without two observable crashes, if promoted right after the soak   |
| abort_promoted_pct                 | overloaded from some minute on, so that clients give up before the first token: promoted  |
| slow_with_objective_promoted_pct   | slower than the control, within an objective of latency: promoted                         |
| objective_broken_promoted_pct      | the objective is broken by the canary alone: promoted                                     |
| other_k_equal_rollback_pct         | an equal drafter with another K is rolled back                                            |
| other_k_worse_promoted_pct         | one that takes 6 % more time is promoted                                                  |
| lighter_faster_rollback_pct        | fewer tokens per step and less time: rolled back                                          |
| heavier_slower_promoted_pct        | 3 % more time and 12 % more to the first token: promoted                                  |
| rare_failures_promoted_pct         | some requests fail: promoted                                                              |
| unlike_gpu_rollback_pct            | pods differ permanently in time: an equal drafter is rolled back                          |
| unlike_gpu_worse_promoted_pct      | likewise: one that takes 6 % more time is promoted                                        |
| equal_rollback_pct                 | an equal drafter is rolled back                                                           |
| equal_promoted_pct, equal_undecided_pct | the others of these, at 1 request/s                                                  |
| better_promoted_pct                | one that gets 9 % more tokens per step in steps as long is promoted; the fewest           |
| unlike_gpu_better_promoted_pct     | the same with permanently different pods, or without calibration; fewest                  |
| better_median_min                  | after how many minutes, at 1 request/s; the soak lasts 30                                 |

The model is in _verdict_model.py, the cells in _verdict_cells.py. Seeds are fixed, so the same version of numpy gives the same
results. RUNS=40 in the environment makes a quick run of fewer rollouts. The page
docs/measurements/verdict-checks.md is written by a run with SAVE=1.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from aerie.analysis.baseline import BaselineCalibration
from benchmarks._verdict_cells import DAYS, Cell, Outcome, cells, days, figures, oracle, run
from benchmarks._verdict_model import Traffic

RUNS = 500
SEED = 1
CHUNK = 125
"""Rollouts at once."""

ORACLES = 4000
"""Rollouts for `oracle`, which evaluates no analysis."""
HEAD = "| cell | promoted % | rolled back % | undecided % | median minutes |\n|---|---|---|---|---|"

_figures_by_cell: dict[Cell, dict[str, float]] = {}
"""The results of the last run, for its page."""
_runs = RUNS


def measure() -> dict[str, float]:
    global _runs
    _runs = int(os.environ.get("RUNS", RUNS))
    _figures_by_cell.clear()
    key = ""
    # Forked workers would inherit numpy's threads in an unknown state.
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as workers:
        for cell, outcomes in _outcomes(workers, _by_key(), _runs):
            _figures_by_cell[cell] = figures(outcomes)
            if cell.key != key:
                key = cell.key
                print(f"\n### {key}\n\n{HEAD}")
            print(line(cell, _figures_by_cell[cell]), flush=True)
    return {key: round(value, 2) for key, value in summary(_figures_by_cell).items()} | {"runs": _runs}


def _by_key() -> list[Cell]:
    """Return the cells, grouped by key."""
    every = list(cells())
    keys = list(dict.fromkeys(cell.key for cell in every))
    return sorted(every, key=lambda cell: keys.index(cell.key))


def _outcomes(workers: ProcessPoolExecutor, all_cells: list[Cell], runs: int) -> Iterator[tuple[Cell, list[Outcome]]]:
    """Run every cell and return its outcomes; days that cells share are simulated once."""
    parts = [range(begin, min(begin + CHUNK, runs)) for begin in range(0, runs, CHUNK)]
    halves = [range(half, min(runs, DAYS), 2) for half in (0, 1)]
    calibration_jobs: dict[tuple[Traffic, int], list[Future[list[BaselineCalibration]]]] = {}
    for cell in all_cells:
        if cell.history and cell.calibration_key not in calibration_jobs:
            calibration_jobs[cell.calibration_key] = [workers.submit(days, *cell.calibration_key, half, SEED) for half in halves]
    jobs = []
    for cell in all_cells:
        calibrations = (
            [calibration for part in calibration_jobs[cell.calibration_key] for calibration in part.result()]
            if cell.history
            else []
        )
        jobs.append((cell, [workers.submit(run, cell, part, calibrations, SEED) for part in parts]))
    for cell, futures in jobs:
        yield cell, [outcome for future in futures for outcome in future.result()]


WRONG_OUTCOMES: dict[str, tuple[str, str, float]] = {
    "crash_promoted": ("engines crash at random; still promoted after the monitoring", "Promoted", 1.0),
    "abort_promoted": ("overloaded from some minute on, clients abandon requests; promoted", "Promoted", 1.0),
    "slow_with_objective_promoted": ("slower, within an objective of 50 ms at 10 ms a token; promoted", "Promoted", 1.0),
    "objective_broken_promoted": ("an objective is violated, 4 % with the control; promoted", "Promoted", 3.0),
    "other_k_equal_rollback": ("arms of K 5 and 3, as fast; rolled back", "RolledBack", 2.0),
    "other_k_worse_promoted": ("arms of K 5 and 3, 6 % slower; promoted", "Promoted", 3.0),
    "lighter_faster_rollback": ("tokens per step -4 %, time -15 %; rolled back", "RolledBack", 2.0),
    "heavier_slower_promoted": ("time +3 %, first token +12 %; promoted", "Promoted", 3.0),
    "rare_failures_promoted": ("requests fail, of the control none; promoted", "Promoted", 5.0),
    "unlike_gpu_rollback": ("pods permanently different in time, equal drafters; rolled back", "RolledBack", 2.0),
    "unlike_gpu_worse_promoted": (
        "pods permanently different in time, time +6 %, tokens per step +10 %; promoted",
        "Promoted",
        3.0,
    ),
    "equal_rollback": ("equal drafters; rolled back", "RolledBack", 2.0),
}
"""Description of the cells, their wrong outcome, and how often it may occur, in percent; by key."""
BETTER, UNLIKE_BETTER = "better_promoted", "unlike_gpu_better_promoted"
"""Keys for which the right outcome is counted."""


def worst(figures_by_cell: Mapping[Cell, Mapping[str, float]], key: str) -> Cell:
    """Return the cell of this key with the most wrong outcomes."""
    cells_of_key = [cell for cell in figures_by_cell if cell.key == key]
    if key in (BETTER, UNLIKE_BETTER):
        return min(cells_of_key, key=lambda cell: figures_by_cell[cell]["Promoted_pct"])
    outcome = WRONG_OUTCOMES[key][1]
    return max(cells_of_key, key=lambda cell: figures_by_cell[cell][f"{outcome}_pct"])


def summary(figures_by_cell: Mapping[Cell, Mapping[str, float]]) -> dict[str, float]:
    """Return the results by key."""
    results = {
        f"{key}_pct": figures_by_cell[worst(figures_by_cell, key)][f"{outcome}_pct"]
        for key, (_, outcome, _) in WRONG_OUTCOMES.items()
    }
    results["crash_oracle_pct"] = 100 * oracle(worst(figures_by_cell, "crash_promoted"), ORACLES, SEED)
    equal, better = (next(cell for cell in figures_by_cell if cell.key == key) for key in ("equal_rollback", BETTER))
    results["equal_promoted_pct"], results["equal_undecided_pct"] = (
        figures_by_cell[equal][f"{outcome}_pct"] for outcome in ("Promoted", "Undecided")
    )
    for key in (BETTER, UNLIKE_BETTER):
        results[f"{key}_pct"] = figures_by_cell[worst(figures_by_cell, key)]["Promoted_pct"]
    results["better_median_min"] = figures_by_cell[better]["minutes"]
    for key in ("other_k_equal_rollback", "unlike_gpu_rollback"):
        shares = [figures["Undecided_pct"] for cell, figures in figures_by_cell.items() if cell.key == key]
        results[f"{key.removesuffix('_rollback')}_undecided_pct"] = max(shares)
    return results


def line(cell: Cell, figures: Mapping[str, float]) -> str:
    """Format a row of a table."""
    shares = " | ".join(f"{figures[f'{outcome}_pct']:.1f}" for outcome in ("Promoted", "RolledBack", "Undecided"))
    when = "-" if math.isnan(figures["minutes"]) else f"{figures['minutes']:.0f}"
    return f"| {cell.title} | {shares} | {when} |"


# --------------------------------------------------------------------------------------------------------------------- page
def document(docs: Path) -> None:
    """Write the page of the last run."""
    results = summary(_figures_by_cell)
    rows = []
    for key, (description, _, _) in WRONG_OUTCOMES.items():
        bad = worst(_figures_by_cell, key)
        rows.append(f"| {description} | {results[f'{key}_pct']:.1f} | {line(bad, _figures_by_cell[bad])[2:]}")
    for key, description in _GOOD.items():
        good = worst(_figures_by_cell, key)
        rows.append(f"| {description} | {results[f'{key}_pct']:.1f} | {line(good, _figures_by_cell[good])[2:]}")
    text = _PAGE.format(runs=_runs, seed=SEED, days=min(DAYS, _runs), rows="\n".join(rows), **results)
    (docs / "verdict-checks.md").write_text(text.rstrip() + "\n")


_GOOD = {
    BETTER: "tokens per step +9 %, steps as long; promoted",
    UNLIKE_BETTER: "the same, pods permanently different in time or no history; promoted",
}

_PAGE = """# Error rates of the verdict, by kind of canary

Written by `make bench NAME=verdict SAVE=1`: {runs} simulated rollouts in each cell, seed {seed}. The operator's own functions
evaluate them block by block, with all criteria. Each row shows the worst of its cells.

Simulation and assumptions: one canary and one fresh control pod, blocks of 2 minutes, a minimum duration of 30 minutes, and a
deadline of 4 hours. Each pod gets 1 request/s, unless a cell names another rate. A request has a number of output tokens
(lognormal, mean 400), and the number of drafts follows from it. A pod's block has 120 requests. Its dispersion is 4.3 % in
tokens per step, 3 % in time per output token and 10 % in time to first token. The three are independent. Nine tenths of that
variance depend on the number of requests; the rest has a correlation time of 8 minutes. All pods drift together. Before each
rollout there is a day of 3 stable pods ({days} days are shared), unless the cell has no calibration. Times do not depend on the
load. The constants are assumptions; a fleet with other constants gives other results.

A canary whose engines crash loads for 3 minutes after each crash. Once promoted by the analysis, it is ramped up (4 and 8 of 16
pods, 5 minutes each). Then it is monitored for 10 minutes, or for an hour if one engine has ended. A rollout counts as promoted
if it is still promoted after that. Two crashes are significant. In {crash_oracle_pct:.1f} % of that cell's rollouts there are
no two crashes to observe, even if the canary is promoted right after the minimum duration: none by the end of the ten minutes,
or one and no second within the hour.

| canary; what is counted | % | worst cell | promoted | rolled back | inconclusive | median minutes |
|---|---|---|---|---|---|---|
{rows}

The minutes are those of decided rollouts. At 1 request/s, {equal_promoted_pct:.0f} % of the equal drafters are promoted and
{equal_undecided_pct:.0f} % are inconclusive, because a margin of 2 % takes many blocks. A drafter with 9 % more tokens per step
is promoted after {better_median_min:.0f} minutes. Up to {other_k_equal_undecided_pct:.0f} % of the equal drafters are
inconclusive with different K, and up to {unlike_gpu_undecided_pct:.0f} % with pods of different speed.
"""
