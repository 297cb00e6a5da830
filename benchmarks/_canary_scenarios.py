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

from aerie.analysis.criteria import AnalysisPlan
from aerie.analysis.measurement.blocks import BlockRule
from aerie.analysis.statistics.calibration import UNCALIBRATED_DISPERSION, DeviationHistory, Dispersion
from benchmarks._canary_blocks import close, per_scrapes, pods_per_block
from benchmarks._canary_model import SCRAPE, Floats, Traffic, simulate
from benchmarks._canary_rules import (
    Decisions,
    argo,
    argo_example,
    flagger,
    flagger_example,
    kayenta,
    matched_block_percent,
    ours,
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
    counts: bool = True
    """Whether the scenario counts for the worst rates; not where the arms are not comparable."""


SCENARIOS = {
    "base": Scenario("base: 1 canary, 3 stable pods, 1 request/s each"),
    "random": Scenario("random routing", Traffic(mix_pod=0.0)),
    "low": Scenario("low traffic, 0.2 request/s on a pod", Traffic(rate=0.2)),
    "sticky": Scenario("sticky tenants, 15 min of memory", Traffic(mix_pod=0.55, memory=900.0)),
    "offsets": Scenario("pods differ permanently, sd 0.5 %", Traffic(offset_sd=0.005)),
    "two": Scenario("2 canaries, 2 control pods", canaries=2, controls=2),
    "pair": Scenario("1 canary, 1 control pod", controls=1, fresh=True),
    "drift": Scenario("load doubles, mix shifts", Traffic(growth=2.0, mix_trend=0.8)),
    "resets": Scenario("each pod restarts every 2 h", Traffic(resets_per_hour=0.5)),
    "lost": Scenario("10 % of scrapes lost", Traffic(lost=0.1)),
    "new": Scenario("no history of stable pods", history=False),
    "aging": Scenario("acceptance falls 6 % with age, fresh control pod", controls=1, fresh=True, aging=0.06),
    "aged": Scenario("the same against stable pods a day old", aging=0.06, counts=False),
}


def run(name: str, runs: int, seed: int = 1) -> Cells:
    """Run all rules and effects in one scenario."""
    scenario = SCENARIOS[name]
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    stable = max(2, 3 if scenario.fresh else scenario.controls)
    # Scrapes are lost, pods restart and load grows only in the rollout.
    before = replace(scenario.traffic, growth=1.0, mix_trend=0.0, resets_per_hour=0.0, lost=0.0)
    dispersions, offsets = _calibrate(before, stable, min(CALIBRATIONS, runs), seed)
    plan = AnalysisPlan(pod_counts=(scenario.canaries, scenario.controls), max_duration_seconds=HORIZON)
    decisions: dict[tuple[str, float], list[Decisions]] = defaultdict(list)
    matches: dict[str, list[float]] = defaultdict(list)
    for begin in range(0, runs, CHUNK):
        chosen = np.arange(begin, min(begin + CHUNK, runs)) % len(dispersions)
        pods = scenario.canaries + scenario.controls
        factors = _factors(scenario, offsets[chosen], random)
        counters = simulate(scenario.traffic, len(chosen), pods, HORIZON, random, factors)
        blocks = close(counters, scenario.canaries, RULE)
        matches["latency_blocks_pct"].append(matched_block_percent(blocks))
        matches["unequal_latency_blocks_pct"].append(matched_block_percent(blocks, UNEQUAL))
        canary, control = per_scrapes(counters.all_drafts, counters.all_accepted, scenario.canaries, round(60 / SCRAPE))
        run_dispersions = [dispersions[index] if scenario.history else UNCALIBRATED_DISPERSION for index in chosen.tolist()]
        for effect in EFFECTS:
            better = canary * (1 + effect)
            decisions["ours", effect].append(ours(blocks, effect, run_dispersions, plan))
            for rule in PEERS:
                decisions[rule.__name__, effect].append(rule(better, control))
    cells = {
        cell: Decisions(*(np.concatenate(parts) for parts in zip(*chunks, strict=True))).figures()
        for cell, chunks in decisions.items()
    }
    cells["ours", 0.0] |= {key: sum(percents) / len(percents) for key, percents in matches.items()}
    return cells


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
    """Draw factors on acceptance lengths by run, pod and scrape interval."""
    runs = len(stable)
    new = 1 + scenario.traffic.offset_sd * random.standard_normal((runs, scenario.canaries + scenario.controls, 1))
    if not scenario.fresh:
        new[:, scenario.canaries :] = stable[:, : scenario.controls]
    if not scenario.aging:
        return new
    hours = np.arange(HORIZON / SCRAPE) * SCRAPE / 3600
    ages = hours + np.where(np.arange(new.shape[1]) < scenario.canaries, 0.0, 0.0 if scenario.fresh else 24.0)[:, None]
    return np.asarray(new * (1 - scenario.aging * (1 - np.exp(-ages / 6))))
