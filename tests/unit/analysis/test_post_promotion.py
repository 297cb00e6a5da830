"""A fall below the level of the acceptance: how it is counted, and how often it is told, rightly and wrongly."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from aerie.analysis import post_promotion
from aerie.analysis.criteria import ACCEPTANCE_LENGTH, TOKENS_PER_STEP, AnalysisPlan
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.analysis.state import AnalysisState, add_restarts
from aerie.analysis.statistics.confidence_sequence import PairedMoments
from tests.golden import Messages
from tests.unit.rollout.world import side

TERMS = AnalysisPlan(min_blocks=5)


def accepted(lengths: list[float], terms: AnalysisPlan = TERMS) -> post_promotion.ReferenceLevel | None:
    pairs = PairedMoments()
    for length in lengths:
        pairs = pairs.add_pair(length, 2.0)
    return post_promotion.compute_reference_level(AnalysisState(0.0, {TOKENS_PER_STEP: pairs}), terms)


def watched(lengths: list[float], level: post_promotion.ReferenceLevel) -> AnalysisState:
    state = AnalysisState(0.0)
    for n, length in enumerate(lengths):
        state = post_promotion.add_promoted_block(
            state, ClosedBlock(120.0 * n, 120.0 * (n + 1), side(length), None), level, TERMS
        )
    return state


def test_the_level_is_the_mean_of_the_analysis_as_sure_as_its_blocks() -> None:
    level = accepted([2.4, 2.5, 2.6] * 10)
    assert level is not None
    assert level.mean == pytest.approx(2.5)
    assert level.block_variance == pytest.approx(0.0069, abs=1e-4)
    assert level.mean_sd == pytest.approx((level.block_variance * 3 / 30) ** 0.5), "blocks are alike: three are worth one"
    assert level.degrees_of_freedom == 9


def test_there_is_none_where_it_was_not_compared_or_hardly() -> None:
    assert accepted([2.5] * 4) is None
    assert (
        accepted(
            [2.5] * 40,
            AnalysisPlan(drafts_not_comparable_reason="the canary serves without a drafter.", has_fixed_draft_length=False),
        )
        is None
    )
    assert accepted([2.5] * 40, AnalysisPlan(drafts_not_comparable_reason="the arms draft 3 and 5 tokens.")) is not None, (
        "it is the canary's own level"
    )


def test_the_length_of_the_acceptance_is_that_of_the_counters() -> None:
    """The status' figure is held against it, which is of the counters too."""
    pairs = {name: PairedMoments() for name in (TOKENS_PER_STEP, ACCEPTANCE_LENGTH)}
    for _ in range(6):
        pairs = {name: known.add_pair(value, 2.0) for (name, known), value in zip(pairs.items(), (2.4, 2.5), strict=True)}
    state, level = AnalysisState(0.0, pairs), post_promotion.compute_reference_level(AnalysisState(0.0, pairs), TERMS)
    assert level is not None
    assert level.mean == pytest.approx(2.4)
    assert post_promotion.compute_reference_acceptance_length(state, TERMS) == pytest.approx(2.5)
    assert (
        post_promotion.compute_reference_acceptance_length(
            state, replace(TERMS, drafts_not_comparable_reason="it follows a schedule.", has_fixed_draft_length=False)
        )
        is None
    )
    assert (
        post_promotion.compute_reference_acceptance_length(
            AnalysisState(0.0, {ACCEPTANCE_LENGTH: PairedMoments().add_pair(2.5, 2.0)}), TERMS
        )
        is None
    )


def test_blocks_without_a_whole_pod_or_drafts_say_nothing() -> None:
    level = accepted([2.4, 2.5, 2.6] * 10)
    assert level is not None
    state = post_promotion.add_promoted_block(AnalysisState(0.0), ClosedBlock(0.0, 120.0, None, None), level, TERMS)
    assert (state.block_count, state.dropped_block_count) == (0, 1)
    state = post_promotion.add_promoted_block(state, ClosedBlock(0.0, 120.0, side(2.5, drafts=0), None), level, TERMS)
    assert (state.block_count, post_promotion.regression_message(state, level, TERMS, 4)) == (0, "")


def test_no_accepted_token_is_told_at_once(messages: Messages) -> None:
    level = accepted([2.4, 2.5, 2.6] * 10)
    assert level is not None
    assert post_promotion.abort_message(watched([1.0], level), TERMS) == ""
    told = post_promotion.abort_message(watched([2.5, 1.0, 1.0], level), TERMS)
    messages.check("no accepted tokens", told)
    assert post_promotion.abort_message(watched([1.0, 1.0, 2.5], level), TERMS) == ""


def test_noise_that_is_right_now_and_then_is_noise_and_a_few_drafts_are_none() -> None:
    level = accepted([2.4, 2.5, 2.6] * 10)
    assert level is not None
    assert post_promotion.abort_message(watched([1.004, 1.001], level), TERMS), "it reads 1.00"
    assert post_promotion.abort_message(watched([1.006, 1.006], level), TERMS) == ""
    few = AnalysisState(0.0)
    for n in range(3):
        few = post_promotion.add_promoted_block(
            few, ClosedBlock(120.0 * n, 120.0 * (n + 1), side(1.0, drafts=20), None), level, TERMS
        )
    assert post_promotion.abort_message(few, TERMS) == ""
    poor = accepted([1.02, 1.03, 1.04] * 10)
    assert poor is not None
    assert post_promotion.abort_message(watched([1.004, 1.004], poor), TERMS) == "", "hardly less than it was accepted with"
    assert post_promotion.abort_message(watched([1.0, 1.0], poor), TERMS)


def test_promoted_processes_that_end_again_and_again_are_told_at_once(messages: Messages) -> None:
    """Two in a few minutes of pods that have never crashed before; one is an accident."""
    level = accepted([2.4, 2.5, 2.6] * 10)
    assert level is not None
    state = watched([2.5], level)
    assert state.crashes.canary_pod_hours == pytest.approx(1 / 30)
    assert post_promotion.abort_message(add_restarts(state, {"a": 1}, {}), TERMS) == ""
    state = add_restarts(add_restarts(state, {"a": 1}, {}), {"a": 1, "b": 4}, {})
    messages.check("crashes", post_promotion.abort_message(state, TERMS))


def seen(fall: float, blocks: int, runs: int = 200) -> float:
    """Share of runs in which a fall is told within so many blocks. One canary pod was accepted; four are watched."""
    chance, found = random.Random(7), 0  # noqa: S311 - no secrets
    for _ in range(runs):
        level = accepted([2.5 * (1 + chance.gauss(0, 0.045)) for _ in range(30)])
        assert level is not None
        lengths = [2.5 * (1 - fall) * (1 + chance.gauss(0, 0.0225)) for _ in range(blocks)]
        found += any(
            post_promotion.regression_message(watched(lengths[:n], level), level, TERMS, 4) for n in range(1, blocks + 1)
        )
    return found / runs


@pytest.mark.slow
def test_a_fall_of_15_percent_is_told_within_five_blocks_and_none_where_there_is_none() -> None:
    assert seen(0.15, 5) > 0.9
    assert seen(0.0, 15) < 0.02


def test_the_sentence_names_both_lengths(messages: Messages) -> None:
    level = accepted([2.4, 2.5, 2.6] * 10)
    assert level is not None
    told = post_promotion.regression_message(watched([1.9, 2.0, 2.1, 2.0, 2.0], level), level, TERMS, 4)
    messages.check("regression", told)
