"""Error rates of an inconclusive analysis that a user extends once, by simulation with the operator's own functions.

| key                            | what is measured, in percent of the rollouts of a cell                                       |
|--------------------------------|----------------------------------------------------------------------------------------------|
| runs                           | rollouts in each cell                                                                        |
| worse_promoted_pct             | tokens per step 2 % below the control's, promoted by the end of the extension; worst cell    |
| worse_promoted_by_deadline_pct | of that cell: promoted without the extension                                                 |
| equal_rollback_pct             | an equal drafter, rolled back by the end of the extension; worst cell                        |
| equal_rollback_by_deadline_pct | of that cell: rolled back by the deadline                                                    |
| extended_promoted_pct          | an equal drafter that the extension promotes, in percent of the extended rollouts; all cells |

An analysis ends after four hours. A canary without a verdict is Held for half an hour, and then extended by two hours. The
guardrails of phase Held count from the deadline to the end. Every inconclusive analysis is extended, whatever its estimate is.
The model is in _verdict_model.py. RUNS=40 in the environment makes a quick run.
"""

from __future__ import annotations

import multiprocessing
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from typing import Literal

import numpy as np

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.state import AnalysisState
from aerie.rollout.canary.analysis_run.run import AnalysisRun, build_block_rule
from benchmarks._verdict_cells import DAYS, HORIZON, STABLE, Cell, days, make_plan
from benchmarks._verdict_model import Canary, Traffic, close, drifts, simulate

RUNS, SEED, CHUNK = 1000, 1, 125
HELD_SECONDS, EXTENSION_SECONDS = 1800.0, 7200.0
WORSE = Canary(per_step=0.98)
CELLS = (
    Cell("worse", "2 % worse, 1 pod against 1, calibrated", WORSE),
    Cell("worse", "2 % worse, 2 pods against 2, calibrated", WORSE, pods=2),
    Cell("worse", "2 % worse, 1 pod against 1, not calibrated", WORSE, history=False),
    Cell("equal", "equal, 1 pod against 1, calibrated", Canary()),
)
Outcome = Literal["Promote", "Rollback", "PromoteExtended", "RollbackHeld", "Held"]
"""Promoted or rolled back by the deadline; promoted in the extension; rolled back by the guardrails; Held at the end."""


def measure() -> dict[str, float]:
    runs = int(os.environ.get("RUNS", RUNS))
    parts = [range(begin, min(begin + CHUNK, runs)) for begin in range(0, runs, CHUNK)]
    print("| canary | promoted by the deadline | in the extension | in all | rolled back by the deadline | later | Held |")
    print("|---|---|---|---|---|---|---|")
    shares: dict[Cell, dict[Outcome, float]] = {}
    # Forked workers would inherit numpy's threads in an unknown state.
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as workers:
        halves = [workers.submit(days, Traffic(), 3, range(half, min(runs, DAYS), 2), SEED) for half in (0, 1)]
        calibrations = [calibration for half in halves for calibration in half.result()]
        jobs = [
            (cell, [workers.submit(run, cell, part, calibrations if cell.history else [], SEED) for part in parts])
            for cell in CELLS
        ]
        for cell, futures in jobs:
            outcomes = [outcome for future in futures for outcome in future.result()]
            shares[cell] = {outcome: 100 * outcomes.count(outcome) / runs for outcome in Outcome.__args__}  # type: ignore[attr-defined]
            print(line(cell, shares[cell]), flush=True)
    worse = max((cell for cell in CELLS if cell.key == "worse"), key=lambda cell: promoted(shares[cell]))
    equal_cells = [cell for cell in CELLS if cell.key == "equal"]
    equal = max(equal_cells, key=lambda cell: rolled_back(shares[cell]))
    extended = sum(100 - shares[cell]["Promote"] - shares[cell]["Rollback"] for cell in equal_cells)
    results = {
        "worse_promoted_pct": promoted(shares[worse]),
        "worse_promoted_by_deadline_pct": shares[worse]["Promote"],
        "equal_rollback_pct": rolled_back(shares[equal]),
        "equal_rollback_by_deadline_pct": shares[equal]["Rollback"],
        "extended_promoted_pct": 100 * sum(shares[cell]["PromoteExtended"] for cell in equal_cells) / max(extended, 1e-9),
    }
    return {"runs": runs} | {key: round(value, 2) for key, value in results.items()}


def promoted(shares: dict[Outcome, float]) -> float:
    return shares["Promote"] + shares["PromoteExtended"]


def rolled_back(shares: dict[Outcome, float]) -> float:
    return shares["Rollback"] + shares["RollbackHeld"]


def line(cell: Cell, shares: dict[Outcome, float]) -> str:
    """Format a row of the table."""
    columns = (shares["Promote"], shares["PromoteExtended"], promoted(shares), shares["Rollback"], shares["RollbackHeld"])
    return f"| {cell.title} | {' | '.join(f'{value:.1f} %' for value in (*columns, shares['Held']))} |"


def run(cell: Cell, indices: Sequence[int], calibrations: Sequence[BaselineCalibration], seed: int) -> list[Outcome]:
    """Run these rollouts, calibrated with some days, and return their outcomes."""
    return [rollout(cell, index, calibrations[index % len(calibrations)] if calibrations else None, seed) for index in indices]


def rollout(cell: Cell, index: int, calibration: BaselineCalibration | None, seed: int) -> Outcome:
    """Run one rollout of a cell, with an extension if its analysis is inconclusive."""
    random = np.random.default_rng([seed, zlib.crc32(f"extension {cell.title}".encode()), index])
    plan = make_plan(cell, calibration)
    shared = drifts(cell.traffic, HORIZON + HELD_SECONDS + EXTENSION_SECONDS, random)
    canary = simulate(cell.traffic, cell.pods, shared, random, cell.canary)
    control = simulate(cell.traffic, cell.pods, shared, random)
    stable = simulate(cell.traffic, STABLE, shared, random)
    analysis_run = AnalysisRun(plan, AnalysisState(0.0), 0.0)
    phase, held_since = "Analyzing", _at(0.0)
    for block in close(cell.traffic, canary, control, build_block_rule(plan, 15.0), stable):
        now = _at(block.end_time)
        analysis_run = analysis_run.with_blocks([block])
        match phase:
            case "Analyzing":
                analysis_run, verdict = analysis_run.evaluate(now, ())
                if verdict.outcome == "Inconclusive":
                    phase, held_since, analysis_run = "Held", now, analysis_run.reset_guard(now)
                elif verdict.outcome != "Continue":
                    return verdict.outcome
            case "Held":
                analysis_run, verdict = analysis_run.check_guardrails(now, ())
                if verdict.outcome == "Continue" and (now - held_since).total_seconds() >= HELD_SECONDS:
                    phase, analysis_run = "Extended", analysis_run.begin_extension(held_since, now)
            case _:
                analysis_run, verdict = analysis_run.evaluate_extension(now, _at(HORIZON + HELD_SECONDS + EXTENSION_SECONDS), ())
        if phase in ("Held", "Extended") and verdict.outcome == "Rollback":
            return "RollbackHeld"
        if phase == "Extended" and verdict.outcome == "Promote":
            return "PromoteExtended"
    return "Held"


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
