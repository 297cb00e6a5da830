"""Greedy answers in the verdict: other answers roll back, equal ones do not block a promotion, and a missing result is stated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.equivalence import EquivalenceResult
from aerie.analysis.state import AnalysisState
from aerie.analysis.verdict import evaluate_analysis
from tests.golden import Messages
from tests.unit.analysis.simulated_blocks import PLAN, run_blocks
from tests.unit.rollout.world import equivalence_result


def test_a_canary_that_changes_answers_is_rolled_back_without_a_block(messages: Messages) -> None:
    state, verdict = evaluate_analysis(replace(AnalysisState(0.0), equivalence=equivalence_result(10)), PLAN, 1.0)
    assert (verdict.outcome, state.outcome) == ("Rollback", "Rollback")
    messages.check("outputs changed", verdict.message)
    (shown,) = verdict.comparisons
    assert (shown.metric, shown.sample_count, shown.estimate) == ("OutputEquivalence", 24, None)


@pytest.mark.parametrize(
    "answers",
    [
        equivalence_result(9),
        equivalence_result(12, 1),
        equivalence_result(0, 24),
        EquivalenceResult(prompt_count=24, skip_reason="x"),
    ],
)
def test_answers_that_equal_engines_could_give_do_not_block_promotion(answers: EquivalenceResult) -> None:
    state, _ = run_blocks(14, accepted_tokens=1.2)
    _, verdict = evaluate_analysis(replace(state, equivalence=answers), PLAN, 1801.0)
    assert verdict.outcome == "Promote"
    assert verdict.comparisons[-1].message == answers.message


def test_another_attempt_halves_the_alpha_of_output_equivalence() -> None:
    second_attempt = replace(PLAN, inconclusive_attempts=1)
    assert (
        evaluate_analysis(replace(AnalysisState(0.0), equivalence=equivalence_result(10)), second_attempt, 1.0)[1].outcome
        == "Continue"
    )
    assert (
        evaluate_analysis(replace(AnalysisState(0.0), equivalence=equivalence_result(11)), second_attempt, 1.0)[1].outcome
        == "Rollback"
    )


@pytest.mark.parametrize(
    ("case", "plan", "answers"),
    [
        ("no result", PLAN, None),
        ("skipped", replace(PLAN, equivalence_skip_reason="no why"), None),
        ("failed", PLAN, EquivalenceResult(prompt_count=24, skip_reason="the key is missing")),
        ("equal", PLAN, equivalence_result(0)),
    ],
)
def test_a_promotion_message_states_a_missing_output_equivalence(
    case: str, plan: AnalysisPlan, answers: EquivalenceResult | None, messages: Messages
) -> None:
    state, _ = run_blocks(14, accepted_tokens=1.2)
    verdict = evaluate_analysis(replace(state, equivalence=answers), plan, 1801.0)[1]
    messages.check(f"promoted, output equivalence: {case}", verdict.message)
