"""How often a canary gets a wrong verdict, and how long it takes: Aerie's rule and others', on the same simulated rollouts.

| key                        | what is measured                                                                                  |
|----------------------------|---------------------------------------------------------------------------------------------------|
| runs                       | rollouts in each cell: a scenario with an effect                                                  |
| equal_rollback_pct         | base scenario: an equal drafter is rolled back within four hours                                  |
| m3_rollback_pct            | one that is 3 % worse is                                                                          |
| p20_promote_pct, _median_min | one that is 20 % better is promoted, and when, before the soak                                  |
| p3_promote_pct, _median_min | one that is 3 % better                                                                           |
| m2_promote_pct             | one that is worse by just the margin, 2 %, is promoted                                            |
| worst_equal_rollback_pct, worst_m2_promote_pct | the largest of these in any scenario in which the arms are comparable         |
| worst_equal_passed_rollback_pct | an equal one has passed, and is rolled back in the rest of four hours: the largest       |
| latency_blocks_pct         | blocks whose arms met a like load, so latencies are compared; in the scenario with the fewest     |
| unequal_latency_blocks_pct | the same, had the canary's pods 40 % more requests; in the scenario with the most                 |
| block_cost_ms              | a closed block, all criteria counted and evaluated with the message; median, one core             |
| flagger_, argo_, kayenta_  | the first eight for their rules; flagger_example_, argo_example_: with an example of their docs   |

With CELLS=base,sticky in the environment only these scenarios run, without the keys of others; RUNS=400 sets the rollouts in a
cell, and SEED=2 gives other rollouts. Use none of them with SAVE=1.

The model is in _canary_model.py, the scenarios in _canary_scenarios.py, the rules in _canary_rules.py. Seeds are fixed, so the
same version of numpy gives the same results. A run with SAVE=1 writes docs/measurements/canary-decisions.md and
docs/measurements/canary-decisions-scenarios.md.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.table import build_criteria
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts
from aerie.analysis.state import AnalysisState, add_block
from aerie.analysis.statistics.calibration import Dispersion
from aerie.analysis.verdict import evaluate_analysis
from benchmarks._canary_scenarios import BECOMES_WORSE, CALIBRATIONS, EFFECTS, RULES, SCENARIOS, Cells, run

RUNS = 2000
SEED = 1

_cells_by_scenario: dict[str, Cells] = {}
"""The cells of the last run, for its page."""


def measure(runs: int = RUNS) -> dict[str, float]:
    names = [name for name in os.environ.get("CELLS", ",".join(SCENARIOS)).split(",") if name]
    runs = int(os.environ.get("RUNS", runs))
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise SystemExit(f"bench: CELLS has no scenario {', '.join(unknown)}: use some of {', '.join(SCENARIOS)}.")
    milliseconds_per_block = block_cost()
    # Forked workers would inherit numpy's threads in an unknown state.
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as workers:
        jobs = {name: workers.submit(run, name, runs, int(os.environ.get("SEED", SEED))) for name in names}
        for name, job in jobs.items():
            _cells_by_scenario[name] = job.result()
            print(table(name), flush=True)
    ours = _summary("ours") if "base" in names else {"runs": float(runs)}
    comparable = [_cells_by_scenario[name] for name in names if SCENARIOS[name].counts]
    ours["worst_equal_rollback_pct"] = max(cells["ours", 0.0]["rollback_pct"] for cells in comparable)
    ours["worst_m2_promote_pct"] = max(cells["ours", -0.02]["promote_pct"] for cells in comparable)
    ours["worst_equal_passed_rollback_pct"] = max(cells["ours", 0.0]["passed_rollback_pct"] for cells in comparable)
    latency_cells = [cells["ours", 0.0] for cells in _cells_by_scenario.values()]
    ours["latency_blocks_pct"] = min(cell["latency_blocks_pct"] for cell in latency_cells)
    ours["unequal_latency_blocks_pct"] = max(cell["unequal_latency_blocks_pct"] for cell in latency_cells)
    if "base" not in names:
        return {key: round(value, 2) for key, value in ours.items()}
    ours["block_cost_ms"] = milliseconds_per_block
    peers = {f"{rule}_{key}": value for rule in PEERS for key, value in _summary(rule).items()}
    return {key: round(value, 2) for key, value in {**ours, **peers}.items()}


PEERS = ("flagger", "flagger_example", "argo", "argo_example", "kayenta")


def _summary(rule: str) -> dict[str, float]:
    base = {effect: _cells_by_scenario["base"][rule, effect] for effect in EFFECTS}
    return {
        "runs": base[0.0]["runs"],
        "equal_rollback_pct": base[0.0]["rollback_pct"],
        "m3_rollback_pct": base[-0.03]["rollback_pct"],
        "p20_promote_pct": base[0.20]["promote_pct"],
        "p20_median_min": base[0.20]["promote_min"],
        "p3_promote_pct": base[0.03]["promote_pct"],
        "p3_median_min": base[0.03]["promote_min"],
        "m2_promote_pct": base[-0.02]["promote_pct"],
    }


def block_cost(blocks: int = 100, repeats: int = 10) -> float:
    """Return the milliseconds to count and evaluate one block without a verdict, with all criteria and the whole message."""
    plan = AnalysisPlan(
        max_duration_seconds=1e9,
        dispersions={row.name: Dispersion(1.7, 0.002, 20.0, 0.001, batch_count=24) for row in build_criteria(AnalysisPlan())},
    )
    random = np.random.default_rng(SEED)
    milliseconds = []
    for _ in range(repeats):
        state = AnalysisState(0.0)
        for index, swings in enumerate(random.normal(1, 0.05, (blocks, 2, 3)).tolist(), 1):
            canary, control = (_side(*swing) for swing in swings)
            began = time.perf_counter()
            state = add_block(state, ClosedBlock(0.0, 120.0 * index, canary, control), plan)
            evaluate_analysis(state, plan, 120.0 * index)
            milliseconds.append(1000 * (time.perf_counter() - began))
    return statistics.median(milliseconds)


def _side(accepted: float, output: float, first: float) -> ArmCounts:
    """Make the counts of a pod's two minutes, with these factors."""
    counts = EngineCounts(
        drafts=40_000.0,
        accepted_tokens=58_000.0 * accepted,
        decode_tokens=98_000.0,
        request_steps=40_000.0 / accepted,
        decode_seconds=800.0 * output,
        output_tokens=98_000.0,
        finished_requests=120.0,
        first_tokens=120.0,
        first_token_seconds=12.0 * first,
        timed_requests=120.0,
    )
    return ArmCounts(1, counts, 5.0)


# --------------------------------------------------------------------------------------------------------------------- page
_NAMES = {
    "ours": "**Aerie**",
    "flagger": "Flagger, ten checks",
    "flagger_example": "Flagger, its tutorial's five",
    "argo": "Argo Rollouts, ten checks",
    "argo_example": "Argo Rollouts, its docs' five",
    "kayenta": "Kayenta",
    "paired_z": "paired z",
}


def table(name: str) -> str:
    """Format a scenario as a table: rolled back / promoted in percent, and the median minutes of the right outcome."""
    heads = [f"{100 * effect:+g} %" if effect else "equal" for effect in EFFECTS]
    rows = [f"### {SCENARIOS[name].title}", "", f"| rule | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for rule in RULES:
        cells = [_cell(_cells_by_scenario[name][rule, effect], effect) for effect in EFFECTS]
        rows += [f"| {_NAMES[rule]} | {' | '.join(cells)} |"]
    return "\n".join([*rows, ""])


def _cell(figures: dict[str, float], effect: float) -> str:
    minutes = figures["rollback_min" if effect < -0.02 else "promote_min"]
    when = "" if math.isnan(minutes) or effect == -0.02 else f", {minutes:.0f} min"
    return f"{figures['rollback_pct']:.1f} / {figures['promote_pct']:.1f}{when}"


def document(docs: Path) -> None:
    """Write the two pages of the last run: method and summary, and the tables of all other scenarios."""
    if missing := SCENARIOS.keys() - _cells_by_scenario.keys():
        raise SystemExit(f"bench: the page needs all scenarios, and {', '.join(sorted(missing))} did not run: leave CELLS out.")
    runs = int(_cells_by_scenario["base"]["ours", 0.0]["runs"])
    values = {
        "runs": runs,
        "seed": SEED,
        "histories": min(CALIBRATIONS, runs),
        "base": table("base"),
        "summary": summary_table(),
        "tables": "\n".join(table(name) for name in SCENARIOS if name != "base"),
        "other_rates": other_rates_table(),
        "worse": -100 * BECOMES_WORSE,
        "aged": SCENARIOS["aged"].title,
    }
    for name, page in (("canary-decisions.md", _PAGE), ("canary-decisions-scenarios.md", _SCENARIOS_PAGE)):
        (docs / name).write_text(page.format(**values).rstrip() + "\n")


def summary_table() -> str:
    """Format Aerie's errors and right outcomes in each scenario, in percent, with the median minutes of the latter."""
    rows = [
        "| scenario | equal, rolled back | -2 %, promoted | -3 %, rolled back | equal, promoted | +3 %, promoted |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, scenario in SCENARIOS.items():
        cells = {effect: _cells_by_scenario[name]["ours", effect] for effect in EFFECTS}
        values = (
            f"{cells[0.0]['rollback_pct']:.1f}",
            f"{cells[-0.02]['promote_pct']:.1f}",
            _rate(cells[-0.03], "rollback"),
            _rate(cells[0.0], "promote"),
            _rate(cells[0.03], "promote"),
        )
        rows.append(f"| {scenario.title} | {' | '.join(values)} |")
    return "\n".join(rows)


def other_rates_table() -> str:
    """Format the blocks that count for latency in each scenario, and Aerie's rollbacks after a pass, in percent."""
    rows = [
        "| scenario | blocks that count | with 40 % more requests | equal, rolled back later | becomes worse, rolled back |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, scenario in SCENARIOS.items():
        equal, better = (_cells_by_scenario[name]["ours", effect] for effect in (0.0, 0.03))
        values = [f"{equal['latency_blocks_pct']:.1f}", f"{equal['unequal_latency_blocks_pct']:.1f}"]
        if better["promote_pct"]:
            minutes = better["worse_after_passing_rollback_min"]
            worse = f"{better['worse_after_passing_rollback_pct']:.0f}, {minutes:.0f} min"
            values += [f"{equal['passed_rollback_pct']:.2f}", worse]
        else:
            values += ["none passed", "none passed"]
        rows.append(f"| {scenario.title} | {' | '.join(values)} |")
    return "\n".join(rows)


def _rate(cell: dict[str, float], outcome: str) -> str:
    minutes = cell[f"{outcome}_min"]
    return f"{cell[f'{outcome}_pct']:.1f}" + ("" if math.isnan(minutes) else f", {minutes:.0f} min")


_PAGE = """# Error rates of canary decisions

This page shows how often a canary decides wrongly, and how long it takes: Aerie's, and those of three other tools. It is for
those who decide whether a tool may promote drafters automatically.

`make bench NAME=canary SAVE=1` writes this page and [the tables of all scenarios](canary-decisions-scenarios.md). Each cell has
{runs} simulated rollouts of up to four hours, seed {seed}.

## How to read the tables

The rules of Aerie and of the other tools evaluate the same traffic. The drafters are of five kinds: worse by 3 %, worse by
exactly the margin of 2 %, equal, better by 3 %, and better by 20 %. A cell shows the percentages that were rolled back /
promoted. The rest was inconclusive after four hours. The minutes are the median of the right outcome: a rollback at -3 %, a
promotion from equal on.

Two outcomes are errors. At -2 % it is a promotion, which the level of 5 % limits. At "equal" it is a rollback.

## By simulation

{base}
### Aerie in all scenarios

All values are percent of the rollouts. The first two columns are errors.

{summary}

In "{aged}" the arms differ by age.
No rule can distinguish that from the drafter, because acceptance that drops with a pod's age makes every fresh canary appear
better. That is the purpose of `control: Fresh`.

## Assumptions

The model is `benchmarks/_canary_model.py`. Its constants are assumptions; a fleet with another correlation time gives other
results.

**Requests.** K is 3, and a scrape follows every 15 s. Requests are of two classes with different acceptance. Their mix drifts on
all pods together and on each pod. A request has a number of tokens, and the number of drafts follows from its acceptance. So
requests with low acceptance have more of the drafts than of the tokens. A better drafter makes fewer drafts for the same tokens.

**Calibration.** Before each rollout there is a [day of stable pods](../concepts/calibration.md#calibration-on-stable-pods) with
the same kind of traffic, unless the title says otherwise. The rollouts of a scenario share {histories} such days.

**Latency.** It is not simulated: every criterion but tokens per step passes, and the minimum duration is over. So in practice a
promotion takes 30 minutes or more.

**Load match.** The blocks that would count for latency are simulated: those in which the loads of the arms match.

* The load is the number of requests that began on a pod. It is never the number in flight, because a faster canary has fewer in
  flight. Where a balancer routes by fewest requests, arms that match in flight count as matched.
* The latest requests are taken together, as many as distinguish a difference of 20 % from chance. On two pods these are 900,
  about four minutes at one request a second on each. So chance excludes no blocks, and few requests hide no permanent
  difference.
* A [table](canary-decisions-scenarios.md#blocks-that-count-and-rollbacks-after-a-pass) shows how many blocks count. It also shows
  how many would if the canary's pods had 40 % more requests than the control's. These are the first minutes, until the difference
  shows. Their counts are then discarded.

**Acceptance length.** No answer is truncated here. So tokens per step, which decide in Aerie, and acceptance length, which the
other tools' queries request, are the same. In vLLM's counters, acceptance length favours the better arm
([why](../concepts/compared-metrics.md#tokens-per-step-and-acceptance-length)).

## The other tools

Their rules are simulated (`benchmarks/_canary_rules.py`), not their programs. The rules were read in the sources of Flagger
1.36.1 and Argo Rollouts 1.10.1. These tools compare a value with a number. In their favour, the ratio of two arms over
undisturbed minutes takes the place of that number.

The number of checks that a user configures determines how often an equal drafter is rolled back. It also determines how often a
worse drafter passes. So each tool has two rows, both with a check a minute and the threshold canary >= 0.98 * stable.

The second row is from its own docs: Flagger's `tutorials/gatewayapi-progressive-delivery.md`, and Argo's
`docs/features/analysis.md`. Of the latter it takes the example with `count`, and the `failureLimit` of that page's template.

| row | settings | promoted | rolled back |
|---|---|---|---|
| Flagger, ten checks | `stepWeight: 5`, `maxWeight: 50`, `threshold: 5` | at the tenth passed check | at the fifth failed one |
| Flagger, its tutorial's five | `stepWeight: 10`, `maxWeight: 50`, `threshold: 5` | at the fifth passed check | likewise |
| Argo Rollouts, ten checks | `count: 10`, `failureLimit: 3` | after ten checks of any outcome | at the fourth failed one |
| Argo Rollouts, its docs' five | `count: 5`, `failureLimit: 3` | after five | likewise |

### Runs of the tools' own programs

Once, in November 2026, Argo Rollouts 1.10.1 and Flagger 1.36.1 ran by their own binaries in the lab, beside Aerie at commit
a00cabd. The engines were simulated, at four times real time. A check followed each 15 s, with the settings for ten checks. These
are too few runs for rates:

| | Argo Rollouts | Flagger |
|---|---|---|
| equal drafter, traffic as here | 4 of 4 rolled back | not run |
| equal drafter, HTTP through a gateway | 1 of 1 rolled back | 1 of 1 promoted, with 4 of 5 failures |
| 5 % worse, traffic as here | 1 of 1 rolled back | not run |
| 9 % better | 2 of 2 promoted | 1 of 1 promoted |
| no request at all | rolled back after 85 s: NaN is a failed measurement | rolled back after 95 s: no values |

Aerie had one control pod and no calibration there. On three equal drafters it had no verdict after 30, 30 and 50 blocks. The
bounds were about -10 to +13 %, and -6 to +4 % after 50 blocks. Kayenta was not run.
"""

_SCENARIOS_PAGE = """# Canary decisions by scenario

Look up here the error rates of every rule in the simulated scenario that is most like your traffic. [Error rates of canary
decisions](canary-decisions.md) explains the columns and the assumptions, and has the scenario `base`.

## Error rates

{tables}
## Blocks that count, and rollbacks after a pass

All values are percent. The first two columns are the blocks that count for latency: in the scenario, and if the canary's pods had
40 % more requests. The third column is the share of all rollouts in which an equal drafter passes and is rolled back later.

The last column is about drafters that were better by 3 % and become worse than the control by {worse:.0f} %. It has the share of
those that passed and are rolled back, and the median time until then.

{other_rates}
"""
