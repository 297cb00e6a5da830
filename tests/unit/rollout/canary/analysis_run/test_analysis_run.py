"""The state of an analysis between two reconciles: every block counts once, also if it is repeated or late."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.comparison import Comparison
from aerie.analysis.criteria.criterion import TIME_PER_OUTPUT_TOKEN, TOKENS_PER_STEP
from aerie.analysis.criteria.plan import AnalysisGoal
from aerie.analysis.criteria.table import build_criteria
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.api.rollout import AnalysisSpec
from aerie.api.status import Arm, SettingStatus
from aerie.rollout.canary.analysis_run.run import (
    AnalysisRun,
    build_block_rule,
    explain_incomparable_acceptance,
    start_analysis,
    status_comparisons,
)
from tests.golden import Messages
from tests.unit.rollout.world import side

NOW = datetime(2026, 11, 1, tzinfo=UTC)
T0 = NOW.timestamp()


def arm(tokens: int = 3, target: str = "acme/big@00000000", mode: str = "Static") -> Arm:
    setting = SettingStatus.model_validate({"mode": mode, "numSpeculativeTokens": tokens})
    return Arm(revision="r", target=target, drafter="acme/drafter@11111111", setting=setting)


def new_run(attempt: int = 0) -> AnalysisRun:
    return start_analysis(AnalysisSpec(), (arm(), arm()), (1, 1), None, attempt, None, NOW)


def blocks(count: int, better: float = 0.0) -> list[ClosedBlock]:
    return [
        ClosedBlock(T0 + 120 * n, T0 + 120 * (n + 1), side(2.5 * (1 + better) + n % 3 / 100), side(2.5)) for n in range(count)
    ]


def test_infinite_bounds_are_absent_from_the_status() -> None:
    comparison = Comparison(TOKENS_PER_STEP, 1, estimate=0.1, lower=-math.inf, upper=math.inf)
    (converted,) = status_comparisons([comparison])
    assert converted.to_dict() == {"metric": TOKENS_PER_STEP, "sampleCount": 1, "estimate": 0.1}


@given(st.lists(st.integers(1, 12), max_size=8))
def test_repeated_block_counts_once(shown: list[int]) -> None:
    run = new_run()
    for count in shown:
        run = AnalysisRun.unpack(run.with_blocks(reversed(blocks(count))).pack()) or run
    assert run.state.block_count == max(shown, default=0)
    assert run.counted_until == T0 + 120 * max(shown, default=0)


def test_block_from_before_the_analysis_is_not_counted() -> None:
    later = start_analysis(AnalysisSpec(), (arm(), arm()), (1, 1), None, 0, None, NOW + timedelta(seconds=90))
    assert later.with_blocks(blocks(3)).state.block_count == 2


def test_analysis_run_round_trips_through_status() -> None:
    run = new_run(attempt=2).with_blocks(blocks(7, 0.1)).reset_guard(NOW + timedelta(minutes=14)).with_blocks(blocks(12, 0.1))
    assert AnalysisRun.unpack(run.pack()) == run
    assert run.guard_state is not None
    assert (run.state.block_count, run.guard_state.block_count) == (7, 5)
    assert len(run.pack()) < 4000


@pytest.mark.parametrize("text", ["", "not base64!", "aGVsbG8=", new_run().pack()[:-8]])
def test_unpack_of_another_format_returns_none(text: str) -> None:
    assert AnalysisRun.unpack(text) is None


def test_guardrail_blocks_do_not_change_analysis_state() -> None:
    run = new_run().with_blocks(blocks(5)).reset_guard(NOW + timedelta(minutes=10))
    run, verdict = run.with_blocks(blocks(30, -0.3)).check_guardrails(NOW + timedelta(hours=1), [])
    assert verdict.outcome == "Rollback"
    assert run.state.block_count == 5


@pytest.mark.parametrize("has_passed", [True, False])
def test_canary_that_has_passed_is_rolled_back_without_other_stable_pods_to_compare(has_passed: bool) -> None:
    """Its own analysis has shown how far its pods are from the control's. Without one, 12 % may be the pods."""
    run = new_run()
    if has_passed:
        run, verdict = run.with_blocks(blocks(60, 0.2)).evaluate(NOW + timedelta(hours=2), [])
        assert verdict.outcome == "Promote"
    run = run.reset_guard(NOW)
    assert run.check_guardrails(NOW, [])[1].outcome == "Continue"
    _, verdict = run.with_blocks(blocks(30, -0.12)).check_guardrails(NOW + timedelta(hours=1), [])
    assert verdict.outcome == ("Rollback" if has_passed else "Continue")


@pytest.mark.parametrize(
    ("canary", "control", "difference"),
    [
        (arm(), arm(), ""),
        (arm(5), arm(3), "other K"),
        (arm(target="acme/other@0"), arm(), "other target"),
        (arm(0, mode="Off"), arm(), "canary without drafter"),
        (arm(), arm(0, mode="Off"), "stable without drafter"),
        (arm(mode="Adaptive"), arm(), "other mode"),
        (arm(mode="Adaptive"), arm(mode="Adaptive"), "both Adaptive"),
        (arm(5, mode="Adaptive"), arm(mode="Adaptive"), "both Adaptive, other K"),
    ],
)
def test_incomparable_acceptance_is_explained(canary: Arm, control: Arm, difference: str, messages: Messages) -> None:
    explanation = explain_incomparable_acceptance(canary, control)
    assert bool(explanation) == bool(difference)
    if difference:
        messages.check(difference, explanation)


@pytest.mark.parametrize(
    ("canary", "control", "criterion"),
    [
        (arm(), arm(), (TOKENS_PER_STEP, 3)),
        (arm(5), arm(), (TIME_PER_OUTPUT_TOKEN, 3)),
        (arm(mode="Adaptive"), arm(mode="Adaptive"), (TIME_PER_OUTPUT_TOKEN, 3)),
        (arm(target="acme/other@0"), arm(), (TIME_PER_OUTPUT_TOKEN, 3)),
    ],
)
def test_deciding_criterion_depends_on_arms(canary: Arm, control: Arm, criterion: tuple[str, int]) -> None:
    """Arms with different numbers of tokens are compared at the common draft positions."""
    plan = start_analysis(AnalysisSpec(), (canary, control), (1, 1), None, 0, None, NOW).plan
    assert (
        next(candidate for candidate in build_criteria(plan) if candidate.promote_tests).name,
        plan.projection.draft_positions,
    ) == criterion


@pytest.mark.parametrize(
    ("canary", "control", "goal", "compared"),
    [
        (arm(mode="Adaptive"), arm(mode="Adaptive"), None, True),
        (arm(mode="Adaptive"), arm(mode="Adaptive"), "Faster", False),
        (arm(5, mode="Adaptive"), arm(mode="Adaptive"), None, False),
        (arm(target="acme/other@0", mode="Adaptive"), arm(mode="Adaptive"), None, False),
        (arm(mode="Adaptive"), arm(), None, False),
    ],
)
def test_adaptive_arms_are_compared_in_tokens_per_step_besides_time(
    canary: Arm, control: Arm, goal: AnalysisGoal | None, compared: bool
) -> None:
    plan = start_analysis(AnalysisSpec(), (canary, control), (1, 1), None, 0, None, NOW, goal=goal).plan
    assert (TOKENS_PER_STEP in {criterion.name for criterion in build_criteria(plan)}) == compared


def test_short_blocks_need_fewer_drafts_and_long_ones_no_more() -> None:
    def rule(seconds: float) -> tuple[float, float]:
        plan = start_analysis(
            AnalysisSpec(block_duration=timedelta(seconds=seconds)), (arm(), arm()), (1, 1), None, 0, None, NOW
        ).plan
        block_rule = build_block_rule(plan, 15)
        return block_rule.min_drafts, block_rule.min_finished_requests

    assert rule(120) == rule(600) == (2000, 20)
    assert rule(30) == (500, 5)
    assert rule(5) == pytest.approx((2000 / 24, 3))
