"""Changes of the drafter in place: on one engine of real vLLM, and how often a trial by turns gets a wrong verdict.

PARTS in the environment chooses parts, such as PARTS=vllm,sim; the default is all, about three hours. Keys of other parts are
absent, and the file of results is named after the parts, such as inplace-vllm-sim.json.

Part vllm (6 minutes): vLLM 0.32 on CPU with the bundle and the plugin. Part vllm-0.33: the same with 0.33, as vllm_0_33_*.

| key                                    | what is measured                                                                    |
|----------------------------------------|-------------------------------------------------------------------------------------|
| vllm_pause_ms_median, vllm_pause_ms_p99 | from the pause to the resume of a swap under load                                  |
| vllm_requests, vllm_failed             | requests over 100 swaps (SWAPS=20: fewer); failed: any but a whole answer           |
| vllm_different_answers                 | greedy answers, of the load and after each change, that differ from a fresh engine's |
| vllm_al_after_swap_ratio_worst         | acceptance length after a swap over a fresh engine's, the farthest from 1: changes  |
|                                        | between three drafters, with and without a shared prefix                            |
| vllm_al_ratio_without_old_blocks_worst | likewise, where no cached block is of the drafter before                            |

Part rollouts (10 minutes): the operator in a lab, one engine of real vLLM 0.32, 6 requests/s through the gateway.

| key                                    | what is measured                                                                    |
|----------------------------------------|-------------------------------------------------------------------------------------|
| vllm_better_minutes                    | from the apply of EAGLE 3.1 to the end of its promotion, EAGLE 3 before             |
| vllm_weak_seconds                      | from a weak drafter's first turn to the last pod without it                         |
| vllm_better_gain_pct, vllm_weak_gain_pct | tokens per step in these outcomes, and its bounds (gain_lower, gain_upper)        |
| vllm_pods_created, vllm_pods_restarted | by all rollouts                                                                     |
| vllm_rollout_requests, vllm_rollout_failed | requests over all of it; failed: any but a whole answer                         |

Part aa (an hour): the same engine and traffic; EAGLE 3.1 serves, and comes again under other names.

| key                                    | what is measured                                                                    |
|----------------------------------------|-------------------------------------------------------------------------------------|
| aa_runs, aa_rollbacks                  | trials of 5 minutes (AA_RUNS=1: fewer), and those that were rolled back             |
| aa_requests, aa_failed                 | requests over all of it; failed: any but a whole answer                             |

Part fleet (5 minutes): 200 simulated engines with the plugin's endpoint, and the operator in a lab.

| key                                    | what is measured                                                                    |
|----------------------------------------|-------------------------------------------------------------------------------------|
| promote_200_seconds                    | from the verdict Promote to phase Ready, with the drafter in all 200 pods           |
| rollback_40_seconds                    | from the verdict Rollback until the last of 40 pods on trial has returned           |
| fleet_pods_created, fleet_target_loads | pods that were created, and engines that started, after the fleet was ready         |

Part sim (about an hour on 2 cores): simulated trials, without any history.

| key                              | what is measured                                                                    |
|----------------------------------|-------------------------------------------------------------------------------------|
| sim_runs                         | rollouts in each cell: a scenario, with 0.2, 1 or 20 requests/s on each of 1 or 4 pods |
| sim_equal_rollback_worst_pct     | an equal drafter is rolled back; in the worst cell                                  |
| sim_m2_promote_worst_pct         | one that is worse by just the margin, 2 %, is promoted; in the worst cell           |
| sim_m3_rollback_4pods_pct        | base, 4 pods, 1 request/s: one that is 3 % worse is rolled back                     |
| sim_equal_undecided_4pods_pct    | likewise: an equal one has no verdict after four hours                              |
| sim_p3_median_4pods_min          | likewise: minutes until one that is 3 % better is promoted, median                  |
| sim_p3_median_20rps_min          | the same at 20 requests/s                                                           |

The engine's part is in _inplace_vllm.py, the rollouts in _inplace_rollout.py, the fleet in _inplace_fleet.py; the traffic of
the simulation in _inplace_model.py, the rule on arrays in _inplace_rule.py, the scenarios in _inplace_simulation.py. Seeds are
fixed, so the same version of numpy gives the same results.
RUNS=200 makes a quick run of fewer rollouts. CELLS=FILE keeps finished cells in a file, and a run that is repeated with it
continues after them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aerie_lab.binaries import ensure_family
from benchmarks import _inplace_fleet
from benchmarks._cell_file import CellFile, complete_cells
from benchmarks._inplace_rollout import measure_rollouts, measure_same_drafter
from benchmarks._inplace_simulation import CELLS, MODULES, TABLE_HEAD, Cell, run_cells, summary, table_row
from benchmarks._inplace_vllm import measure_engine
from benchmarks._parts import Part, measure_parts, name_result

RUNS, SWAPS, AA_RUNS = 2000, 100, 10
SEED = 1


def measure() -> dict[str, float]:
    return measure_parts(PARTS)


def result_name() -> str:
    return name_result("inplace", PARTS)


def serve(family: str) -> dict[str, float]:
    """Return the keys of one engine, of the lab's vLLM of this family."""
    vllm = ensure_family(family, lambda line: print(line, file=sys.stderr, flush=True))
    prefix = family.replace("-", "_").replace(".", "_")
    return {f"{prefix}_{key}": value for key, value in measure_engine(vllm, int(os.environ.get("SWAPS", SWAPS))).items()}


def simulate(runs: int, cell_file: Path | None = None) -> dict[str, float]:
    """Return the keys sim_*, and print a table of all cells. `cell_file`: see the module."""
    finished = CellFile(cell_file, Cell, MODULES, runs, SEED)
    print(TABLE_HEAD)
    complete_cells(
        finished,
        CELLS,
        lambda workers, cells: run_cells(workers, cells, runs, SEED),
        lambda cell, by_effect: print(table_row(cell, by_effect), flush=True),
    )
    return summary(finished.results)


def _simulate_from_environment() -> dict[str, float]:
    file = os.environ.get("CELLS")
    return simulate(int(os.environ.get("RUNS", RUNS)), Path(file) if file else None)


PARTS: dict[str, Part] = {
    "vllm": lambda: serve("vllm"),
    "vllm-0.33": lambda: serve("vllm-0.33"),
    "rollouts": measure_rollouts,
    "aa": lambda: measure_same_drafter(int(os.environ.get("AA_RUNS", AA_RUNS))),
    "fleet": _inplace_fleet.measure,
    "sim": _simulate_from_environment,
}
"""The parts by name, in the order in which they run."""
