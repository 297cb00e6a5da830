"""Thirty days of a stubborn tuner: in a fixed-size cluster, with a setting that crashes, and in a resource without tuning.

| key                          | what is measured                                                                            |
|------------------------------|---------------------------------------------------------------------------------------------|
| days                         | of virtual time, with a recommendation of K=5 each half hour                                |
| no_room_trials               | trials in a cluster with as many GPUs as replicas, mode Auto and capacity Surge             |
| no_room_pending_hours        | of their pods without a node: what a cluster with an autoscaler would buy nodes for         |
| no_room_gpu_hours            | of their pods beyond the replicas that had one                                              |
| crash_trials, crash_gpu_hours | the same where the engines of K=5 end at once, in a cluster with spare GPUs                |
| crash_account_hours          | the spent hours in status.speculation.savings, of the latter                                |
| unasked_trials, unasked_gpu_hours | in a resource that does not configure tuning                                           |

The final message of the condition SpeculationTuned is printed before.
"""

from __future__ import annotations

from benchmarks._tuning_days import DAYS, simulate_days


def measure() -> dict[str, float]:
    without, crash, unconfigured = simulate_days("NoRoom"), simulate_days("Crash"), simulate_days("Crash", mode="Recommend")
    for name, totals in (("fixed-size cluster", without), ("crashing setting", crash), ("nothing written", unconfigured)):
        print(f"{name}: {totals.trials} trials, SpeculationTuned says {totals.condition_message}")
    return {
        "days": DAYS,
        "no_room_trials": without.trials,
        "no_room_pending_hours": round(without.pending_hours, 1),
        "no_room_gpu_hours": round(without.gpu_hours, 1),
        "crash_trials": crash.trials,
        "crash_gpu_hours": round(crash.gpu_hours, 1),
        "crash_account_hours": round(crash.spent, 1),
        "unasked_trials": unconfigured.trials,
        "unasked_gpu_hours": round(unconfigured.gpu_hours, 1),
    }
