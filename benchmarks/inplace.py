"""How often a trial by turns in the same pods gets a wrong verdict, and how long it takes: simulated, without any history.

| key                              | what is measured                                                                    |
|----------------------------------|-------------------------------------------------------------------------------------|
| sim_runs                         | rollouts in each cell: a scenario, with 0.2, 1 or 20 requests/s on each of 1 or 4 pods |
| sim_equal_rollback_worst_pct     | an equal drafter is rolled back; in the worst cell                                  |
| sim_m2_promote_worst_pct         | one that is worse by just the margin, 2 %, is promoted; in the worst cell           |
| sim_m3_rollback_4pods_pct        | base, 4 pods, 1 request/s: one that is 3 % worse is rolled back                     |
| sim_equal_undecided_4pods_pct    | likewise: an equal one has no verdict after four hours                              |
| sim_p3_median_4pods_min          | likewise: minutes until one that is 3 % better is promoted, median                  |
| sim_p3_median_20rps_min          | the same at 20 requests/s                                                           |

The traffic is in _inplace_model.py, the rule on arrays in _inplace_rule.py, the scenarios in _inplace_simulation.py. Seeds are
fixed, so the same version of numpy gives the same results. RUNS=200 in the environment makes a quick run of fewer rollouts.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from benchmarks._inplace_simulation import CELLS, TABLE_HEAD, run_cells, summary, table_row

RUNS = 2000
SEED = 1


def measure() -> dict[str, float]:
    return simulate(int(os.environ.get("RUNS", RUNS)))


def simulate(runs: int) -> dict[str, float]:
    """Return the keys sim_*, and print a table of all cells."""
    print(TABLE_HEAD)
    results = {}
    # Forked workers would inherit numpy's threads in an unknown state.
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as workers:
        for cell, by_effect in run_cells(workers, CELLS, runs, SEED):
            results[cell] = by_effect
            print(table_row(cell, by_effect), flush=True)
    return summary(results)
