"""The scenarios in which rules are compared, and the run of one: calibration first, then rollouts, then every rule.

A scenario's random numbers are used for all effects and rules, so that they differ in nothing else.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.measurement.blocks import BlockRule
from aerie.analysis.statistics.calibration import UNCALIBRATED_DISPERSION, DeviationHistory, Dispersion
from benchmarks._canary_blocks import close, per_scrapes, pods_per_block
from benchmarks._canary_model import SCRAPE, Floats, Traffic, simulate
from benchmarks._canary_rules import (
    NEVER,
    Decisions,
    argo,
    argo_example,
    flagger,
    flagger_example,
    kayenta,
    matched_block_percent,
    ours,
    ours_after_passing,
    paired_z,
)

EFFECTS = (-0.03, -0.02, 0.0, 0.03, 0.20)
PEERS = (flagger, flagger_example, argo, argo_example, kayenta, paired_z)
RULES = ("ours", *(rule.__name__ for rule in PEERS))
HORIZON = 4 * 3600.0
HISTORY = 24 * 3600.0
CALIBRATIONS = 200  # shared by the runs of a scenario, in turn
CHUNK = 250  # runs at once
RULE = BlockRule()
UNEQUAL = 1.4
"""Requests on a canary pod, as a multiple of a control pod's, at which latencies must not be compared."""

MIN_ANALYSIS_MINUTES = 30.0
"""Minutes after which a canary passes at the earliest (spec.rollout.analysis.minDuration)."""
BECOMES_WORSE = -0.12
"""Tokens per step of a canary after its analysis, relative to the control's, at which it has to be rolled back."""

Cells = dict[tuple[str, float], dict[str, float]]
"""Results by rule and effect."""


@dataclass(frozen=True)
class Scenario:
    """One scenario."""

    title: str
    traffic: Traffic = field(default_factory=Traffic)
    canaries: int = 1
    controls: int = 3
    fresh: bool = False
    """Whether the control pods are as young as the canary; else they are a day old."""
    aging: float = 0.0
    """Share of the acceptance length that a pod loses with its age, times 1 - exp(-age / 6 h)."""
    history: bool = True
    """Whether a day of stable pods calibrates the analysis; else the default dispersion is used."""
    before: Traffic | None = None
    """Traffic of that day; None: that of the rollout."""
    unlike_node_sd: float = 0.0
    """Standard deviation of the canary's factor on acceptance length by its node, which is of another kind than the control's."""
    counts: bool = True
    """Whether the scenario counts for the worst rates; not where the arms are not comparable."""


_RANDOM = Traffic(mix_pod=0.0)
_STICKY, _STICKY_HOUR, _STICKY_FOUR_HOURS = (Traffic(mix_pod=0.55, memory=60.0 * minutes) for minutes in (15, 60, 240))
SCENARIOS = {
    "base": Scenario("base: 1 canary, 3 stable pods, 1 request/s each"),
    "random": Scenario("random routing", _RANDOM),
    "low": Scenario("low traffic, 0.2 request/s on a pod", Traffic(rate=0.2)),
    "sticky": Scenario("sticky tenants, 15 min of memory", _STICKY),
    "offsets": Scenario("pods differ permanently, sd 0.5 %", Traffic(offset_sd=0.005)),
    "two": Scenario("2 canaries, 2 control pods", canaries=2, controls=2),
    "pair": Scenario("1 canary, 1 control pod", controls=1, fresh=True),
    "drift": Scenario("load doubles, mix shifts", Traffic(growth=2.0, mix_trend=0.8)),
    "resets": Scenario("each pod restarts every 2 h", Traffic(resets_per_hour=0.5)),
    "lost": Scenario("10 % of scrapes lost", Traffic(lost=0.1)),
    "sticky60": Scenario("sticky tenants, 60 min of memory", _STICKY_HOUR),
    "sticky240": Scenario("sticky tenants, 4 h of memory", _STICKY_FOUR_HOURS),
    "heavy": Scenario("heavy-tailed lengths of answers (sigma 2)", Traffic(spread=2.0)),
    "bimodal": Scenario("bimodal acceptance (kappa 1.5)", Traffic(kappa=1.5)),
    "new": Scenario("no history of stable pods", history=False),
    "new_offsets1": Scenario("no history, pods differ permanently, sd 1 %", Traffic(offset_sd=0.01), history=False),
    "new_offsets2": Scenario("no history, pods differ permanently, sd 2 %", Traffic(offset_sd=0.02), history=False),
    "new_sticky": Scenario("no history, sticky tenants, 15 min", _STICKY, history=False),
    "new_sticky60": Scenario("no history, sticky tenants, 60 min", _STICKY_HOUR, history=False),
    "new_sticky240": Scenario("no history, sticky tenants, 4 h", _STICKY_FOUR_HOURS, history=False),
    "new_pair": Scenario("no history, 1 canary, 1 control pod", controls=1, fresh=True, history=False),
    "new_pair_sticky60": Scenario(
        "no history, 1 canary, 1 control pod, sticky 60 min", _STICKY_HOUR, controls=1, fresh=True, history=False
    ),
    "unlike_sticky": Scenario("history with random routing, then sticky tenants, 15 min", _STICKY, before=_RANDOM),
    "unlike_sticky60": Scenario("history with random routing, then sticky tenants, 60 min", _STICKY_HOUR, before=_RANDOM),
    "unlike_pair": Scenario(
        "the same with 15 min, 1 canary, 1 control pod, 3 stable pods", _STICKY, controls=1, fresh=True, before=_RANDOM
    ),
    "unlike_requests": Scenario(
        "history of even requests, then heavy-tailed and bimodal ones",
        Traffic(spread=1.8, kappa=1.5, mix_pod=0.4),
        before=Traffic(spread=0.6, kappa=30.0, mix_pod=0.14),
    ),
    "unlike_node": Scenario("canary on an unlike node, sd 1 %, known by its labels", unlike_node_sd=0.01),
    "aging": Scenario("acceptance falls 6 % with age, fresh control pod", controls=1, fresh=True, aging=0.06),
    "aged": Scenario("the same against stable pods a day old", aging=0.06, counts=False),
}


def run(name: str, runs: int, seed: int = 1) -> Cells:
    """Run all rules and effects in one scenario."""
    scenario = SCENARIOS[name]
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    stable = max(2, 3 if scenario.fresh else scenario.controls)
    # Scrapes are lost, pods restart and load grows only in the rollout.
    before = replace(scenario.before or scenario.traffic, growth=1.0, mix_trend=0.0, resets_per_hour=0.0, lost=0.0)
    dispersions, offsets = _calibrate(before, stable, min(CALIBRATIONS, runs), seed)
    plan = AnalysisPlan(
        pod_counts=(scenario.canaries, scenario.controls),
        max_duration_seconds=HORIZON,
        hardware_mismatch="other nodes" if scenario.unlike_node_sd else "",
    )
    decisions: dict[tuple[str, float], list[Decisions]] = defaultdict(list)
    after_passing: dict[tuple[float, float], list[Floats]] = defaultdict(list)
    matches: dict[str, list[float]] = defaultdict(list)
    for begin in range(0, runs, CHUNK):
        chosen = np.arange(begin, min(begin + CHUNK, runs)) % len(dispersions)
        arms = scenario.canaries + scenario.controls
        pods = arms + (stable if scenario.fresh else 0)
        factors = _factors(scenario, offsets[chosen], random)
        counters = simulate(scenario.traffic, len(chosen), pods, HORIZON, random, factors)
        blocks = close(counters, scenario.canaries, scenario.controls, RULE)
        matches["latency_blocks_pct"].append(matched_block_percent(blocks))
        matches["unequal_latency_blocks_pct"].append(matched_block_percent(blocks, UNEQUAL))
        canary, control = per_scrapes(
            counters.all_drafts[:, :arms], counters.all_accepted[:, :arms], scenario.canaries, round(60 / SCRAPE)
        )
        run_dispersions = [dispersions[index] if scenario.history else UNCALIBRATED_DISPERSION for index in chosen.tolist()]
        for effect in EFFECTS:
            better = canary * (1 + effect)
            decisions["ours", effect].append(ours(blocks, effect, run_dispersions, plan))
            promoted, minutes = decisions["ours", effect][-1].promoted, decisions["ours", effect][-1].promote
            passed = np.where(promoted, np.maximum(minutes, MIN_ANALYSIS_MINUTES), NEVER)
            for change in (effect, BECOMES_WORSE):
                after_passing[effect, change].append(ours_after_passing(blocks, passed, change, run_dispersions, plan))
            for rule in PEERS:
                decisions[rule.__name__, effect].append(rule(better, control))
    cells = {
        cell: Decisions(*(np.concatenate(parts) for parts in zip(*chunks, strict=True))).figures()
        for cell, chunks in decisions.items()
    }
    for effect in EFFECTS:
        cells["ours", effect] |= _figures_after_passing(
            np.concatenate(after_passing[effect, effect]),
            np.concatenate(after_passing[effect, BECOMES_WORSE]),
            cells["ours", effect],
        )
    cells["ours", 0.0] |= {key: sum(percents) / len(percents) for key, percents in matches.items()}
    return cells


def _figures_after_passing(unchanged: Floats, worse: Floats, figures: dict[str, float]) -> dict[str, float]:
    """Return how many of all runs are rolled back after they have passed, and of those that passed and became worse, and when."""
    passed_pct, is_rolled_back = figures["promote_pct"], worse < NEVER
    return {
        "passed_rollback_pct": 100 * float((unchanged < NEVER).mean()),
        "worse_after_passing_rollback_pct": 100 * 100 * float(is_rolled_back.mean()) / passed_pct if passed_pct else math.nan,
        "worse_after_passing_rollback_min": float(np.median(worse[is_rolled_back])) if is_rolled_back.any() else math.nan,
    }


@cache
def _calibrate(traffic: Traffic, stable: int, count: int, seed: int) -> tuple[list[Dispersion], Floats]:
    """Return the dispersions of a day of `stable` pods, and their lasting factors; the same for scenarios with equal traffic."""
    random = np.random.default_rng([seed, zlib.crc32(repr((traffic, stable)).encode())])
    offsets = 1 + traffic.offset_sd * random.standard_normal((count, stable, 1))
    dispersions = []
    for begin in range(0, count, 50):
        some = offsets[begin : begin + 50]
        counters = simulate(traffic, len(some), stable, HISTORY, random, some)
        for values in pods_per_block(counters, round(RULE.block_seconds / SCRAPE)).tolist():
            history = DeviationHistory()
            for block in values:
                history = history.add_block({f"pod-{index}": value for index, value in enumerate(block) if not math.isnan(value)})
            dispersions.append(history.estimate_dispersion())
    return dispersions, offsets


def _factors(scenario: Scenario, stable: Floats, random: np.random.Generator) -> Floats:
    """Draw factors on acceptance lengths by run, pod and scrape interval: of canary, control, and stable pods beside it."""
    runs, arms = len(stable), scenario.canaries + scenario.controls
    new = 1 + scenario.traffic.offset_sd * random.standard_normal((runs, arms, 1))
    if scenario.fresh:
        new = np.concatenate([new, stable], axis=1)
    else:
        new[:, scenario.canaries :] = stable[:, : scenario.controls]
    new[:, : scenario.canaries] *= 1 + scenario.unlike_node_sd * random.standard_normal((runs, 1, 1))
    if not scenario.aging:
        return new
    hours = np.arange(HORIZON / SCRAPE) * SCRAPE / 3600
    first_old = arms if scenario.fresh else scenario.canaries
    ages = hours + np.where(np.arange(new.shape[1]) < first_old, 0.0, 24.0)[:, None]
    return np.asarray(new * (1 - scenario.aging * (1 - np.exp(-ages / 6))))
