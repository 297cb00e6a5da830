"""Abort conditions: failures that roll back immediately, without statistics, and near misses that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aerie.analysis.criteria.criterion import TIME_PER_OUTPUT_TOKEN
from aerie.analysis.criteria.plan import AnalysisGoal, AnalysisPlan
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts
from aerie.analysis.state import ABORT_TIME_PER_OUTPUT_TOKEN_RATIO, AnalysisState, add_block
from aerie.analysis.statistics.load_adjustment import LoadCurve
from aerie.analysis.verdict import check_guardrails, evaluate_analysis
from tests.golden import Messages
from tests.unit.analysis.simulated_blocks import PLAN, run_blocks, side


def test_an_abort_message_rolls_back_immediately() -> None:
    state, verdict = evaluate_analysis(AnalysisState(0.0), PLAN, 30.0, ["Pod a of the canary crashes again and again."])
    assert (verdict.outcome, verdict.message) == ("Rollback", "Pod a of the canary crashes again and again.")
    assert state.outcome == "Rollback"


def test_no_accepted_token_in_two_blocks(messages: Messages) -> None:
    state, verdict = run_blocks(120, accepted_tokens=0.0)
    assert (verdict.outcome, state.block_count) == ("Rollback", 2)
    messages.check("no accepted tokens", verdict.message)


def test_zero_acceptance_of_a_few_drafts_is_ignored() -> None:
    """A schedule makes only a few drafts in a busy hour."""
    many = side()
    for drafts, stopped in ((49.0, False), (50.0, True)):
        few = replace(many, counts=replace(many.counts, drafts=drafts, accepted_tokens=0.0))
        state = AnalysisState(0.0)
        for index in range(2):
            state = add_block(state, ClosedBlock(120.0 * index, 120.0 * index + 120, few, many), PLAN)
        assert (state.zero_acceptance_streak == 2) is stopped


def test_far_later_first_tokens_abort_despite_fewer_requests(messages: Messages) -> None:
    later = {"first_tokens": 0.5, "first_token_seconds": 10.0, "load": 2.0}
    state, verdict = run_blocks(120, PLAN, 1, **later)
    assert (verdict.outcome, state.block_count) == ("Rollback", 2)
    messages.check("far later first tokens", verdict.message)
    few = {"first_tokens": 19 / 240, "first_token_seconds": 2.0}
    assert run_blocks(2, PLAN, 1, **few)[0].slow_first_token_streak == 0


def test_a_canary_that_finishes_none_of_its_requests_is_aborted(messages: Messages) -> None:
    """All clients disconnect before the first token: the canary counts nothing, but it has requests in flight."""
    state = AnalysisState(0.0)
    for index in range(2):
        idle = ArmCounts(1, EngineCounts(), 3.0)
        state = add_block(state, ClosedBlock(240.0 * index, 240.0 * index + 240, idle, side()), PLAN)
    _, verdict = evaluate_analysis(state, PLAN, 480.0)
    assert verdict.outcome == "Rollback"
    messages.check("stalled", verdict.message)
    without = add_block(AnalysisState(0.0), ClosedBlock(0.0, 240.0, ArmCounts(1, EngineCounts(), 0.0), side()), PLAN)
    assert without.stalled_streak == 0, "nothing is sent to it"


# -------------------------------------------------------------------------------------------------------------------- far slower
SLOWER, UNLIKE = {"decode_seconds": 3.1}, {"first_tokens": 1.5, "load": 7.5}


def slow_output_streaks(*canaries: dict[str, float], plan: AnalysisPlan = PLAN) -> list[int]:
    """Return the streak of slow blocks after each block, given the canary's changes in it."""
    state, streaks = AnalysisState(0.0), []
    for index, change in enumerate(canaries, 1):
        state = add_block(state, ClosedBlock(120.0 * index - 120, 120.0 * index, side(None, **change), side()), plan)
        streaks.append(state.slow_output_streak)
    return streaks


def test_two_blocks_over_three_times_as_slow_abort(messages: Messages) -> None:
    state, verdict = run_blocks(1, decode_seconds=5.0)
    assert (verdict.outcome, state.slow_output_streak) == ("Continue", 1)
    state, verdict = run_blocks(120, decode_seconds=5.0)
    assert (verdict.outcome, state.block_count) == ("Rollback", 2)
    messages.check("far slower", verdict.message)
    assert state.block_count < PLAN.min_blocks
    state, verdict = run_blocks(120, decode_seconds=2.5)  # slower too, but for the bounds to say
    assert (verdict.outcome, state.block_count) == ("Rollback", PLAN.min_blocks)
    assert verdict.message.startswith("Time per output token +1")


@pytest.mark.parametrize("goal", ["NonInferior", "Superior", "Faster", "Explore"])
def test_a_far_slower_canary_is_aborted_with_every_goal(goal: AnalysisGoal, messages: Messages) -> None:
    state, verdict = run_blocks(120, replace(PLAN, goal=goal), decode_seconds=5.0)
    assert (verdict.outcome, state.block_count) == ("Rollback", 2)
    messages.check("far slower", verdict.message)


def test_guardrails_abort_a_far_slower_canary(messages: Messages) -> None:
    state = add_block(AnalysisState(0.0), ClosedBlock(0.0, 120.0, side(decode_seconds=5.0), side()), PLAN)
    state, verdict = check_guardrails(state, PLAN, 120.0)
    assert verdict.outcome == "Continue"
    state = add_block(state, ClosedBlock(120.0, 240.0, side(decode_seconds=5.0), side()), PLAN)
    state, verdict = check_guardrails(state, PLAN, 240.0)
    assert verdict.outcome == "Rollback"
    messages.check("far slower", verdict.message)


def test_the_slow_output_streak_begins_above_three_times() -> None:
    assert slow_output_streaks(*[{"decode_seconds": 2.9}] * 4) == [0, 0, 0, 0]
    assert slow_output_streaks(*[{"decode_seconds": ABORT_TIME_PER_OUTPUT_TOKEN_RATIO}] * 2) == [0, 0]
    assert slow_output_streaks(SLOWER, SLOWER) == [1, 2]
    assert slow_output_streaks({"decode_seconds": 3.1, "decode_tokens": 1.1}) == [0]


def test_a_block_that_is_not_far_slower_resets_the_streak() -> None:
    assert slow_output_streaks(SLOWER, {}, SLOWER, SLOWER) == [1, 0, 1, 2]
    assert slow_output_streaks(SLOWER, {"decode_tokens": 0.0}, SLOWER) == [1, 0, 1]


def test_a_control_without_times_starts_no_streak() -> None:
    for missing in ({"decode_tokens": 0.0}, {"decode_seconds": 0.0}):
        block = ClosedBlock(0.0, 120.0, side(decode_seconds=5.0), side(None, **missing))
        assert add_block(AnalysisState(0.0), block, PLAN).slow_output_streak == 0


def test_a_block_with_unequal_loads_leaves_the_streak_unchanged() -> None:
    assert slow_output_streaks(SLOWER, SLOWER | UNLIKE, SLOWER) == [1, 1, 2]
    assert slow_output_streaks(SLOWER, UNLIKE, SLOWER) == [1, 1, 2]
    assert slow_output_streaks(*[SLOWER | UNLIKE | {"first_tokens": 2.0, "load": 9.0}] * 4) == [0, 0, 0, 0]


def test_a_dropped_block_leaves_the_streak_unchanged() -> None:
    state = add_block(AnalysisState(0.0), ClosedBlock(0.0, 120.0, side(decode_seconds=5.0), side()), PLAN)
    assert add_block(state, ClosedBlock(120.0, 240.0, None, side()), PLAN).slow_output_streak == 1


def test_the_slow_output_streak_ignores_the_load_curve() -> None:
    """A load curve near saturation would exaggerate a difference in load."""
    idler = {"decode_seconds": 2.0 * 0.85, "decode_tokens": 0.85, "output_tokens": 0.85}
    with_curves = replace(PLAN, load_curves={TIME_PER_OUTPUT_TOKEN: LoadCurve(3.0, 0.0, 100_240 / 120)})
    assert slow_output_streaks(idler, idler, plan=with_curves) == [0, 0]
