"""All scenarios of the fleet simulation, their table and their keys.

Canaries run on spare GPUs, as they do by default (`capacity: Surge`); a tenth as many runs replace two replicas instead
(`Reuse`), with separate keys.

RUNS: runs of each scenario, 50 by default, 0 for none; WORKERS: processes, 2 by default.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from aerie.engine.speculation import Static
from benchmarks import _tuning_fleet_calibration as calibration
from benchmarks._tuning_fleet_figures import TOLERATED, Figures, run
from benchmarks._tuning_fleet_model import MOST, steady
from benchmarks._tuning_fleet_scenarios import DAYS, HOUR, REPLICAS, SCENARIOS, draw
from benchmarks._tuning_fleet_trial import DEADLINE, run_trial

RUNS = 50
REUSING = 0.1
"""Share of the runs that are also made without spare GPUs."""
REUSE_KEYS = ("fleet_mean_regret_pct", "never_worse_pct", "never_worse_than_replaced_pct", "caused_slo_windows")
WORSE = 0.10
"""Least slowdown of a planted recommendation."""

FiguresByScenario = dict[str, list[Figures]]


def measure(runs: int | None = None) -> tuple[dict[str, float], list[str]]:
    """Return the keys, and the lines of the page."""
    runs = int(os.environ.get("RUNS", RUNS)) if runs is None else runs
    workers = int(os.environ.get("WORKERS", 2))
    if runs <= 0:
        return {}, []
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    surge_figures: FiguresByScenario = {name: [] for name in SCENARIOS}
    reuse_figures: FiguresByScenario = {name: [] for name in SCENARIOS}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        calibrated = pool.submit(calibration.table)
        jobs = [(name, number, True) for number in range(runs) for name in SCENARIOS]
        jobs += [(name, number, False) for number in range(math.ceil(runs * REUSING)) for name in SCENARIOS]
        for (name, number, surge), figures in zip(jobs, pool.map(_run_job, jobs), strict=True):
            (surge_figures if surge else reuse_figures)[name].append(figures)
            print(f"{name} {number}{'' if surge else ', Reuse'}: {_format_figures(figures)}", flush=True)
        minutes = list(pool.map(minutes_to_rollback, range(runs)))
        rows, error = calibrated.result()
    lines = [*table(surge_figures), "", *rows]
    print("\n".join(lines), flush=True)
    more = {f"reuse_{name}": value for name, value in keys(reuse_figures, minutes).items() if name in REUSE_KEYS}
    return {**keys(surge_figures, minutes), **more, "fleet_runs": runs, "fleet_window_error_pct": 100 * error}, lines


def _run_job(job: tuple[str, int, bool]) -> Figures:
    name, number, surge = job
    return run(name, number, surge=surge)


def _format_figures(figures: Figures) -> str:
    done = "; ".join(figures.trials) or "nothing done"
    return (
        f"regret {100 * figures.regret:.1f} %, gain {100 * figures.gain:+.1f} % of {100 * figures.possible:+.1f} %, "
        f"worst six hours {100 * figures.worst:+.1f} % ({100 * figures.worst_replaced:+.1f} %), "
        f"{figures.inside} of {figures.predictions} intervals right; {done}"
    )


def minutes_to_rollback(number: int) -> float:
    """Return the minutes of analysis until a fixed K that is slower by 10 % or more is rolled back; infinite if it is not, NaN if
    there is no such K."""
    world = draw("stationary", number)
    begin = 6 * HOUR
    ticks = slice(0, 12 * HOUR)
    seconds = {}
    for tokens in range(1, MOST + 1):
        rows = steady(world.target, Static(tokens), world.rates[ticks] / REPLICAS, world.survivals[ticks])
        seconds[tokens] = float(rows.running.sum() / rows.tokens.sum())
    worse = [k for k in seconds if seconds[k] >= (1 + WORSE) * seconds[3]]
    if not worse:
        return math.nan
    setting = Static(min(worse, key=lambda k: seconds[k]))
    random = np.random.default_rng([number, 11])
    verdict = run_trial(world, setting, world.start, begin, random)
    return verdict.minutes if verdict.result == "Rollback" else math.inf


# --------------------------------------------------------------------------------------------------------------------- keys
def keys(figures_by_scenario: FiguresByScenario, minutes: Sequence[float]) -> dict[str, float]:
    """Compute the keys of all scenarios together."""
    all_figures = [figures for runs in figures_by_scenario.values() for figures in runs]
    means = [statistics.fmean(figures.regret for figures in runs) for runs in figures_by_scenario.values()]
    hours = [figures.hours for figures in all_figures if figures.hours is not None]
    improvable = [figures for figures in all_figures if figures.hours is not None]
    rollback_minutes = [min(duration, DEADLINE / 60) for duration in minutes if not math.isnan(duration)]
    same = figures_by_scenario.get("same", [])
    predictions = sum(figures.predictions for figures in all_figures)
    share = 30 / (DAYS * REPLICAS * max(len(same), 1))
    return {
        "fleet_mean_regret_pct": 100 * statistics.fmean(means),
        "fleet_p95_scenario_regret_pct": 100 * float(np.quantile(means, 0.95)),
        "fleet_p95_run_regret_pct": 100 * float(np.quantile([figures.regret for figures in all_figures], 0.95)),
        "fleet_mean_gain_pct": 100 * statistics.fmean(figures.gain for figures in all_figures),
        "aa_false_actions_per_30_replica_days": share * sum(figures.changes for figures in same),
        "aa_canaries_per_30_replica_days": share * sum(figures.explored for figures in same),
        "coverage_90_pct": 100 * sum(figures.inside for figures in all_figures) / max(predictions, 1),
        "never_worse_pct": 100 * statistics.fmean(figures.worst <= TOLERATED for figures in all_figures),
        "oracle_never_worse_pct": 100 * statistics.fmean(figures.worst_possible <= TOLERATED for figures in all_figures),
        "never_worse_than_replaced_pct": 100 * statistics.fmean(figures.worst_replaced <= TOLERATED for figures in all_figures),
        "oracle_never_worse_than_replaced_pct": 100
        * statistics.fmean(figures.worst_replaced_possible <= TOLERATED for figures in all_figures),
        "median_hours_to_right": _median(hours),
        "right_in_the_end_pct": 100 * statistics.fmean(math.isfinite(duration) for duration in hours) if hours else 100.0,
        "median_canaries_to_right": _median([figures.canaries for figures in improvable]),
        "median_rolls_to_right": _median([figures.rolls for figures in improvable]),
        "rollback_min": _median(rollback_minutes),
        "rollback_p95_min": float(np.quantile(rollback_minutes, 0.95, method="higher")) if rollback_minutes else 0.0,
        "wrong_promotions": float(sum(figures.wrong for figures in all_figures)),
        "caused_slo_windows": float(sum(figures.violations for figures in all_figures)),
    }


def _median(values: Sequence[float]) -> float:
    """Return the median, the upper of two middle values; 0 without values, and three days for an infinite one."""
    median = sorted(values)[len(values) // 2] if values else 0.0
    return median if math.isfinite(median) else 24.0 * DAYS


# -------------------------------------------------------------------------------------------------------------------- table
def table(figures_by_scenario: FiguresByScenario) -> list[str]:
    """Format a row for each scenario."""
    columns = ["scenario", "regret, mean", "p95", "gain", "the oracle's", "intervals right", "never worse"]
    columns += ["never worse than what was replaced", "hours to right", "canaries that change / explore", "promoted (slower)"]
    columns += ["SLO windows"]
    lines = [
        f"| {' | '.join(columns)} |",
        "|---|" + "---:|" * (len(columns) - 1),
    ]
    for name, runs in figures_by_scenario.items():
        hours = [figures.hours for figures in runs if figures.hours is not None]
        predictions = sum(figures.predictions for figures in runs)
        cells = (
            f"{100 * statistics.fmean(figures.regret for figures in runs):.1f} %",
            f"{100 * float(np.quantile([figures.regret for figures in runs], 0.95)):.1f} %",
            f"{100 * statistics.fmean(figures.gain for figures in runs):+.1f} %",
            f"{100 * statistics.fmean(figures.possible for figures in runs):+.1f} %",
            f"{100 * sum(figures.inside for figures in runs) / predictions:.0f} %" if predictions else "",
            f"{100 * statistics.fmean(figures.worst <= TOLERATED for figures in runs):.0f} %",
            f"{100 * statistics.fmean(figures.worst_replaced <= TOLERATED for figures in runs):.0f} %",
            _hours(hours),
            (
                f"{sum(figures.changes for figures in runs) / len(runs):.1f} / "
                f"{sum(figures.explored for figures in runs) / len(runs):.1f}"
            ),
            f"{sum(figures.promoted for figures in runs)} ({sum(figures.wrong for figures in runs)})",
            str(sum(figures.violations for figures in runs)),
        )
        lines.append(f"| {SCENARIOS[name][0]} | {' | '.join(cells)} |")
    return lines


def _hours(hours: Sequence[float]) -> str:
    """Format the median hours of the runs with a better setting, and the number of those that reached it."""
    if not hours:
        return "nothing to do"
    middle = sorted(hours)[len(hours) // 2]
    right = sum(math.isfinite(duration) for duration in hours)
    return f"{middle:.1f} ({right} of {len(hours)})" if math.isfinite(middle) else f"never ({right} of {len(hours)})"
