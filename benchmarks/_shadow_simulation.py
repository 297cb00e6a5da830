"""The cells in which shadow evaluations are simulated, the run of a cell, and the table of results.

All effects of a cell are evaluated on the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from aerie.analysis.paired.plan import MIN_ACCEPTANCE_SECONDS, PairedPlan
from benchmarks._cell_file import Figures
from benchmarks._shadow_model import TEMPERATURES, ShadowTraffic
from benchmarks._shadow_rule import Outcomes, decide

EFFECTS = (-0.03, -0.02, 0.0, 0.03)
PLAN = PairedPlan(min_acceptance_seconds=MIN_ACCEPTANCE_SECONDS)
CHUNK = 100
"""Runs of a cell at once."""
MODULES = ("_canary_model", "_shadow_model", "_shadow_rule", "_shadow_simulation")
"""The benchmark's modules that results depend on."""


@dataclass(frozen=True)
class Cell:
    """A source of requests, with tenants and temperatures."""

    rate: float
    """Mirrored requests per second and pod; 0 for prompts of a file."""
    mixed: bool
    """True for mixed temperatures, False for temperature 0."""
    tenants: int = 0
    prompts: int = 0
    """Prompts of the file."""
    shares_processors: bool = False

    @property
    def traffic(self) -> ShadowTraffic:
        temperatures = tuple(range(len(TEMPERATURES))) if self.mixed else (0,)
        return ShadowTraffic(self.rate, self.tenants, temperatures, self.prompts, self.shares_processors)

    @property
    def counts(self) -> bool:
        """Whether the cell counts for the worst rates; not where it has too few clusters."""
        return self.tenants != FEW_TENANTS and self.prompts != FEW_PROMPTS

    @property
    def title(self) -> str:
        tenants = f"file of {self.prompts} prompts" if self.prompts else f"{self.tenants} tenants" if self.tenants else "random"
        temperatures = "mixed temperatures" if self.mixed else "temperature 0"
        return f"{tenants}, {temperatures}{', shared processors' if self.shares_processors else ''}"


FEW_TENANTS, MANY_TENANTS, FEW_PROMPTS, MANY_PROMPTS = 5, 200, 1000, 3000
CELLS = (
    *(Cell(rate, mixed, tenants) for rate in (0.2, 1.0, 20.0) for tenants in (0, MANY_TENANTS) for mixed in (False, True)),
    *(Cell(0.0, mixed, prompts=MANY_PROMPTS) for mixed in (False, True)),
    Cell(1.0, mixed=False, tenants=FEW_TENANTS),
    Cell(0.0, mixed=False, prompts=FEW_PROMPTS),
    *(Cell(rate, mixed=False, shares_processors=True) for rate in (0.2, 1.0)),
    Cell(0.0, mixed=False, prompts=MANY_PROMPTS, shares_processors=True),
)


def run(cell: Cell, begin: int, end: int, seed: int) -> list[Outcomes]:
    """Return the outcomes of some runs of a cell, by effect."""
    random = np.random.default_rng((seed, CELLS.index(cell), begin))
    return decide(cell.traffic, EFFECTS, PLAN, end - begin, random)


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
    """Return the percentages of the outcomes, and the medians of minutes and pairs until them; NaN without any."""
    values = {"runs": float(len(outcomes.minutes)), "undecided_pct": 100.0}
    for name, decided in (("rollback", outcomes.rolled_back), ("promote", outcomes.promoted)):
        values[f"{name}_pct"] = float(100 * decided.mean())
        values["undecided_pct"] -= values[f"{name}_pct"]
        values[f"{name}_min"] = float(np.median(outcomes.minutes[decided])) if decided.any() else math.nan
        values[f"{name}_pairs"] = float(np.median(outcomes.pairs[decided])) if decided.any() else math.nan
    return values


def summary(results: Mapping[Cell, Figures]) -> dict[str, float]:
    """Return the results by key. Medians are those of the slowest cell of their rate."""
    counted = {cell: by_effect for cell, by_effect in results.items() if cell.counts}

    def slowest(rate: float, effect: float) -> float:
        return max(by_effect[effect]["promote_min"] for cell, by_effect in counted.items() if cell.rate == rate)

    values = {
        "runs": min(by_effect[0.0]["runs"] for by_effect in counted.values()),
        "equal_undecided_worst_pct": max(by_effect[0.0]["undecided_pct"] for by_effect in counted.values()),
        "aa_rollback_worst_pct": max(by_effect[0.0]["rollback_pct"] for by_effect in counted.values()),
        "m3_rollback_worst_pct": min(by_effect[-0.03]["rollback_pct"] for by_effect in counted.values()),
        "m2_promote_worst_pct": max(by_effect[-0.02]["promote_pct"] for by_effect in counted.values()),
        "p3_median_base_min": slowest(1.0, 0.03),
        "p3_median_low_min": slowest(0.2, 0.03),
        "p3_median_prompts_min": slowest(0.0, 0.03),
        "equal_median_base_min": slowest(1.0, 0.0),
    }
    return {key: round(value, 2) for key, value in values.items()}


TABLE_HEAD = "| requests | requests/s | -3 % | -2 % | equal | +3 % |\n|---|---|---|---|---|---|"


def table_row(cell: Cell, by_effect: Figures) -> str:
    """Format a cell as a row: rolled back / promoted in percent, and the median minutes and pairs of the right verdict."""
    texts = []
    for effect in EFFECTS:
        values = by_effect[effect]
        verdict = "rollback" if effect < -0.02 else "promote"
        minutes, pairs = values[f"{verdict}_min"], values[f"{verdict}_pairs"]
        when = "" if math.isnan(minutes) or effect == -0.02 else f", {minutes:.1f} min, {pairs:.0f} pairs"
        texts.append(f"{values['rollback_pct']:.1f} / {values['promote_pct']:.1f}{when}")
    return f"| {cell.title} | {f'{cell.rate:g}' if cell.rate else 'any'} | {' | '.join(texts)} |"
