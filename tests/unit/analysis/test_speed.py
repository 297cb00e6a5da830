"""Trials of a speculation setting: what is faster, what only seems faster, and explorations, which only measure."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from aerie.analysis import equivalence
from aerie.analysis.criteria.criterion import SLOW_TIME_PER_OUTPUT_TOKEN, TIME_PER_OUTPUT_TOKEN, TOKENS_PER_BUSY_SECOND
from aerie.analysis.criteria.plan import AnalysisGoal, AnalysisPlan
from aerie.analysis.criteria.table import build_criteria, failed_requests_alpha
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts, SampleProjection
from aerie.analysis.state import AnalysisState, add_block
from aerie.analysis.verdict import Verdict, evaluate_analysis
from tests.unit.analysis.simulated_blocks import CALM, NEW_STATE, side

TRIAL = "it is a trial of another setting, and what counts is time."
NAMES = (
    TIME_PER_OUTPUT_TOKEN,
    SLOW_TIME_PER_OUTPUT_TOKEN,
    TOKENS_PER_BUSY_SECOND,
    "TimeToFirstToken",
    "FailedRequests",
    "OutputLength",
    "TruncatedRequests",
    "Preemptions",
)


def make_plan(goal: AnalysisGoal, edge: float | None = None) -> AnalysisPlan:
    return AnalysisPlan(
        goal=goal,
        drafts_not_comparable_reason=TRIAL,
        projection=SampleProjection(3, edge),
        dispersions=dict.fromkeys(NAMES, CALM),
    )


def make_arm(noise: np.random.Generator, slower: float, steps: float) -> ArmCounts:
    """Make an arm whose tokens take `slower` times as long each, in `steps` times as many steps of the engine."""
    return side(noise, decode_seconds=slower, request_steps=40_000.0, iterations=8_000.0 * steps)


def run_blocks(blocks: int, plan: AnalysisPlan, slower: float = 1.0, steps: float = 1.0) -> tuple[AnalysisState, Verdict]:
    """Return the state and the verdict after `blocks` blocks, or at the first one that ends the analysis."""
    noise, state = np.random.default_rng(1), NEW_STATE
    verdict = Verdict("Continue", "", ())
    for index in range(1, blocks + 1):
        canary, control = make_arm(noise, slower, steps), make_arm(noise, 1.0, 1.0)
        state = add_block(state, ClosedBlock(120.0 * (index - 1), 120.0 * index, canary, control), plan)
        state, verdict = evaluate_analysis(state, plan, 120.0 * index)
        if verdict.outcome != "Continue":
            break
    return state, verdict


def test_busy_seconds_are_those_of_the_steps() -> None:
    counts = EngineCounts(decode_seconds=80.0, request_steps=4_000.0, iterations=500.0)
    assert counts.busy_seconds == pytest.approx(10.0)
    assert EngineCounts().busy_seconds == 0.0


@pytest.mark.parametrize("goal", ["Faster", "Explore"])
@pytest.mark.parametrize("edge", [None, 0.05])
def test_alphas_of_a_trial_sum_to_at_most_five_percent(goal: AnalysisGoal, edge: float | None) -> None:
    plan = make_plan(goal, edge)
    spent = (
        math.fsum(test.alpha for criterion in build_criteria(plan) for test in criterion.rollback_tests)
        + failed_requests_alpha(plan)
        + equivalence.EQUIVALENCE_ALPHA
    )
    assert spent <= 0.05 + 1e-12


def test_criteria_names_are_unique_with_an_objective() -> None:
    names = [criterion.name for criterion in build_criteria(make_plan("Faster", 0.05))]
    assert names[:3] == [TIME_PER_OUTPUT_TOKEN, SLOW_TIME_PER_OUTPUT_TOKEN, TOKENS_PER_BUSY_SECOND]
    assert len(set(names)) == len(names)


def test_a_faster_setting_is_promoted() -> None:
    _, verdict = run_blocks(60, make_plan("Faster"), slower=0.9, steps=0.9)
    assert verdict.outcome == "Promote"
    assert verdict.message.startswith("Time per output token ")
    assert verdict.message.endswith(f"Tokens per step are not compared: {TRIAL}")


def test_an_equally_fast_setting_is_not_promoted() -> None:
    _, verdict = run_blocks(120, make_plan("Faster"))
    assert verdict.outcome == "Inconclusive"


def test_a_slower_setting_is_rolled_back() -> None:
    _, verdict = run_blocks(60, make_plan("Faster"), slower=1.1)
    assert verdict.outcome == "Rollback"


def test_a_faster_setting_that_keeps_the_engine_busier_is_rolled_back() -> None:
    state, verdict = run_blocks(60, make_plan("Faster"), slower=0.9, steps=1.3)
    assert verdict.outcome == "Rollback"
    assert verdict.message.startswith("Tokens per busy second ")
    (goodput,) = (comparison for comparison in verdict.comparisons if comparison.metric == TOKENS_PER_BUSY_SECOND)
    assert goodput.estimate == pytest.approx(1 / (0.9 * 1.3) - 1, abs=0.02)
    assert state.block_count < 60


def test_an_exploration_is_neither_promoted_nor_held_when_slower() -> None:
    for slower in (0.8, 1.2):
        state, verdict = run_blocks(60, make_plan("Explore"), slower=slower)
        assert (verdict.outcome, state.block_count) == ("Continue", 60)
        assert verdict.message.startswith(
            "Exploration, which is measured and never promoted. After 60 blocks: time per output token "
        )
    _, verdict = run_blocks(60, make_plan("Explore"), slower=2.0)
    assert verdict.outcome == "Rollback"
    _, verdict = run_blocks(1, replace(make_plan("Explore"), max_duration_seconds=60.0))
    assert verdict.outcome == "Inconclusive"
