"""Regressions below the level of the analysis: how they are counted, how often reported, and how often wrongly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from aerie.analysis import post_promotion
from aerie.analysis.criteria.criterion import ACCEPTANCE_LENGTH, TOKENS_PER_STEP
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.analysis.state import AnalysisState, add_restarts
from aerie.analysis.statistics.confidence_sequence import PairedMoments
from tests.golden import Messages
from tests.unit.rollout.world import side

PLAN = AnalysisPlan(min_blocks=5)


def reference_level(lengths: list[float], plan: AnalysisPlan = PLAN) -> post_promotion.ReferenceLevel | None:
    pairs = PairedMoments()
    for length in lengths:
        pairs = pairs.add_pair(length, 2.0)
    return post_promotion.compute_reference_level(AnalysisState(0.0, {TOKENS_PER_STEP: pairs}), plan)


def monitor_each(lengths: list[float], level: post_promotion.ReferenceLevel) -> Iterator[AnalysisState]:
    """Yield the state after each block."""
    state = AnalysisState(0.0)
    for n, length in enumerate(lengths):
        state = post_promotion.add_promoted_block(state, ClosedBlock(120.0 * n, 120.0 * (n + 1), side(length), None), level, PLAN)
        yield state


def monitor(lengths: list[float], level: post_promotion.ReferenceLevel) -> AnalysisState:
    *_, state = monitor_each(lengths, level)
    return state


def test_the_level_is_the_mean_of_the_analysis() -> None:
    level = reference_level([2.4, 2.5, 2.6] * 10)
    assert level is not None
    assert level.mean == pytest.approx(2.5)
    assert level.block_variance == pytest.approx(0.0069, abs=1e-4)
    assert level.mean_sd == pytest.approx((level.block_variance * 3 / 30) ** 0.5), "blocks are alike: three are worth one"
    assert level.degrees_of_freedom == 9


def test_no_level_without_enough_comparable_blocks() -> None:
    assert reference_level([2.5] * 4) is None
    assert (
        reference_level(
            [2.5] * 40,
            AnalysisPlan(drafts_not_comparable_reason="the canary serves without a drafter.", has_fixed_draft_length=False),
        )
        is None
    )
    assert reference_level([2.5] * 40, AnalysisPlan(drafts_not_comparable_reason="the arms draft 3 and 5 tokens.")) is not None, (
        "it is the canary's own level"
    )


def test_the_reference_acceptance_length_is_of_the_counters() -> None:
    """The status compares its acceptance length, which is of the counters too, with it."""
    pairs = {name: PairedMoments() for name in (TOKENS_PER_STEP, ACCEPTANCE_LENGTH)}
    for _ in range(6):
        pairs = {name: moments.add_pair(value, 2.0) for (name, moments), value in zip(pairs.items(), (2.4, 2.5), strict=True)}
    state, level = AnalysisState(0.0, pairs), post_promotion.compute_reference_level(AnalysisState(0.0, pairs), PLAN)
    assert level is not None
    assert level.mean == pytest.approx(2.4)
    assert post_promotion.compute_reference_acceptance_length(state, PLAN) == pytest.approx(2.5)
    assert (
        post_promotion.compute_reference_acceptance_length(
            state, replace(PLAN, drafts_not_comparable_reason="it follows a schedule.", has_fixed_draft_length=False)
        )
        is None
    )
    assert (
        post_promotion.compute_reference_acceptance_length(
            AnalysisState(0.0, {ACCEPTANCE_LENGTH: PairedMoments().add_pair(2.5, 2.0)}), PLAN
        )
        is None
    )


def test_blocks_without_a_complete_pod_or_drafts_are_no_regression() -> None:
    level = reference_level([2.4, 2.5, 2.6] * 10)
    assert level is not None
    state = post_promotion.add_promoted_block(AnalysisState(0.0), ClosedBlock(0.0, 120.0, None, None), level, PLAN)
    assert (state.block_count, state.dropped_block_count) == (0, 1)
    state = post_promotion.add_promoted_block(state, ClosedBlock(0.0, 120.0, side(2.5, drafts=0), None), level, PLAN)
    assert (state.block_count, post_promotion.regression_message(state, level, PLAN, 4)) == (0, "")


def test_no_accepted_tokens_abort_immediately(messages: Messages) -> None:
    level = reference_level([2.4, 2.5, 2.6] * 10)
    assert level is not None
    assert post_promotion.abort_message(monitor([1.0], level), PLAN) == ""
    message = post_promotion.abort_message(monitor([2.5, 1.0, 1.0], level), PLAN)
    messages.check("no accepted tokens", message)
    assert post_promotion.abort_message(monitor([1.0, 1.0, 2.5], level), PLAN) == ""


def test_a_few_accepted_tokens_or_a_few_drafts_do_not_abort() -> None:
    level = reference_level([2.4, 2.5, 2.6] * 10)
    assert level is not None
    assert post_promotion.abort_message(monitor([1.004, 1.001], level), PLAN), "it reads 1.00"
    assert post_promotion.abort_message(monitor([1.006, 1.006], level), PLAN) == ""
    few = AnalysisState(0.0)
    for n in range(3):
        few = post_promotion.add_promoted_block(
            few, ClosedBlock(120.0 * n, 120.0 * (n + 1), side(1.0, drafts=20), None), level, PLAN
        )
    assert post_promotion.abort_message(few, PLAN) == ""
    poor = reference_level([1.02, 1.03, 1.04] * 10)
    assert poor is not None
    assert post_promotion.abort_message(monitor([1.004, 1.004], poor), PLAN) == "", "hardly less than it was accepted with"
    assert post_promotion.abort_message(monitor([1.0, 1.0], poor), PLAN)


def test_repeated_crashes_of_promoted_pods_abort_immediately(messages: Messages) -> None:
    """Two crashes in a few minutes of pods without earlier crashes are significant; one is not."""
    level = reference_level([2.4, 2.5, 2.6] * 10)
    assert level is not None
    state = monitor([2.5], level)
    assert state.crashes.canary_pod_hours == pytest.approx(1 / 30)
    assert post_promotion.abort_message(add_restarts(state, {"a": 1}, {}), PLAN) == ""
    state = add_restarts(add_restarts(state, {"a": 1}, {}), {"a": 1, "b": 4}, {})
    messages.check("crashes", post_promotion.abort_message(state, PLAN))


def detection_rate(fall: float, blocks: int, runs: int = 200) -> float:
    """Return the share of runs that report a regression within `blocks` blocks, with one canary pod and four monitored pods."""
    chance, detected = random.Random(7), 0  # noqa: S311 - no secrets
    for _ in range(runs):
        level = reference_level([2.5 * (1 + chance.gauss(0, 0.045)) for _ in range(30)])
        assert level is not None
        lengths = [2.5 * (1 - fall) * (1 + chance.gauss(0, 0.0225)) for _ in range(blocks)]
        detected += any(post_promotion.regression_message(state, level, PLAN, 4) for state in monitor_each(lengths, level))
    return detected / runs


@pytest.mark.slow
def test_a_regression_of_15_percent_is_reported_within_five_blocks() -> None:
    assert detection_rate(0.15, 5) > 0.9
    assert detection_rate(0.0, 15) < 0.02


def test_the_regression_message_has_both_lengths(messages: Messages) -> None:
    level = reference_level([2.4, 2.5, 2.6] * 10)
    assert level is not None
    message = post_promotion.regression_message(monitor([1.9, 2.0, 2.1, 2.0, 2.0], level), level, PLAN, 4)
    messages.check("regression", message)
