"""Walks at random through rollouts, for as long as asked for, on all cores: how much has been walked, and what did not hold.

| key            | what is measured                                                                           |
|----------------|--------------------------------------------------------------------------------------------|
| seeds          | walks, each left alone three times at its end: as it is, with a new spec, and healed        |
| steps          | things that happened: an edit, a word, a pod that fails, an operator that is killed, ...    |
| decisions      | looks of the operator at a fleet, each held against the invariants                          |
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


def walked(seed: int, steps: int) -> tuple[int, int, float, str]:
    """Steps, decisions and virtual days of one walk, and what did not hold."""
    walk, said = Walk(seed, mixed=bool(seed % 2)), ""
    try:
        walk.go(steps).finish()
    except InvariantError as violation:
        said = str(violation)
    days = (walk.cluster.now - START).total_seconds() / 86400 + walk.alone_duration.total_seconds() / 86400
    return walk.steps, walk.decisions, days, said


def measure() -> dict[str, float]:
    seconds, first = float(os.environ.get("SECONDS", "3600")), int(os.environ.get("SEED", "0"))
    steps, most = int(os.environ.get("STEPS", str(STEPS))), int(os.environ.get("WALKS", str(10**9)))
    cores, began, seed = os.cpu_count() or 1, time.monotonic(), first
    figures = {"seeds": 0.0, "steps": 0.0, "decisions": 0.0, "virtual_days": 0.0, "violations": 0.0}
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as workers:
        running: set[Future[tuple[int, int, float, str]]] = set()
        while True:
            while len(running) < 2 * cores and seed < first + most and time.monotonic() < began + seconds:
                running.add(workers.submit(walked, seed, steps))
                seed += 1
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                went, looks, days, said = one.result()
                for key, more in {"seeds": 1, "steps": went, "decisions": looks, "virtual_days": days}.items():
                    figures[key] += more
                figures["violations"] += bool(said)
                if said and figures["violations"] <= SHOWN:
                    print(said, flush=True)
    figures |= {"invariants": float(len(INVARIANTS)), "cores": float(cores), "seconds": time.monotonic() - began}
    return {key: round(value, 1) for key, value in figures.items()}
