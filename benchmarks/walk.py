"""Random walks through rollouts, for a given time, on all cores: their number and length, and violated invariants.

| key            | what is measured                                                                           |
|----------------|--------------------------------------------------------------------------------------------|
| seeds          | walks, each left alone three times at its end: as it is, with a new spec, and healed        |
| steps          | things that happened: an edit, a word, a pod that fails, an operator that is killed, ...    |
| decisions      | reconciles of a fleet, each checked against the invariants                                  |
| virtual_days   | time that passed for the fleets                                                             |
| invariants     | how many there are (tests/unit/rollout/invariants.py)                                       |
| violations     | walks in which one of them did not hold: printed above, with seed and steps                 |
| seconds        | that it took, on so many cores                                                              |

In walks of odd seeds nodes have one GPU and then another one.
SECONDS=60 makes it short (default: an hour), SEED=7 begins with another seed, STEPS=40 makes each walk longer. A violation is
replayed by SEED with its seed and WALKS=1: the same code walks the same way from the same seed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from tests.unit.rollout.walk import INVARIANTS, InvariantError, Walk
from tests.unit.rollout.world import START

STEPS = 25
SHOWN = 20
"""Violations that are printed in full."""


def run_walk(seed: int, steps: int) -> tuple[int, int, float, str]:
    """Run one walk; return its steps, decisions and virtual days, and the violation, empty without one."""
    walk, message = Walk(seed, mixed=bool(seed % 2)), ""
    try:
        walk.go(steps).finish()
    except InvariantError as violation:
        message = str(violation)
    days = (walk.cluster.now - START).total_seconds() / 86400 + walk.alone_duration.total_seconds() / 86400
    return walk.steps, walk.decisions, days, message


def measure() -> dict[str, float]:
    seconds, first = float(os.environ.get("SECONDS", "3600")), int(os.environ.get("SEED", "0"))
    steps, most = int(os.environ.get("STEPS", str(STEPS))), int(os.environ.get("WALKS", str(10**9)))
    cores, began, seed = os.cpu_count() or 1, time.monotonic(), first
    figures = {"seeds": 0.0, "steps": 0.0, "decisions": 0.0, "virtual_days": 0.0, "violations": 0.0}
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as workers:
        running: set[Future[tuple[int, int, float, str]]] = set()
        while True:
            while len(running) < 2 * cores and seed < first + most and time.monotonic() < began + seconds:
                running.add(workers.submit(run_walk, seed, steps))
                seed += 1
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                walk_steps, walk_decisions, days, message = future.result()
                for key, more in {"seeds": 1, "steps": walk_steps, "decisions": walk_decisions, "virtual_days": days}.items():
                    figures[key] += more
                figures["violations"] += bool(message)
                if message and figures["violations"] <= SHOWN:
                    print(message, flush=True)
    figures |= {"invariants": float(len(INVARIANTS)), "cores": float(cores), "seconds": time.monotonic() - began}
    return {key: round(value, 1) for key, value in figures.items()}
