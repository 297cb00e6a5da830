"""All scenarios of the fleet simulation, their table and their keys.

Canaries run on spare GPUs, as they do by default (`capacity: Surge`); a tenth as many runs do without, in the places of two
replicas (`Reuse`), and make keys of their own.

RUNS: how many runs of a scenario, 50 where it is not set, 0 for none; WORKERS: processes, 2.
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
from benchmarks._tuning_fleet_trial import DEADLINE, judged

RUNS = 50
REUSING = 0.1
"""Share of the runs that are done without spare GPUs too."""
OF_REUSE = ("fleet_mean_regret_pct", "never_worse_pct", "never_worse_than_replaced_pct", "caused_slo_windows")
WORSE = 0.10
"""By how much a planted recommendation is slower, at least."""

Found = dict[str, list[Figures]]


def measure(runs: int | None = None) -> tuple[dict[str, float], list[str]]:
    """Keys, and the lines of the page."""
    runs = int(os.environ.get("RUNS", RUNS)) if runs is None else runs
    workers = int(os.environ.get("WORKERS", 2))
    if runs <= 0:
        return {}, []
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    found: Found = {name: [] for name in SCENARIOS}
    reusing: Found = {name: [] for name in SCENARIOS}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        calibrated = pool.submit(calibration.table)
        jobs = [(name, number, True) for number in range(runs) for name in SCENARIOS]
        jobs += [(name, number, False) for number in range(math.ceil(runs * REUSING)) for name in SCENARIOS]
        for (name, number, surge), figures in zip(jobs, pool.map(_one, jobs), strict=True):
            (found if surge else reusing)[name].append(figures)
            print(f"{name} {number}{'' if surge else ', Reuse'}: {_told(figures)}", flush=True)
        minutes = list(pool.map(planted, range(runs)))
        rows, error = calibrated.result()
    lines = [*table(found), "", *rows]
    print("\n".join(lines), flush=True)
    more = {f"reuse_{name}": value for name, value in keys(reusing, minutes).items() if name in OF_REUSE}
    return {**keys(found, minutes), **more, "fleet_runs": runs, "fleet_window_error_pct": 100 * error}, lines


def _one(job: tuple[str, int, bool]) -> Figures:
    name, number, surge = job
    return run(name, number, surge=surge)


def _told(one: Figures) -> str:
    done = "; ".join(one.trials) or "nothing done"
    return (
        f"regret {100 * one.regret:.1f} %, gain {100 * one.gain:+.1f} % of {100 * one.possible:+.1f} %, worst six hours "
        f"{100 * one.worst:+.1f} % ({100 * one.worst_replaced:+.1f} %), {one.inside} of {one.predictions} intervals right; {done}"
    )


def planted(number: int) -> float:
    """Minutes under analysis until a fixed K that is slower by 10 % or more is rolled back; infinite if it is not, NaN where the
    fleet has no such K."""
    world = draw("stationary", number)
    begin = 6 * HOUR
    ticks = slice(0, 12 * HOUR)
    spent = {}
    for tokens in range(1, MOST + 1):
        rows = steady(world.target, Static(tokens), world.rates[ticks] / REPLICAS, world.survivals[ticks])
        spent[tokens] = float(rows.running.sum() / rows.tokens.sum())
    worse = [k for k in spent if spent[k] >= (1 + WORSE) * spent[3]]
    if not worse:
        return math.nan
    setting = Static(min(worse, key=lambda k: spent[k]))
    random = np.random.default_rng([number, 11])
    verdict = judged(world, setting, world.start, begin, random)
    return verdict.minutes if verdict.result == "Rollback" else math.inf


# --------------------------------------------------------------------------------------------------------------------- keys
def keys(found: Found, minutes: Sequence[float]) -> dict[str, float]:
    """The figures of all scenarios together."""
    every = [one for runs in found.values() for one in runs]
    means = [statistics.fmean(one.regret for one in runs) for runs in found.values()]
    hours = [one.hours for one in every if one.hours is not None]
    asked = [one for one in every if one.hours is not None]
    rolled = [min(one, DEADLINE / 60) for one in minutes if not math.isnan(one)]
    same = found.get("same", [])
    predictions = sum(one.predictions for one in every)
    share = 30 / (DAYS * REPLICAS * max(len(same), 1))
    return {
        "fleet_mean_regret_pct": 100 * statistics.fmean(means),
        "fleet_p95_scenario_regret_pct": 100 * float(np.quantile(means, 0.95)),
        "fleet_p95_run_regret_pct": 100 * float(np.quantile([one.regret for one in every], 0.95)),
        "fleet_mean_gain_pct": 100 * statistics.fmean(one.gain for one in every),
        "aa_false_actions_per_30_replica_days": share * sum(one.changes for one in same),
        "aa_canaries_per_30_replica_days": share * sum(one.explored for one in same),
        "coverage_90_pct": 100 * sum(one.inside for one in every) / max(predictions, 1),
        "never_worse_pct": 100 * statistics.fmean(one.worst <= TOLERATED for one in every),
        "oracle_never_worse_pct": 100 * statistics.fmean(one.worst_possible <= TOLERATED for one in every),
        "never_worse_than_replaced_pct": 100 * statistics.fmean(one.worst_replaced <= TOLERATED for one in every),
        "oracle_never_worse_than_replaced_pct": 100 * statistics.fmean(one.worst_replaced_possible <= TOLERATED for one in every),
        "median_hours_to_right": _median(hours),
        "right_in_the_end_pct": 100 * statistics.fmean(math.isfinite(one) for one in hours) if hours else 100.0,
        "median_canaries_to_right": _median([one.canaries for one in asked]),
        "median_rolls_to_right": _median([one.rolls for one in asked]),
        "rollback_min": _median(rolled),
        "rollback_p95_min": float(np.quantile(rolled, 0.95, method="higher")) if rolled else 0.0,
        "wrong_promotions": float(sum(one.wrong for one in every)),
        "caused_slo_windows": float(sum(one.violations for one in every)),
    }


def _median(values: Sequence[float]) -> float:
    """The upper of two middle ones, so that it is finite or not as most are; 0 without any, and three days for never."""
    found = sorted(values)[len(values) // 2] if values else 0.0
    return found if math.isfinite(found) else 24.0 * DAYS


# -------------------------------------------------------------------------------------------------------------------- table
def table(found: Found) -> list[str]:
    """A row for each scenario."""
    columns = ["scenario", "regret, mean", "p95", "gain", "the oracle's", "intervals right", "never worse"]
    columns += ["never worse than what was replaced", "hours to right", "canaries that change / explore", "promoted (slower)"]
    columns += ["SLO windows"]
    lines = [
        f"| {' | '.join(columns)} |",
        "|---|" + "---:|" * (len(columns) - 1),
    ]
    for name, runs in found.items():
        hours = [one.hours for one in runs if one.hours is not None]
        predictions = sum(one.predictions for one in runs)
        cells = (
            f"{100 * statistics.fmean(one.regret for one in runs):.1f} %",
            f"{100 * float(np.quantile([one.regret for one in runs], 0.95)):.1f} %",
            f"{100 * statistics.fmean(one.gain for one in runs):+.1f} %",
            f"{100 * statistics.fmean(one.possible for one in runs):+.1f} %",
            f"{100 * sum(one.inside for one in runs) / predictions:.0f} %" if predictions else "",
            f"{100 * statistics.fmean(one.worst <= TOLERATED for one in runs):.0f} %",
            f"{100 * statistics.fmean(one.worst_replaced <= TOLERATED for one in runs):.0f} %",
            _hours(hours),
            f"{sum(one.changes for one in runs) / len(runs):.1f} / {sum(one.explored for one in runs) / len(runs):.1f}",
            f"{sum(one.promoted for one in runs)} ({sum(one.wrong for one in runs)})",
            str(sum(one.violations for one in runs)),
        )
        lines.append(f"| {SCENARIOS[name][0]} | {' | '.join(cells)} |")
    return lines


def _hours(hours: Sequence[float]) -> str:
    """The median of the runs in which something had to be done, and in how many of those it was."""
    if not hours:
        return "nothing to do"
    middle = sorted(hours)[len(hours) // 2]
    right = sum(math.isfinite(one) for one in hours)
    return f"{middle:.1f} ({right} of {len(hours)})" if math.isfinite(middle) else f"never ({right} of {len(hours)})"
