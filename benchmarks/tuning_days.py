"""Thirty days of a stubborn tuner in a fixed-size cluster, of a setting that crashes, and of who wrote nothing about tuning.

| key                          | what is measured                                                                            |
|------------------------------|---------------------------------------------------------------------------------------------|
| days                         | of virtual time, with an advice for K=5 each half hour                                      |
| no_room_trials               | trials in a cluster with as many GPUs as replicas, mode Auto and capacity Surge             |
| no_room_pending_hours        | of their pods without a node: what a cluster with an autoscaler would buy nodes for         |
| no_room_gpu_hours            | of their pods beyond the replicas that had one                                              |
| crash_trials, crash_gpu_hours | the same where the engines of K=5 end at once, in a cluster with spare GPUs                |
| crash_account_hours          | what status.speculation.savings says of the latter                                          |
| unasked_trials, unasked_gpu_hours | where nothing is written about tuning                                                  |

What the condition Tuned says in the end is printed before.
"""

from __future__ import annotations

from benchmarks._tuning_days import DAYS, lived


def measure() -> dict[str, float]:
    without, crash, unasked = lived("NoRoom"), lived("Crash"), lived("Crash", mode="Recommend")
    for name, found in (("fixed-size cluster", without), ("crashing setting", crash), ("nothing written", unasked)):
        print(f"{name}: {found.trials} trials, SpeculationTuned says {found.told}")
    return {
        "days": DAYS,
        "no_room_trials": without.trials,
        "no_room_pending_hours": round(without.pending_hours, 1),
        "no_room_gpu_hours": round(without.gpu_hours, 1),
        "crash_trials": crash.trials,
        "crash_gpu_hours": round(crash.gpu_hours, 1),
        "crash_account_hours": round(crash.spent, 1),
        "unasked_trials": unasked.trials,
        "unasked_gpu_hours": round(unasked.gpu_hours, 1),
    }
