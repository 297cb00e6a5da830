"""Cost of a decision: 64 replicas scraped every 15 s for a day, in a process of its own. Prints milliseconds of
CPU time and MiB.

The memory is the peak of the process above its memory before the tuner was imported: numpy, the day's telemetry, and
the decision. The day: every replica's batch goes up and down with the hours between 4 and 80, and each window is 20 % off it.
"""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path

REPLICAS = 64
WINDOW = 15.0


def main() -> None:
    from aerie.engine.speculation import Static  # what the operator has loaded anyway
    from aerie_lab.engine.step import load_grid

    table = load_grid("qwen3-32b-gb200-tp2")  # also imports nothing of the tuner
    before = _peak_mib()

    import numpy as np

    from aerie.engine.metrics.sample import Counters
    from aerie.tuning.decision.policy import TuningPolicy
    from aerie.tuning.decision.recommend import decide_setting
    from aerie.tuning.decision.types import TuningContext
    from aerie.tuning.telemetry import ReplicaWindow, TuningTelemetry
    from benchmarks._tuning_replay import ENGINE, grids, simulate_window

    published = next(grid for grid in grids() if grid.step_time.name.startswith("Qwen3-32B"))
    assert published.step_time.step_seconds_by_k == table.step_seconds_by_k
    random = np.random.default_rng(1)
    windows: dict[int, Counters] = {}  # by batch: their creation is not measured
    telemetry, setting, now = TuningTelemetry(), Static(3), 0.0
    for index in range(round(86400 / WINDOW)):
        now = (index + 1) * WINDOW
        level = 18.0 * 4.4 ** math.sin(2 * math.pi * now / 86400)
        for replica, batch in enumerate((level * np.exp(0.2 * random.standard_normal(REPLICAS))).tolist()):
            key = round(8 * math.log2(max(batch, 1.0)))
            if key not in windows:
                windows[key] = simulate_window(published, setting, 2 ** (key / 8), WINDOW, random)
            telemetry.add(ReplicaWindow(f"pod-{replica}", now, setting, windows[key]))
    context = TuningContext(ENGINE, setting, 7, REPLICAS, now)
    milliseconds = []
    for _ in range(7):
        began = time.process_time()
        decide_setting(telemetry, context, TuningPolicy(), 1)
        milliseconds.append(1000 * (time.process_time() - began))
    print(f"{statistics.median(milliseconds):.1f} {_peak_mib() - before:.1f} {len(telemetry.cells)}")


def _peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage would also tell the peak of whoever forked
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


if __name__ == "__main__":
    main()
