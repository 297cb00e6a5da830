"""Trials of a speculation setting: what is faster, what only seems so, and what is only to be measured."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from aerie.analysis import equivalence
from aerie.analysis.criteria import (
    SLOW_TIME_PER_OUTPUT_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    TOKENS_PER_BUSY_SECOND,
    AnalysisGoal,
    AnalysisPlan,
    build_criteria,
    failed_requests_alpha,
)
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts, SampleProjection
from aerie.analysis.state import AnalysisState, add_block
from aerie.analysis.verdict import Verdict, evaluate_analysis
from tests.unit.analysis.test_verdict import CALM, side

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


def terms(goal: AnalysisGoal, edge: float | None = None) -> AnalysisPlan:
    return AnalysisPlan(
        goal=goal,
        drafts_not_comparable_reason=TRIAL,
        projection=SampleProjection(3, edge),
        dispersions=dict.fromkeys(NAMES, CALM),
    )


def arm(noise: np.random.Generator, slower: float, steps: float) -> ArmCounts:
    """Tokens take so much longer each, and so many times as many steps of the engine are made for them."""
    return side(noise, decode_seconds=slower, request_steps=40_000.0, iterations=8_000.0 * steps)


def after(blocks: int, given: AnalysisPlan, slower: float = 1.0, steps: float = 1.0) -> tuple[AnalysisState, Verdict]:
    """The judgement after so many blocks, or at the first verdict."""
    noise, state = np.random.default_rng(1), AnalysisState(0.0)
    judgement = Verdict("Continue", "", ())
    for index in range(1, blocks + 1):
        canary, control = arm(noise, slower, steps), arm(noise, 1.0, 1.0)
        state = add_block(state, ClosedBlock(120.0 * (index - 1), 120.0 * index, canary, control), given)
        state, judgement = evaluate_analysis(state, given, 120.0 * index)
        if judgement.outcome != "Continue":
            break
    return state, judgement


def test_busy_time_is_that_of_the_steps() -> None:
    counts = EngineCounts(decode_seconds=80.0, request_steps=4_000.0, iterations=500.0)
    assert counts.busy_seconds == pytest.approx(10.0)
    assert EngineCounts().busy_seconds == 0.0


@pytest.mark.parametrize("goal", ["Faster", "Explore"])
@pytest.mark.parametrize("edge", [None, 0.05])
def test_alphas_of_a_trial_add_up_to_no_more_than_those_of_other_rollouts(goal: AnalysisGoal, edge: float | None) -> None:
    given = terms(goal, edge)
    spent = (
        math.fsum(test.alpha for one in build_criteria(given) for test in one.rollback_tests)
        + failed_requests_alpha(given)
        + equivalence.EQUIVALENCE_ALPHA
    )
    assert spent <= 0.05 + 1e-12


def test_names_differ_also_with_an_objective() -> None:
    names = [one.name for one in build_criteria(terms("Faster", 0.05))]
    assert names[:3] == [TIME_PER_OUTPUT_TOKEN, SLOW_TIME_PER_OUTPUT_TOKEN, TOKENS_PER_BUSY_SECOND]
    assert len(set(names)) == len(names)


def test_a_faster_setting_is_accepted() -> None:
    _, judgement = after(60, terms("Faster"), slower=0.9, steps=0.9)
    assert judgement.outcome == "Promote"
    assert judgement.message.startswith("Time per output token ")
    assert judgement.message.endswith(f"Tokens per step are not compared: {TRIAL}")


def test_one_that_is_no_faster_never_is() -> None:
    _, judgement = after(120, terms("Faster"))
    assert judgement.outcome == "Inconclusive"


def test_a_slower_one_is_rolled_back() -> None:
    _, judgement = after(60, terms("Faster"), slower=1.1)
    assert judgement.outcome == "Rollback"


def test_one_that_is_faster_for_each_and_keeps_the_engine_busier_is_rolled_back() -> None:
    state, judgement = after(60, terms("Faster"), slower=0.9, steps=1.3)
    assert judgement.outcome == "Rollback"
    assert judgement.message.startswith("Tokens per busy second ")
    (goodput,) = (one for one in judgement.comparisons if one.metric == TOKENS_PER_BUSY_SECOND)
    assert goodput.estimate == pytest.approx(1 / (0.9 * 1.3) - 1, abs=0.02)
    assert state.block_count < 60


def test_one_that_is_to_be_measured_is_neither_accepted_nor_held_for_being_slower() -> None:
    for slower in (0.8, 1.2):
        state, judgement = after(60, terms("Explore"), slower=slower)
        assert (judgement.outcome, state.block_count) == ("Continue", 60)
        assert judgement.message.startswith(
            "Exploration, which is measured and never promoted. After 60 blocks: time per output token "
        )
    _, judgement = after(60, terms("Explore"), slower=2.0)
    assert judgement.outcome == "Rollback"
    _, judgement = after(1, replace(terms("Explore"), max_duration_seconds=60.0))
    assert judgement.outcome == "Inconclusive"
