"""Verdicts and their messages: what promotes, what rolls back, and what never does either."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.analysis import equivalence
from aerie.analysis.criteria import (
    ACCEPTANCE_LENGTH,
    FAILED_REQUESTS,
    SLOW_TIME_PER_OUTPUT_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    TOKENS_PER_STEP,
    AnalysisGoal,
    AnalysisPlan,
    build_criteria,
    crashes_alpha,
    failed_requests_alpha,
)
from aerie.analysis.equivalence import EquivalenceResult
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts, SampleProjection
from aerie.analysis.messages import format_duration
from aerie.analysis.state import ABORT_TIME_PER_OUTPUT_TOKEN_RATIO, AnalysisState, add_block, add_restarts
from aerie.analysis.statistics.calibration import Dispersion
from aerie.analysis.statistics.load_adjustment import LoadCurve
from aerie.analysis.verdict import Verdict, check_guardrails, evaluate_analysis
from tests.golden import Messages
from tests.unit.rollout.world import equivalence_result

CALM = Dispersion(
    inflation=1.0, variance=0.0001, degrees_of_freedom=20.0, pod_effect_sd=0.0, pod_effect_degrees_of_freedom=7.0, batch_count=24
)
NAMES = [criterion.name for criterion in build_criteria(AnalysisPlan())]
PLAN = AnalysisPlan(pod_counts=(1, 1), dispersions=dict.fromkeys(NAMES, CALM))


def side(noise: np.random.Generator | None = None, **change: float) -> ArmCounts:
    """Make the counts of an arm in one block; `change` multiplies a count, or sets it if it is 0.

    Requests get the tokens that the counters count as accepted, unless `request_steps` is given.
    """
    base = EngineCounts(
        drafts=40_000.0,
        accepted_tokens=60_000.0,
        draft_tokens=120_000.0,
        decode_tokens=100_000.0,
        decode_seconds=2_000.0,
        output_tokens=100_240.0,
        finished_requests=240.0,
        truncated_requests=60.0,
        first_tokens=240.0,
        first_token_seconds=48.0,
        timed_requests=240.0,
        slow_first_token_requests=6.0,
        slow_output_requests=6.0,
    )
    load = change.pop("load", 5.0)
    names = {name: getattr(base, name) * factor if getattr(base, name) else factor for name, factor in change.items()}
    if noise:
        names["accepted_tokens"] = names.get("accepted_tokens", base.accepted_tokens) * float(noise.normal(1, 0.01))
        names["decode_seconds"] = names.get("decode_seconds", base.decode_seconds) * float(noise.normal(1, 0.01))
    counts = replace(base, **names)
    steps = (
        40_000.0 * change["request_steps"]
        if "request_steps" in change
        else 100_000.0 * counts.drafts / (counts.drafts + counts.accepted_tokens)
    )
    return ArmCounts(1, replace(counts, request_steps=steps * counts.decode_tokens / 100_000.0), load)


def run_blocks(blocks: int, plan: AnalysisPlan = PLAN, seed: int = 1, **change: float) -> tuple[AnalysisState, Verdict]:
    """Return the state and the verdict after `blocks` blocks, or at the first one that ends the analysis."""
    noise, state, verdict = np.random.default_rng(seed), AnalysisState(0.0), None
    for index in range(1, blocks + 1):
        block = ClosedBlock(120.0 * (index - 1), 120.0 * index, side(noise, **change), side(noise))
        state = add_block(state, block, plan)
        state, verdict = evaluate_analysis(state, plan, 120.0 * index)
        state = AnalysisState.from_dict(json.loads(json.dumps(state.to_dict())))  # as after a crash
        if verdict.outcome != "Continue":
            break
    assert verdict is not None
    return state, verdict


# ---------------------------------------------------------------------------------------------------------------- verdicts
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


def test_time_is_compared_at_the_output_of_the_control() -> None:
    """A canary with 15 % more requests takes longer for each token, like any pod."""
    more = {
        "first_tokens": 1.15,
        "output_tokens": 1.15,
        "decode_tokens": 1.15,
        "finished_requests": 1.15,
        "truncated_requests": 1.15,
    }
    longer = {"decode_seconds": 1.15 * 1.15**0.5}
    trial = replace(PLAN, goal="Faster", drafts_not_comparable_reason="it is a trial.")
    curves = {TIME_PER_OUTPUT_TOKEN: LoadCurve(0.5, 0.0, 100_240 / 120)}
    state, verdict = run_blocks(120, trial, 1, **more, **longer)
    assert (verdict.outcome, state.block_count) == ("Rollback", PLAN.min_blocks)
    with_curves = replace(trial, load_curves=curves)
    assert run_blocks(60, with_curves, 1, **more, **longer)[1].outcome == "Continue"
    faster = {"decode_seconds": 0.95 * longer["decode_seconds"]}
    assert run_blocks(60, with_curves, 1, **more, **faster)[1].outcome == "Promote"
    assert AnalysisPlan.from_dict(json.loads(json.dumps(with_curves.to_dict()))) == with_curves


def test_latency_under_another_load_is_no_evidence(messages: Messages) -> None:
    _, verdict = run_blocks(130, decode_seconds=1.5, first_tokens=1.5, load=8.0)
    assert verdict.outcome == "Inconclusive"
    messages.check("latency under another load", verdict.message)
    assert "TimePerOutputToken" not in {row.metric for row in verdict.comparisons}
    assert "TimePerOutputToken" in {row.metric for row in run_blocks(130, decode_seconds=1.5, first_tokens=1.5)[1].comparisons}


def test_a_faster_canary_keeps_its_blocks() -> None:
    """A faster canary has fewer requests in flight, while equally many arrive."""
    _, verdict = run_blocks(60, decode_seconds=0.4, first_token_seconds=0.5, load=2.0)
    assert verdict.outcome == "Promote"
    assert run_blocks(60, decode_seconds=1.5, load=8.0)[1].outcome == "Rollback"


def test_time_decides_where_drafts_are_not_comparable(messages: Messages) -> None:
    plan = replace(PLAN, drafts_not_comparable_reason="the canary's number of tokens follows a schedule.")
    _, verdict = run_blocks(120, plan, accepted_tokens=0.5)
    assert verdict.outcome == "Promote"
    assert verdict.message.startswith("Time per output token ")
    messages.check("drafts not compared: schedule", verdict.message)
    assert run_blocks(120, plan, accepted_tokens=0.5, decode_seconds=1.1)[1].outcome == "Rollback"
    assert run_blocks(120, replace(plan, goal="Superior"))[1].outcome != "Promote"
    assert run_blocks(120, replace(plan, goal="Superior"), decode_seconds=0.9)[1].outcome == "Promote"


# ------------------------------------------------------------------------------------------------------- what drafts give
BEHIND = 1.05
"""Factor on accepted tokens by which the canary's counters are too high: 3 % more acceptance length."""


def test_tokens_behind_a_stop_make_no_canary_better(messages: Messages) -> None:
    """The counters overstate the canary by 3 %; its requests get as many tokens in a step as the control's."""
    superior = replace(PLAN, goal="Superior")
    state, verdict = run_blocks(130, superior, accepted_tokens=BEHIND, request_steps=1.0)
    assert verdict.outcome == "Inconclusive"
    messages.check("tokens behind a stop", verdict.message)
    shown = {row.metric: row for row in verdict.comparisons}
    assert shown[ACCEPTANCE_LENGTH].estimate == pytest.approx(0.03, abs=0.003), "people see it"
    assert (shown[ACCEPTANCE_LENGTH].lower, shown[ACCEPTANCE_LENGTH].upper) == (None, None), "it decides nothing"
    assert shown[TOKENS_PER_STEP].upper is not None
    assert state.block_count == 120


def test_tokens_behind_a_stop_hide_no_harm(messages: Messages) -> None:
    """The counters are equal, but requests get 4 % fewer tokens in a step."""
    _, verdict = run_blocks(130, accepted_tokens=1.0, request_steps=1 / 0.96)
    assert verdict.outcome == "Rollback"
    messages.check("tokens behind a stop hide no harm", verdict.message)


def test_time_decides_and_drafts_are_displayed_with_unequal_k(messages: Messages) -> None:
    """Longer drafts give more tokens in a step, even bad ones, and begin at harder positions: neither is the users' latency."""
    unequal = replace(PLAN, drafts_not_comparable_reason="the canary drafts 5 tokens at a time and the stable revision 3.")
    _, verdict = run_blocks(130, unequal, accepted_tokens=0.9, request_steps=1.0)
    assert verdict.outcome == "Promote"
    assert verdict.message.startswith("Time per output token ")
    messages.check("drafts not compared: other K", verdict.message)
    assert {TOKENS_PER_STEP, ACCEPTANCE_LENGTH} < {row.metric for row in verdict.comparisons}
    _, verdict = run_blocks(130, unequal, accepted_tokens=1.5, decode_seconds=1.06)
    assert (verdict.outcome, verdict.message[:21]) == ("Rollback", "Time per output token")


ADAPTIVE = replace(PLAN, drafts_not_comparable_reason="both arms verify adaptively, ....", both_adaptive=True)


def test_adaptive_verification_is_evaluated_by_time(messages: Messages) -> None:
    _, verdict = run_blocks(130, ADAPTIVE, accepted_tokens=0.97)
    assert verdict.outcome == "Promote", "a little less may be the load"
    assert verdict.message.startswith("Time per output token ")
    _, verdict = run_blocks(130, ADAPTIVE, accepted_tokens=0.7)
    assert verdict.outcome == "Rollback"
    messages.check("adaptive verification", verdict.message)


def test_adaptive_verification_is_not_compared_under_unequal_load() -> None:
    """Equally many requests arrive, but more are in flight, and fewer tokens of each are verified."""
    _, verdict = run_blocks(130, ADAPTIVE, accepted_tokens=0.7, load=8.0)
    assert TOKENS_PER_STEP not in {row.metric for row in verdict.comparisons}
    assert TIME_PER_OUTPUT_TOKEN in {row.metric for row in verdict.comparisons}
    assert verdict.outcome == "Promote"
    assert run_blocks(130, ADAPTIVE, accepted_tokens=0.7, load=8.0, decode_seconds=1.1)[1].message.startswith(
        "Time per output token "
    )


# ------------------------------------------------------------------------------------------------------- what users feel
def test_a_lighter_drafter_that_is_faster_is_promoted(messages: Messages) -> None:
    """A lighter drafter has a lower acceptance and a lower cost: each token takes 15 % less time."""
    lighter = {"accepted_tokens": 1 - 0.04 / 0.6, "decode_seconds": 0.85}
    _, verdict = run_blocks(130, PLAN, 1, **lighter)
    assert verdict.outcome == "Promote"
    messages.check("faster with fewer tokens per step", verdict.message)
    assert run_blocks(130, replace(PLAN, goal="Superior"), 1, **lighter)[1].outcome == "Promote"
    assert run_blocks(130, PLAN, 1, **{**lighter, "decode_seconds": 1.0})[1].outcome == "Rollback"


@pytest.mark.parametrize("seconds", [1.035, 1.05])
def test_no_gain_in_tokens_per_step_promotes_a_slower_canary(seconds: float) -> None:
    assert run_blocks(130, accepted_tokens=1.13, decode_seconds=seconds)[1].outcome != "Promote"


@pytest.mark.parametrize("slower", [1.1, 1.3, 2.0, 2.9])
def test_an_objective_keeps_the_test_of_time_per_output_token(slower: float) -> None:
    """No request exceeds the objective, but every token takes longer."""
    plan = replace(PLAN, projection=SampleProjection(3, time_per_output_token_edge=0.05), dispersions=PLAN.dispersions)
    _, verdict = run_blocks(130, plan, accepted_tokens=1.2, decode_seconds=slower, slow_output_requests=0.0)
    assert verdict.outcome == "Rollback"
    assert verdict.message.startswith("Time per output token ")


@pytest.mark.parametrize(
    ("canary", "control", "expected_outcome"), [(8.0, 8.0, "Promote"), (16.0, 8.0, "Other"), (30.0, 30.0, "Promote")]
)
def test_an_objective_is_evaluated_at_its_percentile(canary: float, control: float, expected_outcome: str) -> None:
    """So many of the 240 requests of a block are beyond the objective, whose percentile allows 12. Where the control misses it
    too, an equal canary is promoted."""
    projection = SampleProjection(3, time_per_output_token_edge=0.05)
    plan = replace(
        PLAN,
        projection=projection,
        max_duration_seconds=10 * 86400.0,
        dispersions={**PLAN.dispersions, SLOW_TIME_PER_OUTPUT_TOKEN: CALM},
    )
    noise, state, outcome = np.random.default_rng(2), AnalysisState(0.0), "Continue"
    for index in range(1, 400):
        canary_arm = side(noise, accepted_tokens=1.2, slow_output_requests=float(noise.poisson(canary)) / 6)
        control_arm = side(noise, slow_output_requests=float(noise.poisson(control)) / 6)
        state = add_block(state, ClosedBlock(120.0 * index - 120, 120.0 * index, canary_arm, control_arm), plan)
        state, verdict = evaluate_analysis(state, plan, 120.0 * index)
        outcome = verdict.outcome
        if outcome != "Continue":
            break
    assert (outcome == "Promote") is (expected_outcome == "Promote")


# -------------------------------------------------------------------------------------------- what takes itself out of blocks
def test_few_requests_without_failures_do_not_promote(messages: Messages) -> None:
    """None of three finished requests in a block has failed, but 2 % might fail."""
    few = {
        "finished_requests": 3 / 240,
        "truncated_requests": 3 / 240,
        "first_tokens": 3 / 240,
        "first_token_seconds": 3 / 240,
        "timed_requests": 3 / 240,
    }
    noise, state, verdict = np.random.default_rng(1), AnalysisState(0.0), evaluate_analysis(AnalysisState(0.0), PLAN, 0.0)[1]
    for index in range(1, 120):
        block = ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise, accepted_tokens=1.2, **few), side(noise, **few))
        state = add_block(state, block, PLAN)
        state, verdict = evaluate_analysis(state, PLAN, 120.0 * index)
        assert verdict.outcome == "Continue"
    messages.check("few requests", verdict.message)


BEGUN = (
    *(
        "drafts",
        "accepted_tokens",
        "decode_tokens",
        "decode_seconds",
        "output_tokens",
        "finished_requests",
        "truncated_requests",
        "first_tokens",
    ),
    *("first_token_seconds", "timed_requests", "slow_first_token_requests", "slow_output_requests"),
)


def test_with_little_traffic_a_wider_margin_of_failures_decides() -> None:
    few = dict.fromkeys(
        ("finished_requests", "truncated_requests", "first_tokens", "first_token_seconds", "timed_requests"), 10 / 240
    )
    noise, wide = np.random.default_rng(1), replace(PLAN, failure_margin=0.05)
    state = AnalysisState(0.0)
    for index in range(1, 16):
        block = ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise, accepted_tokens=1.2, **few), side(noise, **few))
        state = add_block(state, block, wide)
    assert evaluate_analysis(state, wide, 1800.0)[1].outcome == "Promote"
    assert evaluate_analysis(state, PLAN, 1800.0)[1].outcome == "Continue"


def test_a_canary_that_loses_half_of_its_requests_is_not_promoted(messages: Messages) -> None:
    """Half of the canary's clients disconnect before their first token, starting with block 8."""
    noise, state, verdict = np.random.default_rng(1), AnalysisState(0.0), evaluate_analysis(AnalysisState(0.0), PLAN, 0.0)[1]
    for index in range(1, 118):
        change = dict.fromkeys(BEGUN, 0.5) | {"load": 2.0} if index > 7 else {}
        block = ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise, **{"accepted_tokens": 1.2, **change}), side(noise))
        state = add_block(state, block, PLAN)
        state, verdict = evaluate_analysis(state, PLAN, 120.0 * index)
        assert verdict.outcome != "Promote"
    messages.check("half of the requests missing", verdict.message)


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


def test_crashes_roll_back_unless_the_control_crashes_too(messages: Messages) -> None:
    state, _ = run_blocks(14, accepted_tokens=1.2)
    once = add_restarts(state, {"canary-1": 3}, {})
    assert once.crashes.canary_crashes == 1, "older restarts are not counted"
    assert add_restarts(once, {"canary-1": 3}, {}) == once, "nor the same one twice"
    _, verdict = evaluate_analysis(once, PLAN, 1801.0)
    assert verdict.outcome == "Continue"
    messages.check("suspicious crash", verdict.message)
    _, verdict = evaluate_analysis(add_restarts(once, {"canary-1": 4}, {}), PLAN, 1801.0)
    assert verdict.outcome == "Rollback"
    messages.check("crashes", verdict.message)
    both = add_restarts(once, {"canary-1": 4}, {"control-1": 1, "control-2": 1})
    assert evaluate_analysis(both, PLAN, 1801.0)[1].outcome != "Rollback", "where the control crashes too, the cluster does it"


def test_requests_in_flight_at_a_crash_count_as_failed() -> None:
    state, _ = run_blocks(14, accepted_tokens=1.2)
    lost = add_restarts(state, {"a": 1}, {}).share_counts[FAILED_REQUESTS]
    assert lost.canary_events == 5.0, "as many as are on a pod"
    assert lost.canary_total == state.share_counts[FAILED_REQUESTS].canary_total + 5.0


# -------------------------------------------------------------------------------------------------------------- hard stops
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


def test_a_verdict_is_final() -> None:
    state, verdict = run_blocks(120, accepted_tokens=0.9)
    for _ in range(50):
        state = add_block(state, ClosedBlock(0.0, 120.0, side(accepted_tokens=2.0), side()), PLAN)
    assert evaluate_analysis(state, PLAN, 1e6, ["whatever"])[1].message == verdict.message


# ------------------------------------------------------------------------------------------------------------ greedy answers
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


# ----------------------------------------------------------------------------------------------------------- missing data
def test_dropped_blocks_never_promote() -> None:
    state = AnalysisState(0.0)
    for index in range(200):
        state = add_block(state, ClosedBlock(120.0 * index, 120.0 * index + 120, None, side(), {"Stale": 1}), PLAN)
    assert (state.block_count, state.dropped_block_count, state.excluded_pods) == (0, 200, {"Stale": 200})
    assert evaluate_analysis(state, PLAN, 3600.0)[1].outcome == "Continue"
    assert evaluate_analysis(state, PLAN, 14400.0)[1].outcome == "Inconclusive"


def test_too_many_dropped_blocks_are_not_trusted(messages: Messages) -> None:
    noise, state = np.random.default_rng(1), AnalysisState(0.0)
    for index in range(1, 61):
        canary = None if index % 5 == 0 else side(noise, accepted_tokens=1.2)
        dropped = {} if canary else {"Restarted": 1}
        state = add_block(state, ClosedBlock(120.0 * index - 120, 120.0 * index, canary, side(noise), dropped), PLAN)
    _, verdict = evaluate_analysis(state, PLAN, 7200.0)
    assert verdict.outcome == "Continue"
    messages.check("dropped blocks", verdict.message)


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
    state = AnalysisState(0.0)
    for index, (canary, control) in enumerate(blocks, 1):
        state = add_block(state, ClosedBlock(0.0, 120.0 * index, canary, control), plan)
        state, verdict = evaluate_analysis(state, plan, 120.0 * index)
        assert verdict.message.endswith(".")
        assert len(verdict.message) < 4096
        assert AnalysisState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
        counted = sum(1 for canary_arm, control_arm in blocks[:index] if canary_arm and control_arm)
        assert verdict.outcome != "Promote" or counted >= plan.min_blocks


# ------------------------------------------------------------------------------------------------------------- the reasons
def test_the_message_before_the_first_block(messages: Messages) -> None:
    messages.check("no block yet", evaluate_analysis(AnalysisState(0.0), PLAN, 0.0)[1].message)


def test_conditions_with_equal_times_share_one_duration(messages: Messages) -> None:
    _, verdict = run_blocks(4, decode_seconds=1.06, first_token_seconds=1.3, finished_requests=1.0)
    messages.check("unmet conditions with equal times", verdict.message)


def test_the_message_has_the_condition_that_would_decide(messages: Messages) -> None:
    plan = replace(PLAN, dispersions={**PLAN.dispersions, TOKENS_PER_STEP: replace(CALM, variance=0.002)})
    state = AnalysisState(0.0)
    for index in range(1, 21):
        swing = 0.07 * (-1) ** index
        state = add_block(
            state, ClosedBlock(120.0 * index - 120, 120.0 * index, side(accepted_tokens=1.02 + swing), side()), plan
        )
    _, verdict = evaluate_analysis(state, plan, 2400.0)
    messages.check("the first criterion", verdict.message)
    figures = next(row for row in verdict.comparisons if row.metric == TOKENS_PER_STEP)
    assert figures.lower is not None
    assert figures.upper is not None
    assert figures.lower < 0.012 < figures.upper
    assert figures.sample_count == 20


@pytest.mark.parametrize("accepted", [0.98, 0.99, 1.0])
def test_the_bounds_in_the_message_are_those_of_the_status(accepted: float) -> None:
    plan = replace(PLAN, margin=0.001, max_duration_seconds=10_000 * 120.0)
    state, verdict = run_blocks(40, plan, seed=3, accepted_tokens=accepted)
    length = next(row for row in verdict.comparisons if row.metric == TOKENS_PER_STEP)
    bounds = re.findall(r"(?:bounds|to) ([-+][0-9.]+) %", verdict.message)
    if verdict.outcome == "Rollback":
        bounds = re.findall(r"significantly at most ([-+][0-9.]+) %", state.message)
        assert length.upper is not None
        assert float(bounds[0]) == pytest.approx(100 * length.upper, abs=0.06)
    else:
        assert [float(bound) for bound in bounds] == pytest.approx(
            [100 * (length.lower or 0), 100 * (length.upper or 0)], abs=0.06
        )


def test_permanent_differences_of_pods_hide_a_small_margin(messages: Messages) -> None:
    apart = replace(CALM, pod_effect_sd=0.02)
    _, verdict = run_blocks(20, replace(PLAN, dispersions={**PLAN.dispersions, TOKENS_PER_STEP: apart}))
    messages.check("permanent differences of pods", verdict.message)


def test_an_estimate_below_the_margin_needs_more_than_time(messages: Messages) -> None:
    state = AnalysisState(0.0)
    for index in range(1, 7):
        swing = 0.2 * (-1) ** index
        state = add_block(state, ClosedBlock(120.0 * index - 120, 120.0 * index, side(accepted_tokens=0.9 + swing), side()), PLAN)
    messages.check("estimate below the margin", evaluate_analysis(state, PLAN, 720.0)[1].message)


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


@pytest.mark.parametrize(("seconds", "expected"), [(20, "20 s"), (100, "2 min"), (3600, "1 h"), (4800, "1 h 20 min")])
def test_durations(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


# ---------------------------------------------------------------------------------------------------------------- afterwards
def test_guardrails_roll_back_but_never_promote(messages: Messages) -> None:
    noise, state = np.random.default_rng(1), AnalysisState(0.0)
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
    assert check_guardrails(AnalysisState(0.0), PLAN, 1.0, ["It crashes."])[1].message == "It crashes."


def test_bounds_in_the_status_are_those_that_decide() -> None:
    for seed in range(8):
        state, verdict = run_blocks(120, replace(PLAN, min_duration_seconds=0.0), seed, accepted_tokens=1.0 + 0.01 * (seed - 4))
        figures = next(row for row in verdict.comparisons if row.metric == TOKENS_PER_STEP)
        if verdict.outcome == "Promote":
            assert (figures.lower or -1) >= -PLAN.margin
        elif verdict.message.startswith("Tokens per step"):
            assert figures.upper is not None
            assert figures.upper <= 0
        assert state.paired_moments[TOKENS_PER_STEP].count == figures.sample_count
