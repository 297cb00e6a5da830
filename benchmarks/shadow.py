"""Shadow evaluation: how often it gets a wrong verdict, how long it takes, and what copies of requests cost.

PARTS=sim, PARTS=users or PARTS=cost runs one part alone; its results are in a file of its own.

Part sim (half an hour on 2 cores), simulated:

| key                       | what is measured, in the worst cell                                                    |
|---------------------------|----------------------------------------------------------------------------------------|
| runs                      | evaluations in each cell                                                               |
| equal_undecided_worst_pct | an equal drafter has no verdict after four hours                                       |
| aa_rollback_worst_pct     | an equal drafter is rolled back                                                        |
| m3_rollback_worst_pct     | one that is 3 % worse is rolled back (the smallest)                                    |
| m2_promote_worst_pct      | one that is worse by just the margin, 2 %, is accepted                                 |
| p3_median_base_min        | minutes until one that is 3 % better is accepted, median, at 1 request/s and pod       |
| p3_median_low_min         | the same at 0.2 requests/s                                                             |
| p3_median_prompts_min     | the same with prompts of a file                                                        |
| equal_median_base_min     | minutes until an equal one is accepted, median, at 1 request/s and pod                 |

Part users (4 minutes): the operator, a real gateway, simulated engines; a rollout that is promoted, and one that is rolled back.

| key                       | what is measured                                                                       |
|---------------------------|----------------------------------------------------------------------------------------|
| user_requests_before_acceptance | users' requests that canary and control answered before the drafter was accepted |
| user_requests_meanwhile   | those that the stable pods answered in this time                                       |
| evaluated_requests        | the evaluator's requests that canary and control answered                              |

Part cost (15 minutes, with nothing beside it): a real gateway, the evaluator, simulated engines, 20 requests/s.

| key                       | what is measured                                                                       |
|---------------------------|----------------------------------------------------------------------------------------|
| evaluator_rss_mib         | peak resident memory of the evaluator                                                  |
| evaluator_cpu_pct         | its CPU time, in percent of a core, while nine of ten copies are dropped               |
| mirror_p99_ratio          | 99th percentile of users' latency with the mirror, over that without it                |
| mirror_p50_ratio          | the median likewise                                                                    |
| mirror_p99_ms             | the percentile with the mirror                                                         |
| mirror_requests, mirror_failed | users' requests that were measured, and those of all that failed                  |

Cells of the simulation: 0.2, 1 and 20 requests/s on each of 4 pods, mirrored, random or of 200 sticky tenants, and a file of
3,000 prompts; each at temperature 0 or mixed. Five tenants and a file of 1,000 prompts are in the table only: they are too few
clusters. Minutes count from the first pair. Traffic and pairs per second are in _shadow_model.py, the rule on arrays in
_shadow_rule.py, the cells in _shadow_simulation.py. Seeds are fixed, so the same version of numpy gives the same results.
RUNS=200 makes a quick run of fewer evaluations. CELLS=FILE keeps finished cells in a file, and a run that is repeated with it
continues after them. The other parts are in _shadow_users.py and _shadow_cost.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks._cell_file import CellFile, complete_cells
from benchmarks._parts import Part, measure_parts, name_result
from benchmarks._shadow_cost import measure_cost
from benchmarks._shadow_simulation import CELLS, MODULES, TABLE_HEAD, Cell, run_cells, summary, table_row
from benchmarks._shadow_users import measure_users

RUNS, SEED = 2000, 1


def measure() -> dict[str, float]:
    return measure_parts(PARTS)


def result_name() -> str:
    return name_result("shadow", PARTS)


def _simulate_from_environment() -> dict[str, float]:
    file = os.environ.get("CELLS")
    return simulate(int(os.environ.get("RUNS", RUNS)), Path(file) if file else None)


def simulate(runs: int, cell_file: Path | None = None) -> dict[str, float]:
    """Return the keys of the simulation, and print a table of all cells. `cell_file`: see the module."""
    finished = CellFile(cell_file, Cell, MODULES, runs, SEED)
    print(TABLE_HEAD)
    complete_cells(
        finished,
        CELLS,
        lambda workers, cells: run_cells(workers, cells, runs, SEED),
        lambda cell, by_effect: print(table_row(cell, by_effect), flush=True),
    )
    return summary(finished.results)


PARTS: dict[str, Part] = {"sim": _simulate_from_environment, "users": measure_users, "cost": measure_cost}
"""The parts by name, in the order in which they run."""
