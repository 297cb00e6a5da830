"""The canary of the fleet simulation: judged by the operator's own functions, block by block.

The canary and a fresh control, on spare GPUs or in the places of two replicas, warm up for five minutes, and are compared in
blocks of two minutes until there is a verdict. How blocks of equal pods scatter, and how time goes with load, is what the day
before it tells (`analysis.memory`); before the run, that was as its first day is going to be.
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
"""Pods that run on while two are canary and control."""
PREFILL = 0.05
"""Mean seconds to the first token."""


@dataclass(frozen=True)
class Verdict:
    """How a trial ended."""

    result: str
    minutes: float
    """From the first block's beginning."""


def remembered(world: World, current: SpeculationSetting, begin: int, random: np.random.Generator) -> BaselineCalibration:
    """What four pods with the current setting have told in the day before a tick."""
    ticks = np.repeat(np.arange(begin - DAY, begin), 5)[::2]
    ticks = np.where(ticks < 0, ticks + DAY, ticks)
    pods = [_counts(world, current, pod, ticks, random) for pod in range(STABLE)]
    found = BaselineCalibration(_terms(current, current, "NonInferior", DEADLINE))
    rule = build_block_rule(found.plan, 15.0)
    for index, sides in enumerate(zip(*pods, strict=True)):
        counted = {f"pod-{pod}": side.counts for pod, side in enumerate(sides)}
        found = found.add_block(
            ClosedBlock(index * BLOCK, (index + 1) * BLOCK, None, ArmCounts(STABLE, EngineCounts(), None, counted)), rule
        )
    return found


def _terms(setting: SpeculationSetting, current: SpeculationSetting, goal: AnalysisGoal, deadline: float) -> AnalysisPlan:
    positions = max(1, min(max_speculative_tokens(setting), max_speculative_tokens(current)))
    return AnalysisPlan(
        goal=goal,
        max_duration_seconds=deadline,
        block_seconds=BLOCK,
        projection=SampleProjection(positions),
        drafts_not_comparable_reason="they draft differently",
    )


def judged(
    world: World,
    setting: SpeculationSetting,
    current: SpeculationSetting,
    begin: int,
    random: np.random.Generator,
    explore: float = 0.0,
    keep: Callable[[int], bool] = lambda _: False,
) -> Verdict:
    """The verdict on replica 0, whose analysis begins at a tick; replica 1 is the control. `explore`: seconds that it is to be
    measured for, and then given up unless `keep`, which is asked at every tick, has said that it is to be proven; 0: that it is
    from the beginning."""
    blocks = begin + (np.arange(round(DEADLINE / BLOCK)) * BLOCK / TICK).astype(int)
    blocks = blocks[blocks < TICKS]
    arms = [_counts(world, setting, 0, blocks, random), _counts(world, current, 1, blocks, random)]
    terms = _terms(setting, current, "Explore" if explore else "Faster", DEADLINE)
    terms = remembered(world, current, begin, random).calibrate_plan(terms)
    state = AnalysisState(0.0)
    for index, (mine, theirs) in enumerate(zip(*arms, strict=True)):
        now = (index + 1) * BLOCK
        state = add_block(state, ClosedBlock(now - BLOCK, now, mine, theirs), terms)
        if terms.goal == "Explore" and now % TICK < BLOCK and keep(begin + int(now // TICK)):
            terms = replace(terms, goal="Faster")
        state, found = evaluate_analysis(state, terms, now)
        if found.outcome != "Continue":
            return Verdict(found.outcome, now / 60)
        if terms.goal == "Explore" and now >= explore:
            return Verdict("Explored", now / 60)
    return Verdict("Inconclusive", len(blocks) * BLOCK / 60)


def _blocks(world: World, setting: SpeculationSetting, pod: int, ticks: Ints, random: np.random.Generator) -> tuple[Rows, Floats]:
    """Windows of a block each, and the requests in them."""
    share = world.shares[pod, ticks] / world.shares[:, ticks].sum(axis=0)
    rates = world.rates[ticks] * share
    off = disturb(rates, world.survivals[ticks], BLOCK, random)
    rates = rates * off.work
    rows = steady(world.target, setting, rates, off.survivals, world.slowness[pod, ticks] * off.clock)
    return rows, rates * BLOCK


def _counts(world: World, setting: SpeculationSetting, pod: int, ticks: Ints, random: np.random.Generator) -> list[ArmCounts]:
    rows, requests = _blocks(world, setting, pod, ticks, random)
    waits = PREFILL * np.exp(0.1 * random.standard_normal(len(ticks)))
    found = []
    for i, asked in enumerate(requests.tolist()):
        tokens, busy, steps = (float(column[i]) * BLOCK for column in (rows.tokens, rows.running, rows.steps))
        came = asked * (1 - float(rows.full[i]))
        counts = EngineCounts(
            drafts=float(rows.by_tokens[i, 1:].sum()) * BLOCK,
            accepted_tokens=max(0.0, tokens - steps),
            decode_tokens=tokens,
            decode_seconds=busy,
            output_tokens=tokens + came,
            finished_requests=came,
            first_tokens=came,
            first_token_seconds=came * float(waits[i]),
            timed_requests=came,
            request_steps=steps,
            iterations=float(rows.iterations[i]) * BLOCK,
        )
        found.append(ArmCounts(1, counts, float(rows.running[i]), queue_growth=asked - came))
    return found
