"""Published grids as engines: simulated telemetry of them, and the regret of a tuner's choice.

A grid is a table of throughputs by batch and K; a step's time is looked up in it, bilinear between its cells (`StepTimeGrid`
in aerie_lab/engine/performance_model/step.py), so the tuner is not evaluated by its own model. The batches of the windows are
spread evenly over the octaves of the grid, those of a canary too. Assumptions: 3 % noise a window, prefill of 10 us a token,
acceptance lengths as published at every K, with 2 % noise a window, of requests that differ, so that drafts of a larger K
begin at harder positions; graphs are captured up to 512 tokens, vLLM's default in the releases that the grids were taken
with. The engine is otherwise vLLM 0.33, so that it supports schedules.

Choices are evaluated only in the grid's own cells. No rule may choose a cell that is not usable.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from aerie.engine.arguments import EngineArguments
from aerie.engine.metrics.histogram import Histogram
from aerie.engine.metrics.sample import Counters, SpeculationCounters
from aerie.engine.releases import Version
from aerie.engine.speculation import Off, Schedule, ScheduleTier, SpeculationSetting, Static, max_speculative_tokens
from aerie.tuning.decision.candidates import EngineConfig, fits_captured_graphs
from aerie.tuning.decision.forecast import build_forecast
from aerie.tuning.decision.load_distribution import LoadDistribution
from aerie.tuning.decision.policy import TuningPolicy
from aerie.tuning.decision.recommend import decide_setting
from aerie.tuning.decision.types import TuningAction, TuningContext, TuningDecision
from aerie.tuning.telemetry import ReplicaWindow, TuningTelemetry
from aerie_lab.engine.performance_model import step
from aerie_lab.engine.performance_model.acceptance import Acceptance, expected_length, expected_survival

ENGINE = EngineConfig(Version.parse("0.33.0"), EngineArguments(max_cudagraph_capture_size=512))
REPLICAS = 4
_PREFILL = 10e-6
SPREAD = 0.4
"""Standard deviation of a request's effect on the logit of its acceptance; an assumption, as in the simulator."""
_EMPTY = Histogram((0.1, math.inf), (0.0, 0.0), 0.0)


@dataclass(frozen=True)
class Published:
    """One grid."""

    name: str
    batches: tuple[int, ...]
    lengths: dict[int, float]
    """Acceptance length by K."""
    throughput: dict[int, tuple[float | None, ...]]
    step_time: step.StepTimeGrid

    @property
    def tokens(self) -> tuple[int, ...]:
        """The values of K, in ascending order."""
        return tuple(sorted(self.throughput))

    @property
    def start(self) -> int:
        """K = 3, or the K of the grid that is nearest."""
        return min((k for k in self.tokens if k > 0), key=lambda k: abs(k - 3))

    def usable(self, column: int) -> list[int]:
        """Return the K that may be chosen at a batch."""
        return [k for k in self.tokens if self.throughput[k][column] is not None]

    def regret(self, tokens: int, column: int) -> float:
        """Return the throughput lost against the best K of the batch; a missing K is replaced by the nearest one."""
        usable = {k: value for k in self.usable(column) if (value := self.throughput[k][column]) is not None}
        chosen = min(usable, key=lambda k: (abs(k - tokens), k))
        return 1 - usable[chosen] / max(usable.values())

    def seconds(self, batch: float, tokens: int) -> float:
        """Return the seconds of a step at a fractional mean batch."""
        low = math.floor(batch)
        at_low, at_high = (self.step_time.fixed_seconds(whole, tokens) for whole in (low, low + 1))
        return at_low + (batch - low) * (at_high - at_low)


def grids(file: str | None = None) -> list[Published]:
    """Read a file in the format of step_time_grids.json; default: $GRIDS, else the grids of the simulator."""
    chosen = file or os.environ.get("GRIDS")
    path = Path(chosen) if chosen else Path(step.__file__).parent / "step_time_grids.json"
    return [_published(data) for data in json.loads(path.read_text())["grids"]]


def _published(data: dict[str, Any]) -> Published:
    name = str(data.get("title", data["name"]))
    throughput = {int(k): tuple(values) for k, values in data["throughput"].items()}
    grid = step.build_grid(name, data)
    return Published(name, tuple(data["batch"]), dict(grid.acceptance_lengths), throughput, grid)


# --------------------------------------------------------------------------------------------------------------- telemetry
@cache
def _survival(lengths: tuple[tuple[int, float], ...], tokens: int) -> tuple[float, ...]:
    """Return the survival of drafts of `tokens` tokens, for requests that differ, with the published length at each K."""
    conditionals: tuple[float, ...] = ()
    for k, length in sorted(lengths):
        if gap := max(0, k - len(conditionals)):
            low, high = 0.0, 1.0
            for _ in range(40):
                q = (low + high) / 2
                low, high = (
                    (q, high) if expected_length(Acceptance((*conditionals, *[q] * gap), SPREAD), k) < length else (low, q)
                )
            conditionals += (low,) * gap
    return tuple(expected_survival(Acceptance(conditionals, SPREAD), tokens).tolist())


def simulate_window(
    grid: Published, setting: SpeculationSetting, batch: float, seconds: float, random: np.random.Generator
) -> Counters:
    """Simulate a window of one replica."""
    tokens = setting.tokens_at(max(1, round(batch))) if isinstance(setting, Schedule) else max_speculative_tokens(setting)
    prefill = batch * float(random.uniform(0.2, 1.0))
    interval = grid.seconds(batch, tokens) * math.exp(0.03 * random.standard_normal()) + _PREFILL * prefill
    iterations = seconds / interval
    steps = iterations * batch
    speculation = None
    accepted = np.zeros(max_speculative_tokens(setting))
    if max_speculative_tokens(setting):
        survival = np.array(_survival(tuple(grid.lengths.items()), tokens))
        accepted[:tokens] = steps * np.clip(survival * (1 + 0.02 * random.standard_normal()), 0, 1)
        drafts = steps if tokens else 0.0
        speculation = SpeculationCounters(drafts, tokens * drafts, float(accepted.sum()), tuple(accepted.tolist()))
    return Counters(
        generation_tokens=steps + float(accepted.sum()),
        prompt_tokens=prefill * iterations,
        computed_prompt_tokens=prefill * iterations,
        prefix_cache_queries=0.0,
        prefix_cache_hits=0.0,
        preemptions=0.0,
        finished={},
        request_steps=steps,
        step_seconds=steps * interval,
        iterations=iterations,
        queued_requests=0.0,
        queue_seconds=0.0,
        time_to_first_token=_EMPTY,
        time_per_output_token=_EMPTY,
        speculation=speculation,
    )


def record(
    telemetry: TuningTelemetry,
    grid: Published,
    setting: SpeculationSetting,
    replicas: int,
    hours: float,
    start: float,
    random: np.random.Generator,
) -> float:
    """Add windows of a minute to the telemetry; return the end of the last one."""
    octaves = math.log2(grid.batches[-1] / grid.batches[0])
    now = start
    for _ in range(round(60 * hours)):
        now += 60.0
        for replica in range(replicas):
            batch = grid.batches[0] * 2 ** float(random.uniform(0, octaves))
            window = simulate_window(grid, setting, batch, 60.0, random)
            telemetry.add(ReplicaWindow(f"{setting}-{replica}", now, setting, window))
    return now


# ------------------------------------------------------------------------------------------------------------------ choice
@dataclass(frozen=True)
class Chosen:
    """The K that the tuner would run at each batch of the grid, and the canary and decision that led to it."""

    tokens: list[int]
    canary: SpeculationSetting | None
    decision: TuningDecision
    error: float
    """Median relative error of the step times predicted in the grid's cells that run with a captured graph."""


def choose(grid: Published, seed: int, *, canaries: int = 1, hours: float = 2.0) -> Chosen:
    """Choose after `hours` of K = 3 on four replicas, and at most `canaries` canaries of half an hour: explorations or trials, as
    the tuner requests."""
    random = np.random.default_rng(seed)
    telemetry = TuningTelemetry()
    current = Static(grid.start)
    now = record(telemetry, grid, current, REPLICAS, hours, 0.0, random)
    context = TuningContext(ENGINE, current, max(grid.tokens), REPLICAS, now)
    policy = TuningPolicy()
    canary: SpeculationSetting | None = None
    for _ in range(canaries):
        decision = decide_setting(telemetry, context, policy, seed)
        if decision.action not in (TuningAction.EXPLORE, TuningAction.CHANGE) or decision.setting is None:
            break
        canary = _in_grid(decision.setting, grid)
        now = record(telemetry, grid, canary, 1, 0.5, now, random)
        context = replace(context, now=now)
    decision = decide_setting(telemetry, context, policy, seed)
    evidence = decision.evidence
    assert evidence.acceptance is not None, decision.reason
    assert evidence.step_time is not None, decision.reason
    batches = np.array(grid.batches, dtype=float)
    cells = LoadDistribution(batches, np.full(len(batches), 1 / len(batches)))
    forecast = build_forecast(cells, evidence.acceptance, evidence.step_time, max(grid.tokens), np.random.default_rng(seed))
    seconds, cost = forecast.step_seconds.mean(axis=0), forecast.cautious_token_seconds(ENGINE, current)
    chosen, errors = [], []
    for column, batch in enumerate(grid.batches):
        candidates = [k for k in grid.usable(column) if k == 0 or fits_captured_graphs(ENGINE, batch, k)]
        chosen.append(min(candidates, key=lambda k: float(cost[k, column])))
        errors += [abs(float(seconds[k, column]) / grid.step_time.fixed_seconds(batch, k) - 1) for k in candidates]
    return Chosen(chosen, canary, decision, float(np.median(errors)))


def _in_grid(setting: SpeculationSetting, grid: Published) -> SpeculationSetting:
    """Replace each K of the setting by the nearest one of the grid; adaptive verification is not in a grid."""

    def nearest(tokens: int) -> int:
        return min(grid.tokens, key=lambda k: (abs(k - tokens), -k))

    if isinstance(setting, Schedule):
        tiers = tuple(ScheduleTier(tier.first, tier.last, nearest(tier.tokens)) for tier in setting.tiers)
        return Schedule(tiers, max(tier.tokens for tier in tiers))
    tokens = nearest(max_speculative_tokens(setting))
    return Static(tokens) if tokens else Off()
