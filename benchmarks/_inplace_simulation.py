"""The scenarios in which trials by turns are simulated, and the run of a cell: a scenario with a rate and a number of pods.

All effects of a cell are evaluated on the same requests and orders. No trial has a history.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import numpy as np

from aerie.analysis.switchback.plan import SwitchbackPlan
from benchmarks._canary_model import Bools
from benchmarks._cell_file import Figures
from benchmarks._inplace_model import TurnsTraffic, canary_windows, simulate_windows, window_count
from benchmarks._inplace_rule import Outcomes, decide

EFFECTS = (-0.03, -0.02, 0.0, 0.03)
RATES = (0.2, 1.0, 20.0)
POD_COUNTS = (1, 4)
CHUNK = 100
"""Runs of a cell at once."""
HOURS = {20.0: {1: 2.0, 4: 1.0}}
"""Simulated hours by rate and pods; else 4, the deadline. Almost every trial at 20 requests/s has its verdict by then."""


@dataclass(frozen=True)
class Scenario:
    """A kind of traffic, without its rate."""

    title: str
    traffic: TurnsTraffic = field(default_factory=TurnsTraffic)
    counts: bool = True
    """Whether the scenario counts for the worst rates; not where it violates what a plan assumes."""


SCENARIOS = {
    "base": Scenario("base; pods do not differ, no carry-over"),
    "sticky15": Scenario("sticky tenants, 15 min of memory", TurnsTraffic(mix_pod=0.55, memory=900.0)),
    "sticky60": Scenario("sticky tenants, 60 min", TurnsTraffic(mix_pod=0.55, memory=3600.0)),
    "forever": Scenario("sticky tenants, permanently", TurnsTraffic(mix_pod=0.55, memory=1e9)),
    "pods1": Scenario("pods differ permanently, sd 1 %", TurnsTraffic(offset_sd=0.01)),
    "pods2": Scenario("pods differ permanently, sd 2 %", TurnsTraffic(offset_sd=0.02)),
    "heavy": Scenario("heavy-tailed lengths, sigma 2", TurnsTraffic(spread=2.0)),
    "bimodal": Scenario("bimodal acceptance, kappa 1.5", TurnsTraffic(kappa=1.5)),
    "doubling": Scenario("load doubles, mix shifts", TurnsTraffic(growth=2.0, mix_trend=0.8)),
    "carryover": Scenario("carry-over for 30 s", TurnsTraffic(carryover=30.0)),
    "restarts": Scenario("each pod restarts every 2 h", TurnsTraffic(resets_per_hour=0.5)),
    "lost": Scenario("10 % of the windows lost", TurnsTraffic(lost=0.1)),
    "beyond": Scenario(
        "carry-over beyond the assumption, exp(-t / 30 s)", TurnsTraffic(carryover=30.0, exponential=True), counts=False
    ),
}


@dataclass(frozen=True)
class Cell:
    """A scenario with a rate, in requests per second and pod, and a number of pods."""

    scenario: str
    rate: float
    pods: int

    @property
    def traffic(self) -> TurnsTraffic:
        return replace(SCENARIOS[self.scenario].traffic, rate=self.rate)

    @property
    def seconds(self) -> float:
        """Simulated seconds of a trial."""
        return 3600 * HOURS.get(self.rate, {}).get(self.pods, 4.0)


CELLS = tuple(Cell(scenario, rate, pods) for scenario in SCENARIOS for rate in RATES for pods in POD_COUNTS)
MODULES = ("_canary_model", "_inplace_model", "_inplace_rule", "_inplace_simulation")
"""The benchmark's modules that results depend on."""


def run(cell: Cell, begin: int, end: int, seed: int) -> list[Outcomes]:
    """Return the outcomes of some runs of a cell, by effect."""
    traffic = cell.traffic
    windows = window_count(traffic.schedule, cell.seconds)
    totals = simulate_windows(traffic, EFFECTS, cell.pods, windows, range(begin, end), seed)
    canary, plan = canary_windows(cell.pods, windows, begin, end), SwitchbackPlan("", traffic.schedule)
    return [decide(totals, index, canary, plan) for index in range(len(EFFECTS))]


def run_cells(workers: Executor, cells: tuple[Cell, ...], runs: int, seed: int) -> Iterator[tuple[Cell, Figures]]:
    """Run cells and return their results, one after the other."""
    jobs = [
        (cell, [workers.submit(run, cell, begin, min(begin + CHUNK, runs), seed) for begin in range(0, runs, CHUNK)])
        for cell in cells
    ]
    for cell, futures in jobs:
        chunks = [future.result() for future in futures]
        yield (
            cell,
            {
                effect: figures(
                    Outcomes(*(np.concatenate(parts) for parts in zip(*(chunk[index] for chunk in chunks), strict=True)))
                )
                for index, effect in enumerate(EFFECTS)
            },
        )


def figures(outcomes: Outcomes) -> dict[str, float]:
    """Return the percentages of the outcomes, and the median minutes of both verdicts; NaN without any."""

    def median(some: Bools) -> float:
        return float(np.median(outcomes.minutes[some])) if some.any() else math.nan

    rolled_back, promoted = 100 * outcomes.rolled_back.mean(), 100 * outcomes.promoted.mean()
    return {
        "runs": float(len(outcomes.minutes)),
        "rollback_pct": float(rolled_back),
        "promote_pct": float(promoted),
        "inconclusive_pct": float(100 - rolled_back - promoted),
        "rollback_min": median(outcomes.rolled_back),
        "promote_min": median(outcomes.promoted),
    }


def summary(results: Mapping[Cell, Figures]) -> dict[str, float]:
    """Return the results by key."""
    counted = [by_effect for cell, by_effect in results.items() if SCENARIOS[cell.scenario].counts]
    base, fast = results[Cell("base", 1.0, 4)], results[Cell("base", 20.0, 4)]
    values = {
        "sim_runs": base[0.0]["runs"],
        "sim_equal_rollback_worst_pct": max(by_effect[0.0]["rollback_pct"] for by_effect in counted),
        "sim_m2_promote_worst_pct": max(by_effect[-0.02]["promote_pct"] for by_effect in counted),
        "sim_m3_rollback_4pods_pct": base[-0.03]["rollback_pct"],
        "sim_equal_undecided_4pods_pct": base[0.0]["inconclusive_pct"],
        "sim_p3_median_4pods_min": base[0.03]["promote_min"],
        "sim_p3_median_20rps_min": fast[0.03]["promote_min"],
    }
    return {key: round(value, 2) for key, value in values.items()}


TABLE_HEAD = "| scenario | requests/s | pods | -3 % | -2 % | equal | +3 % |\n|---|---|---|---|---|---|---|"


def table_row(cell: Cell, by_effect: Figures) -> str:
    """Format a cell as a row: rolled back / promoted in percent, and the median minutes of the right verdict."""
    texts = []
    for effect in EFFECTS:
        values = by_effect[effect]
        minutes = values["rollback_min" if effect < -0.02 else "promote_min"]
        when = "" if math.isnan(minutes) or effect == -0.02 else f", {minutes:.0f} min"
        texts.append(f"{values['rollback_pct']:.1f} / {values['promote_pct']:.1f}{when}")
    return f"| {SCENARIOS[cell.scenario].title} | {cell.rate:g} | {cell.pods} | {' | '.join(texts)} |"
