"""The canary of the fleet simulation: evaluated by the operator's own functions, block by block.

The canary and a fresh control, on spare GPUs or in the places of two replicas, warm up for five minutes, and are compared in
blocks of two minutes until there is a verdict. The day before calibrates the dispersion of blocks and the load curve
(`analysis.baseline`); the day before the run is like its first day.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.criteria import AnalysisGoal, AnalysisPlan
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts, SampleProjection
from aerie.analysis.state import AnalysisState, add_block
from aerie.analysis.verdict import evaluate_analysis
from aerie.engine.speculation import SpeculationSetting, max_speculative_tokens
from aerie.rollout.canary.analysis_run import TRIAL_DEADLINE_FACTOR, build_block_rule
from benchmarks._tuning_fleet_model import Floats, Ints, Rows, disturb, steady
from benchmarks._tuning_fleet_scenarios import TICK, TICKS, World

BLOCK = 120.0
DEADLINE = TRIAL_DEADLINE_FACTOR * 4 * 3600.0
DAY = round(86400 / TICK)
STABLE = 4
"""Pods that remain while two are canary and control."""
PREFILL = 0.05
"""Mean seconds to the first token."""


@dataclass(frozen=True)
class Verdict:
    """The end of a trial."""

    result: str
    minutes: float
    """Minutes since the start of the first block."""


def calibrate(world: World, current: SpeculationSetting, begin: int, random: np.random.Generator) -> BaselineCalibration:
    """Calibrate with the day before a tick, of four pods with the current setting."""
    ticks = np.repeat(np.arange(begin - DAY, begin), 5)[::2]
    ticks = np.where(ticks < 0, ticks + DAY, ticks)
    pods = [_counts(world, current, pod, ticks, random) for pod in range(STABLE)]
    calibration = BaselineCalibration(_make_plan(current, current, "NonInferior", DEADLINE))
    rule = build_block_rule(calibration.plan, 15.0)
    for index, sides in enumerate(zip(*pods, strict=True)):
        counted = {f"pod-{pod}": side.counts for pod, side in enumerate(sides)}
        calibration = calibration.add_block(
            ClosedBlock(index * BLOCK, (index + 1) * BLOCK, None, ArmCounts(STABLE, EngineCounts(), None, counted)), rule
        )
    return calibration


def _make_plan(setting: SpeculationSetting, current: SpeculationSetting, goal: AnalysisGoal, deadline: float) -> AnalysisPlan:
    positions = max(1, min(max_speculative_tokens(setting), max_speculative_tokens(current)))
    return AnalysisPlan(
        goal=goal,
        max_duration_seconds=deadline,
        block_seconds=BLOCK,
        projection=SampleProjection(positions),
        drafts_not_comparable_reason="they draft differently",
    )


def run_trial(
    world: World,
    setting: SpeculationSetting,
    current: SpeculationSetting,
    begin: int,
    random: np.random.Generator,
    explore: float = 0.0,
    keep: Callable[[int], bool] = lambda _: False,
) -> Verdict:
    """Return the verdict on replica 0, whose analysis begins at a tick; replica 1 is the control.

    `explore`: seconds of an exploration, after which the trial ends, unless `keep`, called at every tick, has returned True: then
    it continues as a trial for a change. 0: it is one from the beginning.
    """
    blocks = begin + (np.arange(round(DEADLINE / BLOCK)) * BLOCK / TICK).astype(int)
    blocks = blocks[blocks < TICKS]
    arms = [_counts(world, setting, 0, blocks, random), _counts(world, current, 1, blocks, random)]
    plan = _make_plan(setting, current, "Explore" if explore else "Faster", DEADLINE)
    plan = calibrate(world, current, begin, random).calibrate_plan(plan)
    state = AnalysisState(0.0)
    for index, (canary, control) in enumerate(zip(*arms, strict=True)):
        now = (index + 1) * BLOCK
        state = add_block(state, ClosedBlock(now - BLOCK, now, canary, control), plan)
        if plan.goal == "Explore" and now % TICK < BLOCK and keep(begin + int(now // TICK)):
            plan = replace(plan, goal="Faster")
        state, verdict = evaluate_analysis(state, plan, now)
        if verdict.outcome != "Continue":
            return Verdict(verdict.outcome, now / 60)
        if plan.goal == "Explore" and now >= explore:
            return Verdict("Explored", now / 60)
    return Verdict("Inconclusive", len(blocks) * BLOCK / 60)


def _blocks(world: World, setting: SpeculationSetting, pod: int, ticks: Ints, random: np.random.Generator) -> tuple[Rows, Floats]:
    """Return windows of a block each, and the requests in them."""
    share = world.shares[pod, ticks] / world.shares[:, ticks].sum(axis=0)
    rates = world.rates[ticks] * share
    off = disturb(rates, world.survivals[ticks], BLOCK, random)
    rates = rates * off.work
    rows = steady(world.target, setting, rates, off.survivals, world.slowness[pod, ticks] * off.clock)
    return rows, rates * BLOCK


def _counts(world: World, setting: SpeculationSetting, pod: int, ticks: Ints, random: np.random.Generator) -> list[ArmCounts]:
    rows, requests = _blocks(world, setting, pod, ticks, random)
    waits = PREFILL * np.exp(0.1 * random.standard_normal(len(ticks)))
    arms = []
    for i, arrived in enumerate(requests.tolist()):
        tokens, busy, steps = (float(column[i]) * BLOCK for column in (rows.tokens, rows.running, rows.steps))
        admitted = arrived * (1 - float(rows.full[i]))
        counts = EngineCounts(
            drafts=float(rows.by_tokens[i, 1:].sum()) * BLOCK,
            accepted_tokens=max(0.0, tokens - steps),
            decode_tokens=tokens,
            decode_seconds=busy,
            output_tokens=tokens + admitted,
            finished_requests=admitted,
            first_tokens=admitted,
            first_token_seconds=admitted * float(waits[i]),
            timed_requests=admitted,
            request_steps=steps,
            iterations=float(rows.iterations[i]) * BLOCK,
        )
        arms.append(ArmCounts(1, counts, float(rows.running[i]), queue_growth=arrived - admitted))
    return arms
