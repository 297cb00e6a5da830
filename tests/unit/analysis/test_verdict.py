"""Verdicts: what promotes, what rolls back, and what never does either."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.analysis import equivalence
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.table import build_criteria, crashes_alpha, failed_requests_alpha
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts, SampleProjection
from aerie.analysis.state import AnalysisState, add_block
from aerie.analysis.verdict import check_guardrails, evaluate_analysis
from tests.golden import Messages
from tests.unit.analysis.simulated_blocks import ADAPTIVE, NEW_STATE, PLAN, run_blocks, side


def test_a_better_canary_is_promoted_after_the_soak(messages: Messages) -> None:
    state, verdict = run_blocks(14, accepted_tokens=1.2)
    assert verdict.outcome == "Continue"
    messages.check("every criterion passes before the minimum duration", verdict.message)
    state, verdict = run_blocks(120, accepted_tokens=1.2)
    assert (verdict.outcome, state.block_count) == ("Promote", 15)
    messages.check("promoted", verdict.message)


def test_a_worse_canary_is_rolled_back_without_a_soak(messages: Messages) -> None:
    state, verdict = run_blocks(120, accepted_tokens=0.9)
    assert verdict.outcome == "Rollback"
    assert state.block_count == PLAN.min_blocks
    messages.check("worse", verdict.message)


def test_an_equal_canary_is_promoted_as_noninferior_but_not_superior(messages: Messages) -> None:
    assert run_blocks(120)[1].outcome == "Promote"
    superior = replace(PLAN, goal="Superior")
    state, verdict = run_blocks(130, superior)
    assert (verdict.outcome, state.block_count) == ("Inconclusive", 120)
    messages.check("equal, goal Superior", verdict.message)
    assert run_blocks(130, superior, accepted_tokens=1.03)[1].outcome == "Promote"


@pytest.mark.parametrize(
    ("harm", "change"),
    [
        ("slower", {"decode_seconds": 1.1}),
        ("later first tokens", {"first_token_seconds": 1.4}),
        ("failed requests", {"failed_requests": 4.0}),
        ("longer outputs", {"output_tokens": 1.3}),
        ("shorter outputs", {"output_tokens": 0.7}),
        ("truncated requests", {"truncated_requests": 1.5}),
        ("preemptions", {"preemptions": 240.0}),
        ("abandoned requests", {"abandoned_requests": 24.0}),
    ],
)
def test_any_other_harm_rolls_back_too(harm: str, change: dict[str, float], messages: Messages) -> None:
    _, verdict = run_blocks(120, PLAN, 1, accepted_tokens=1.2, **change)
    assert verdict.outcome == "Rollback"
    messages.check(f"harm: {harm}", verdict.message)


def test_objectives_are_evaluated_by_the_share_beyond_them(messages: Messages) -> None:
    plan = replace(
        PLAN, projection=SampleProjection(draft_positions=3, time_per_output_token_edge=0.05, time_to_first_token_edge=1.0)
    )
    assert run_blocks(120, plan)[1].outcome == "Promote"
    _, verdict = run_blocks(120, plan, slow_output_requests=3.0)
    assert verdict.outcome == "Rollback"
    messages.check("objective for time per output token", verdict.message)
    messages.check("objective for time to first token", run_blocks(120, plan, slow_first_token_requests=3.0)[1].message)


def test_a_verdict_is_final() -> None:
    state, verdict = run_blocks(120, accepted_tokens=0.9)
    for _ in range(50):
        state = add_block(state, ClosedBlock(0.0, 120.0, side(accepted_tokens=2.0), side()), PLAN)
    assert evaluate_analysis(state, PLAN, 1e6, ["whatever"])[1].message == verdict.message


def test_guardrails_roll_back_but_never_promote(messages: Messages) -> None:
    noise, state = np.random.default_rng(1), NEW_STATE
    verdict = check_guardrails(state, PLAN, 0.0)[1]
    for index in range(1, 121):
        state = add_block(state, ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise), side(noise)), PLAN)
        state, verdict = check_guardrails(state, PLAN, 120.0 * index)
        assert verdict.outcome == "Continue"
    messages.check("no regression", verdict.message)
    for index in range(121, 240):
        state = add_block(state, ClosedBlock(0.0, 120.0 * index, side(noise, accepted_tokens=0.8), side(noise)), PLAN)
    state, verdict = check_guardrails(state, PLAN, 30_000.0)
    assert verdict.outcome == "Rollback"
    assert check_guardrails(state, PLAN, 40_000.0)[1] == verdict
    assert check_guardrails(NEW_STATE, PLAN, 1.0, ["It crashes."])[1].message == "It crashes."


numbers = st.integers(0, 10**6).map(float)
sides = st.none() | st.builds(
    ArmCounts,
    st.integers(1, 3),
    st.builds(EngineCounts, *[numbers] * 15),
    st.none() | st.floats(0, 100),
)


@settings(deadline=None)
@given(st.lists(st.tuples(sides, sides), max_size=12), st.booleans())
def test_any_counts_give_a_verdict_and_a_sentence(
    blocks: list[tuple[ArmCounts | None, ArmCounts | None]], calibrated: bool
) -> None:
    plan = PLAN if calibrated else AnalysisPlan()
    state = NEW_STATE
    for index, (canary, control) in enumerate(blocks, 1):
        state = add_block(state, ClosedBlock(0.0, 120.0 * index, canary, control), plan)
        state, verdict = evaluate_analysis(state, plan, 120.0 * index)
        assert verdict.message.endswith(".")
        assert len(verdict.message) < 4096
        assert AnalysisState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
        counted = sum(1 for canary_arm, control_arm in blocks[:index] if canary_arm and control_arm)
        assert verdict.outcome != "Promote" or counted >= plan.min_blocks


# ------------------------------------------------------------------------------------------------------------------- error rates
def test_rollback_alphas_sum_to_five_percent_and_halve_per_attempt() -> None:
    def alphas(plan: AnalysisPlan) -> float:
        rejected = math.fsum(test.alpha for criterion in build_criteria(plan) for test in criterion.rollback_tests)
        return rejected + failed_requests_alpha(plan) + crashes_alpha(plan)

    for plan in (
        PLAN,
        replace(PLAN, projection=SampleProjection(3, 0.05, 1.0)),
        replace(PLAN, drafts_not_comparable_reason="x."),
        ADAPTIVE,
    ):
        assert alphas(plan) + equivalence.EQUIVALENCE_ALPHA <= 0.05 + 1e-12
        assert alphas(replace(plan, inconclusive_attempts=1)) == pytest.approx(alphas(plan) / 2)
        assert {test.alpha for row in build_criteria(replace(plan, inconclusive_attempts=1)) for test in row.promote_tests} == {
            0.025
        }


def test_a_plan_is_restored_from_its_dict() -> None:
    plan = replace(PLAN, projection=SampleProjection(3, 0.05, None), inconclusive_attempts=2, drafts_not_comparable_reason="x.")
    assert AnalysisPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
