"""Verdicts and their reasons: what promotes, what rolls back, what never does either, and how it is said."""

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
from tests.unit.rollout.world import told

CALM = Dispersion(
    inflation=1.0, variance=0.0001, degrees_of_freedom=20.0, pod_effect_sd=0.0, pod_effect_degrees_of_freedom=7.0, batch_count=24
)
NAMES = [one.name for one in build_criteria(AnalysisPlan())]
TERMS = AnalysisPlan(pod_counts=(1, 1), dispersions=dict.fromkeys(NAMES, CALM))


def side(noise: np.random.Generator | None = None, **change: float) -> ArmCounts:
    """An arm in one block; `change` multiplies a count, or adds to it where that is 0.

    Requests got the tokens that the counters book as accepted, but where `request_steps` is given.
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
    found = replace(base, **names)
    steps = (
        40_000.0 * change["request_steps"]
        if "request_steps" in change
        else 100_000.0 * found.drafts / (found.drafts + found.accepted_tokens)
    )
    return ArmCounts(1, replace(found, request_steps=steps * found.decode_tokens / 100_000.0), load)


def after(blocks: int, terms: AnalysisPlan = TERMS, seed: int = 1, **change: float) -> tuple[AnalysisState, Verdict]:
    """The judgement after so many blocks, or at the first verdict."""
    noise, state, judgement = np.random.default_rng(seed), AnalysisState(0.0), None
    for index in range(1, blocks + 1):
        block = ClosedBlock(120.0 * (index - 1), 120.0 * index, side(noise, **change), side(noise))
        state = add_block(state, block, terms)
        state, judgement = evaluate_analysis(state, terms, 120.0 * index)
        state = AnalysisState.from_dict(json.loads(json.dumps(state.to_dict())))  # as after a crash
        if judgement.outcome != "Continue":
            break
    assert judgement is not None
    return state, judgement


# ---------------------------------------------------------------------------------------------------------------- verdicts
def test_a_better_canary_is_accepted_after_the_soak(messages: Messages) -> None:
    state, judgement = after(14, accepted_tokens=1.2)
    assert judgement.outcome == "Continue"
    messages.check("every criterion passes before the minimum duration", judgement.message)
    state, judgement = after(120, accepted_tokens=1.2)
    assert (judgement.outcome, state.block_count) == ("Promote", 15)
    messages.check("promoted", judgement.message)


def test_a_worse_canary_is_rolled_back_without_a_soak(messages: Messages) -> None:
    state, judgement = after(120, accepted_tokens=0.9)
    assert judgement.outcome == "Rollback"
    assert state.block_count == TERMS.min_blocks
    messages.check("worse", judgement.message)


def test_an_equal_canary_is_accepted_as_not_inferior_but_not_as_superior(messages: Messages) -> None:
    assert after(120)[1].outcome == "Promote"
    superior = replace(TERMS, goal="Superior")
    state, judgement = after(130, superior)
    assert (judgement.outcome, state.block_count) == ("Inconclusive", 120)
    messages.check("equal, goal Superior", judgement.message)
    assert after(130, superior, accepted_tokens=1.03)[1].outcome == "Promote"


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
    _, judgement = after(120, TERMS, 1, accepted_tokens=1.2, **change)
    assert judgement.outcome == "Rollback"
    messages.check(f"harm: {harm}", judgement.message)


def test_objectives_are_judged_by_the_share_beyond_them(messages: Messages) -> None:
    terms = replace(
        TERMS, projection=SampleProjection(draft_positions=3, time_per_output_token_edge=0.05, time_to_first_token_edge=1.0)
    )
    assert after(120, terms)[1].outcome == "Promote"
    _, judgement = after(120, terms, slow_output_requests=3.0)
    assert judgement.outcome == "Rollback"
    messages.check("objective for time per output token", judgement.message)
    messages.check("objective for time to first token", after(120, terms, slow_first_token_requests=3.0)[1].message)


def test_time_is_compared_at_the_controls_output() -> None:
    """A canary that happens to get 15 % more to do takes longer for each token, as any pod would."""
    more = {
        "first_tokens": 1.15,
        "output_tokens": 1.15,
        "decode_tokens": 1.15,
        "finished_requests": 1.15,
        "truncated_requests": 1.15,
    }
    longer = {"decode_seconds": 1.15 * 1.15**0.5}
    trial = replace(TERMS, goal="Faster", drafts_not_comparable_reason="it is a trial.")
    curves = {TIME_PER_OUTPUT_TOKEN: LoadCurve(0.5, 0.0, 100_240 / 120)}
    state, judgement = after(120, trial, 1, **more, **longer)
    assert (judgement.outcome, state.block_count) == ("Rollback", TERMS.min_blocks)
    known = replace(trial, load_curves=curves)
    assert after(60, known, 1, **more, **longer)[1].outcome == "Continue"
    faster = {"decode_seconds": 0.95 * longer["decode_seconds"]}
    assert after(60, known, 1, **more, **faster)[1].outcome == "Promote"
    assert AnalysisPlan.from_dict(json.loads(json.dumps(known.to_dict()))) == known


def test_latency_under_another_load_is_no_evidence(messages: Messages) -> None:
    _, judgement = after(130, decode_seconds=1.5, first_tokens=1.5, load=8.0)
    assert judgement.outcome == "Inconclusive"
    messages.check("latency under another load", judgement.message)
    assert "TimePerOutputToken" not in {one.metric for one in judgement.comparisons}
    assert "TimePerOutputToken" in {one.metric for one in after(130, decode_seconds=1.5, first_tokens=1.5)[1].comparisons}


def test_a_faster_canary_keeps_its_blocks() -> None:
    """It has fewer requests in flight, of as many that came."""
    _, judgement = after(60, decode_seconds=0.4, first_token_seconds=0.5, load=2.0)
    assert judgement.outcome == "Promote"
    assert after(60, decode_seconds=1.5, load=8.0)[1].outcome == "Rollback"


def test_where_acceptance_may_not_be_compared_time_decides(messages: Messages) -> None:
    terms = replace(TERMS, drafts_not_comparable_reason="the canary's number of tokens follows a schedule.")
    _, judgement = after(120, terms, accepted_tokens=0.5)
    assert judgement.outcome == "Promote"
    assert judgement.message.startswith("Time per output token ")
    messages.check("drafts not compared: schedule", judgement.message)
    assert after(120, terms, accepted_tokens=0.5, decode_seconds=1.1)[1].outcome == "Rollback"
    assert after(120, replace(terms, goal="Superior"))[1].outcome != "Promote"
    assert after(120, replace(terms, goal="Superior"), decode_seconds=0.9)[1].outcome == "Promote"


# ------------------------------------------------------------------------------------------------------- what drafts give
BEHIND = 1.05
"""Drafted tokens that the canary's engine books as accepted, by those that it would: 3 % of acceptance length more."""


def test_tokens_behind_a_stop_make_no_canary_better(messages: Messages) -> None:
    """Counters flatter the canary by 3 %; its requests got as many tokens in a step as the control's."""
    superior = replace(TERMS, goal="Superior")
    state, judgement = after(130, superior, accepted_tokens=BEHIND, request_steps=1.0)
    assert judgement.outcome == "Inconclusive"
    messages.check("tokens behind a stop", judgement.message)
    shown = {one.metric: one for one in judgement.comparisons}
    assert shown[ACCEPTANCE_LENGTH].estimate == pytest.approx(0.03, abs=0.003), "people see it"
    assert (shown[ACCEPTANCE_LENGTH].lower, shown[ACCEPTANCE_LENGTH].upper) == (None, None), "it decides nothing"
    assert shown[TOKENS_PER_STEP].upper is not None
    assert state.block_count == 120


def test_tokens_behind_a_stop_hide_no_harm(messages: Messages) -> None:
    """By the counters it is as good; requests get 4 % fewer tokens in a step."""
    _, judgement = after(130, accepted_tokens=1.0, request_steps=1 / 0.96)
    assert judgement.outcome == "Rollback"
    messages.check("tokens behind a stop hide no harm", judgement.message)


def test_with_unlike_numbers_of_tokens_time_decides_and_drafts_are_shown(messages: Messages) -> None:
    """More drafts give more tokens in a step, however bad, and begin at harder places: neither says what users feel."""
    unequal = replace(TERMS, drafts_not_comparable_reason="the canary drafts 5 tokens at a time and the stable revision 3.")
    _, judgement = after(130, unequal, accepted_tokens=0.9, request_steps=1.0)
    assert judgement.outcome == "Promote"
    assert judgement.message.startswith("Time per output token ")
    messages.check("drafts not compared: other K", judgement.message)
    assert {TOKENS_PER_STEP, ACCEPTANCE_LENGTH} < {one.metric for one in judgement.comparisons}
    _, judgement = after(130, unequal, accepted_tokens=1.5, decode_seconds=1.06)
    assert (judgement.outcome, judgement.message[:21]) == ("Rollback", "Time per output token")


ADAPTIVE = replace(TERMS, drafts_not_comparable_reason="both arms verify adaptively, ....", both_adaptive=True)


def test_adaptive_verification_is_judged_by_time_and_compared_while_as_many_are_in_flight(messages: Messages) -> None:
    _, judgement = after(130, ADAPTIVE, accepted_tokens=0.97)
    assert judgement.outcome == "Promote", "a little less may be the load"
    assert judgement.message.startswith("Time per output token ")
    _, judgement = after(130, ADAPTIVE, accepted_tokens=0.7)
    assert judgement.outcome == "Rollback"
    messages.check("adaptive verification", judgement.message)


def test_adaptive_verification_under_more_requests_in_flight_is_not_compared() -> None:
    """As many came and more are in flight, of each of which fewer tokens are verified."""
    _, judgement = after(130, ADAPTIVE, accepted_tokens=0.7, load=8.0)
    assert TOKENS_PER_STEP not in {one.metric for one in judgement.comparisons}
    assert TIME_PER_OUTPUT_TOKEN in {one.metric for one in judgement.comparisons}
    assert judgement.outcome == "Promote"
    assert after(130, ADAPTIVE, accepted_tokens=0.7, load=8.0, decode_seconds=1.1)[1].message.startswith("Time per output token ")


# ------------------------------------------------------------------------------------------------------- what users feel
def test_a_lighter_drafter_that_is_faster_is_accepted_for_that(messages: Messages) -> None:
    """It drafts less well and costs less: each token takes 15 % less time."""
    lighter = {"accepted_tokens": 1 - 0.04 / 0.6, "decode_seconds": 0.85}
    _, judgement = after(130, TERMS, 1, **lighter)
    assert judgement.outcome == "Promote"
    messages.check("faster with fewer tokens per step", judgement.message)
    assert after(130, replace(TERMS, goal="Superior"), 1, **lighter)[1].outcome == "Promote"
    assert after(130, TERMS, 1, **{**lighter, "decode_seconds": 1.0})[1].outcome == "Rollback"


@pytest.mark.parametrize("seconds", [1.035, 1.05])
def test_no_gain_in_drafts_accepts_what_is_slower(seconds: float) -> None:
    assert after(130, accepted_tokens=1.13, decode_seconds=seconds)[1].outcome != "Promote"


@pytest.mark.parametrize("slower", [1.1, 1.3, 2.0, 2.9])
def test_an_objective_takes_no_guard_away(slower: float) -> None:
    """Nobody waits for as long as the objective, and every token takes longer."""
    terms = replace(TERMS, projection=SampleProjection(3, time_per_output_token_edge=0.05), dispersions=TERMS.dispersions)
    _, judgement = after(130, terms, accepted_tokens=1.2, decode_seconds=slower, slow_output_requests=0.0)
    assert judgement.outcome == "Rollback"
    assert judgement.message.startswith("Time per output token ")


@pytest.mark.parametrize(("canary", "control", "verdict"), [(8.0, 8.0, "Promote"), (16.0, 8.0, "Other"), (30.0, 30.0, "Promote")])
def test_an_objective_is_bound_to_its_percentile(canary: float, control: float, verdict: str) -> None:
    """Of 240 requests in a block so many are beyond it; its percentile lets 12 be. Where the control breaks it already, equals
    are let pass."""
    kept = SampleProjection(3, time_per_output_token_edge=0.05)
    terms = replace(
        TERMS,
        projection=kept,
        max_duration_seconds=10 * 86400.0,
        dispersions={**TERMS.dispersions, SLOW_TIME_PER_OUTPUT_TOKEN: CALM},
    )
    noise, state, found = np.random.default_rng(2), AnalysisState(0.0), "Continue"
    for index in range(1, 400):
        mine = side(noise, accepted_tokens=1.2, slow_output_requests=float(noise.poisson(canary)) / 6)
        theirs = side(noise, slow_output_requests=float(noise.poisson(control)) / 6)
        state = add_block(state, ClosedBlock(120.0 * index - 120, 120.0 * index, mine, theirs), terms)
        state, judgement = evaluate_analysis(state, terms, 120.0 * index)
        found = judgement.outcome
        if found != "Continue":
            break
    assert (found == "Promote") is (verdict == "Promote")


# -------------------------------------------------------------------------------------------- what takes itself out of blocks
def test_no_failure_among_few_requests_is_no_certainty(messages: Messages) -> None:
    """Three finished requests in a block: none has failed, and every fiftieth might."""
    few = {
        "finished_requests": 3 / 240,
        "truncated_requests": 3 / 240,
        "first_tokens": 3 / 240,
        "first_token_seconds": 3 / 240,
        "timed_requests": 3 / 240,
    }
    noise, state, judgement = np.random.default_rng(1), AnalysisState(0.0), evaluate_analysis(AnalysisState(0.0), TERMS, 0.0)[1]
    for index in range(1, 120):
        block = ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise, accepted_tokens=1.2, **few), side(noise, **few))
        state = add_block(state, block, TERMS)
        state, judgement = evaluate_analysis(state, TERMS, 120.0 * index)
        assert judgement.outcome == "Continue"
    messages.check("few requests", judgement.message)


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
    noise, wide = np.random.default_rng(1), replace(TERMS, failure_margin=0.05)
    state = AnalysisState(0.0)
    for index in range(1, 16):
        block = ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise, accepted_tokens=1.2, **few), side(noise, **few))
        state = add_block(state, block, wide)
    assert evaluate_analysis(state, wide, 1800.0)[1].outcome == "Promote"
    assert evaluate_analysis(state, TERMS, 1800.0)[1].outcome == "Continue"


def test_overload_does_not_take_itself_out_of_the_evidence(messages: Messages) -> None:
    """From the 8th block on half the canary's clients give up before their first token: it begins half as many requests."""
    noise, state, judgement = np.random.default_rng(1), AnalysisState(0.0), evaluate_analysis(AnalysisState(0.0), TERMS, 0.0)[1]
    for index in range(1, 118):
        gone = dict.fromkeys(BEGUN, 0.5) | {"load": 2.0} if index > 7 else {}
        block = ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise, **{"accepted_tokens": 1.2, **gone}), side(noise))
        state = add_block(state, block, TERMS)
        state, judgement = evaluate_analysis(state, TERMS, 120.0 * index)
        assert judgement.outcome != "Promote"
    messages.check("half of the requests missing", judgement.message)


def test_far_later_first_tokens_stop_it_at_once_though_it_gets_fewer_requests(messages: Messages) -> None:
    later = {"first_tokens": 0.5, "first_token_seconds": 10.0, "load": 2.0}
    state, judgement = after(120, TERMS, 1, **later)
    assert (judgement.outcome, state.block_count) == ("Rollback", 2)
    messages.check("far later first tokens", judgement.message)
    few = {"first_tokens": 19 / 240, "first_token_seconds": 2.0}
    assert after(2, TERMS, 1, **few)[0].slow_first_token_streak == 0


def test_a_canary_that_finishes_nothing_that_it_holds_is_stopped_at_once(messages: Messages) -> None:
    """Its clients give up before the first token: there is no count of it at all but that it holds requests."""
    state = AnalysisState(0.0)
    for index in range(2):
        idle = ArmCounts(1, EngineCounts(), 3.0)
        state = add_block(state, ClosedBlock(240.0 * index, 240.0 * index + 240, idle, side()), TERMS)
    _, judgement = evaluate_analysis(state, TERMS, 480.0)
    assert judgement.outcome == "Rollback"
    messages.check("stalled", judgement.message)
    without = add_block(AnalysisState(0.0), ClosedBlock(0.0, 240.0, ArmCounts(1, EngineCounts(), 0.0), side()), TERMS)
    assert without.stalled_streak == 0, "nothing is sent to it"


def test_processes_that_end_are_evidence(messages: Messages) -> None:
    state, _ = after(14, accepted_tokens=1.2)
    once = add_restarts(state, {"canary-1": 3}, {})
    assert once.crashes.canary_crashes == 1, "older restarts are not counted"
    assert add_restarts(once, {"canary-1": 3}, {}) == once, "nor the same one twice"
    _, judgement = evaluate_analysis(once, TERMS, 1801.0)
    assert judgement.outcome == "Continue"
    messages.check("suspicious crash", judgement.message)
    _, judgement = evaluate_analysis(add_restarts(once, {"canary-1": 4}, {}), TERMS, 1801.0)
    assert judgement.outcome == "Rollback"
    messages.check("crashes", judgement.message)
    both = add_restarts(once, {"canary-1": 4}, {"control-1": 1, "control-2": 1})
    assert evaluate_analysis(both, TERMS, 1801.0)[1].outcome != "Rollback", "where the control crashes too, the cluster does it"


def test_what_was_running_when_a_process_ended_has_failed() -> None:
    state, _ = after(14, accepted_tokens=1.2)
    lost = add_restarts(state, {"a": 1}, {}).share_counts[FAILED_REQUESTS]
    assert lost.canary_events == 5.0, "as many as are on a pod"
    assert lost.canary_total == state.share_counts[FAILED_REQUESTS].canary_total + 5.0


# -------------------------------------------------------------------------------------------------------------- hard stops
def test_what_cannot_work_is_stopped_at_once() -> None:
    state, judgement = evaluate_analysis(AnalysisState(0.0), TERMS, 30.0, ["Pod a of the canary crashes again and again."])
    assert (judgement.outcome, judgement.message) == ("Rollback", "Pod a of the canary crashes again and again.")
    assert state.outcome == "Rollback"


def test_no_accepted_token_in_two_blocks(messages: Messages) -> None:
    state, judgement = after(120, accepted_tokens=0.0)
    assert (judgement.outcome, state.block_count) == ("Rollback", 2)
    messages.check("no accepted tokens", judgement.message)


def test_that_none_of_a_few_drafts_is_accepted_is_chance() -> None:
    """A schedule hardly drafts in a busy hour."""
    many = side()
    for drafts, stopped in ((49.0, False), (50.0, True)):
        few = replace(many, counts=replace(many.counts, drafts=drafts, accepted_tokens=0.0))
        state = AnalysisState(0.0)
        for index in range(2):
            state = add_block(state, ClosedBlock(120.0 * index, 120.0 * index + 120, few, many), TERMS)
        assert (state.zero_acceptance_streak == 2) is stopped


SLOWER, UNLIKE = {"decode_seconds": 3.1}, {"first_tokens": 1.5, "load": 7.5}


def slow_after(*canaries: dict[str, float], terms: AnalysisPlan = TERMS) -> list[int]:
    """The counter after each block, with the canary's changes in it."""
    state, found = AnalysisState(0.0), []
    for index, change in enumerate(canaries, 1):
        state = add_block(state, ClosedBlock(120.0 * index - 120, 120.0 * index, side(None, **change), side()), terms)
        found.append(state.slow_output_streak)
    return found


def test_more_than_three_times_as_slow_in_two_blocks(messages: Messages) -> None:
    state, judgement = after(1, decode_seconds=5.0)
    assert (judgement.outcome, state.slow_output_streak) == ("Continue", 1)
    state, judgement = after(120, decode_seconds=5.0)
    assert (judgement.outcome, state.block_count) == ("Rollback", 2)
    messages.check("far slower", judgement.message)
    assert state.block_count < TERMS.min_blocks
    state, judgement = after(120, decode_seconds=2.5)  # slower too, but for the bounds to say
    assert (judgement.outcome, state.block_count) == ("Rollback", TERMS.min_blocks)
    assert judgement.message.startswith("Time per output token +1")


@pytest.mark.parametrize("goal", ["NonInferior", "Superior", "Faster", "Explore"])
def test_far_slower_is_far_slower_whatever_it_is_to_show(goal: AnalysisGoal, messages: Messages) -> None:
    state, judgement = after(120, replace(TERMS, goal=goal), decode_seconds=5.0)
    assert (judgement.outcome, state.block_count) == ("Rollback", 2)
    messages.check("far slower", judgement.message)


def test_a_growing_share_is_stopped_for_it_too(messages: Messages) -> None:
    state = add_block(AnalysisState(0.0), ClosedBlock(0.0, 120.0, side(decode_seconds=5.0), side()), TERMS)
    state, judgement = check_guardrails(state, TERMS, 120.0)
    assert judgement.outcome == "Continue"
    state = add_block(state, ClosedBlock(120.0, 240.0, side(decode_seconds=5.0), side()), TERMS)
    state, judgement = check_guardrails(state, TERMS, 240.0)
    assert judgement.outcome == "Rollback"
    messages.check("far slower", judgement.message)


def test_far_slower_begins_above_three_times() -> None:
    assert slow_after(*[{"decode_seconds": 2.9}] * 4) == [0, 0, 0, 0]
    assert slow_after(*[{"decode_seconds": ABORT_TIME_PER_OUTPUT_TOKEN_RATIO}] * 2) == [0, 0]
    assert slow_after(SLOWER, SLOWER) == [1, 2]
    assert slow_after({"decode_seconds": 3.1, "decode_tokens": 1.1}) == [0]


def test_a_block_that_is_not_far_slower_begins_the_count_anew() -> None:
    assert slow_after(SLOWER, {}, SLOWER, SLOWER) == [1, 0, 1, 2]
    assert slow_after(SLOWER, {"decode_tokens": 0.0}, SLOWER) == [1, 0, 1]


def test_no_time_of_the_controls_is_none_to_be_slower_than() -> None:
    for missing in ({"decode_tokens": 0.0}, {"decode_seconds": 0.0}):
        block = ClosedBlock(0.0, 120.0, side(decode_seconds=5.0), side(None, **missing))
        assert add_block(AnalysisState(0.0), block, TERMS).slow_output_streak == 0


def test_a_block_with_unlike_loads_leaves_the_count_as_it_is() -> None:
    assert slow_after(SLOWER, SLOWER | UNLIKE, SLOWER) == [1, 1, 2]
    assert slow_after(SLOWER, UNLIKE, SLOWER) == [1, 1, 2]
    assert slow_after(*[SLOWER | UNLIKE | {"first_tokens": 2.0, "load": 9.0}] * 4) == [0, 0, 0, 0]


def test_a_dropped_block_leaves_the_count_as_it_is() -> None:
    state = add_block(AnalysisState(0.0), ClosedBlock(0.0, 120.0, side(decode_seconds=5.0), side()), TERMS)
    assert add_block(state, ClosedBlock(120.0, 240.0, None, side()), TERMS).slow_output_streak == 1


def test_far_slower_is_meant_as_measured() -> None:
    """A curve near saturation would make more of a difference in load than there is."""
    idler = {"decode_seconds": 2.0 * 0.85, "decode_tokens": 0.85, "output_tokens": 0.85}
    known = replace(TERMS, load_curves={TIME_PER_OUTPUT_TOKEN: LoadCurve(3.0, 0.0, 100_240 / 120)})
    assert slow_after(idler, idler, terms=known) == [0, 0]


def test_a_verdict_stays() -> None:
    state, judgement = after(120, accepted_tokens=0.9)
    for _ in range(50):
        state = add_block(state, ClosedBlock(0.0, 120.0, side(accepted_tokens=2.0), side()), TERMS)
    assert evaluate_analysis(state, TERMS, 1e6, ["whatever"])[1].message == judgement.message


# ------------------------------------------------------------------------------------------------------------ greedy answers
def test_a_canary_that_changes_answers_is_rolled_back_without_a_block(messages: Messages) -> None:
    state, judgement = evaluate_analysis(replace(AnalysisState(0.0), equivalence=told(10)), TERMS, 1.0)
    assert (judgement.outcome, state.outcome) == ("Rollback", "Rollback")
    messages.check("outputs changed", judgement.message)
    (shown,) = judgement.comparisons
    assert (shown.metric, shown.sample_count, shown.estimate) == ("OutputEquivalence", 24, None)


@pytest.mark.parametrize("answers", [told(9), told(12, 1), told(0, 24), EquivalenceResult(prompt_count=24, skip_reason="x")])
def test_answers_that_equal_engines_could_give_keep_nobody_from_being_accepted(answers: EquivalenceResult) -> None:
    state, _ = after(14, accepted_tokens=1.2)
    _, judgement = evaluate_analysis(replace(state, equivalence=answers), TERMS, 1801.0)
    assert judgement.outcome == "Promote"
    assert judgement.comparisons[-1].message == answers.message


def test_another_attempt_asks_for_more_certainty_of_the_answers_too() -> None:
    again = replace(TERMS, inconclusive_attempts=1)
    assert evaluate_analysis(replace(AnalysisState(0.0), equivalence=told(10)), again, 1.0)[1].outcome == "Continue"
    assert evaluate_analysis(replace(AnalysisState(0.0), equivalence=told(11)), again, 1.0)[1].outcome == "Rollback"


@pytest.mark.parametrize(
    ("case", "terms", "answers"),
    [
        ("no result", TERMS, None),
        ("skipped", replace(TERMS, equivalence_skip_reason="no why"), None),
        ("failed", TERMS, EquivalenceResult(prompt_count=24, skip_reason="the key is missing")),
        ("equal", TERMS, told(0)),
    ],
)
def test_what_was_accepted_without_the_answers_says_so(
    case: str, terms: AnalysisPlan, answers: EquivalenceResult | None, messages: Messages
) -> None:
    state, _ = after(14, accepted_tokens=1.2)
    judgement = evaluate_analysis(replace(state, equivalence=answers), terms, 1801.0)[1]
    messages.check(f"promoted, output equivalence: {case}", judgement.message)


# ----------------------------------------------------------------------------------------------------------- missing data
def test_nothing_counted_never_promotes() -> None:
    state = AnalysisState(0.0)
    for index in range(200):
        state = add_block(state, ClosedBlock(120.0 * index, 120.0 * index + 120, None, side(), {"Stale": 1}), TERMS)
    assert (state.block_count, state.dropped_block_count, state.excluded_pods) == (0, 200, {"Stale": 200})
    assert evaluate_analysis(state, TERMS, 3600.0)[1].outcome == "Continue"
    assert evaluate_analysis(state, TERMS, 14400.0)[1].outcome == "Inconclusive"


def test_too_many_dropped_blocks_are_not_trusted(messages: Messages) -> None:
    noise, state = np.random.default_rng(1), AnalysisState(0.0)
    for index in range(1, 61):
        canary = None if index % 5 == 0 else side(noise, accepted_tokens=1.2)
        dropped = {} if canary else {"Restarted": 1}
        state = add_block(state, ClosedBlock(120.0 * index - 120, 120.0 * index, canary, side(noise), dropped), TERMS)
    _, judgement = evaluate_analysis(state, TERMS, 7200.0)
    assert judgement.outcome == "Continue"
    messages.check("dropped blocks", judgement.message)


numbers = st.integers(0, 10**6).map(float)
sides = st.none() | st.builds(
    ArmCounts,
    st.integers(1, 3),
    st.builds(EngineCounts, *[numbers] * 15),
    st.none() | st.floats(0, 100),
)


@settings(deadline=None)
@given(st.lists(st.tuples(sides, sides), max_size=12), st.booleans())
def test_whatever_is_counted_there_is_a_verdict_and_a_sentence(
    blocks: list[tuple[ArmCounts | None, ArmCounts | None]], known: bool
) -> None:
    terms = TERMS if known else AnalysisPlan()
    state = AnalysisState(0.0)
    for index, (canary, control) in enumerate(blocks, 1):
        state = add_block(state, ClosedBlock(0.0, 120.0 * index, canary, control), terms)
        state, judgement = evaluate_analysis(state, terms, 120.0 * index)
        assert judgement.message.endswith(".")
        assert len(judgement.message) < 4096
        assert AnalysisState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
        counted = sum(1 for mine, theirs in blocks[:index] if mine and theirs)
        assert judgement.outcome != "Promote" or counted >= terms.min_blocks


# ------------------------------------------------------------------------------------------------------------- the reasons
def test_before_the_first_block_nothing_is_said_to_be_missing(messages: Messages) -> None:
    messages.check("no block yet", evaluate_analysis(AnalysisState(0.0), TERMS, 0.0)[1].message)


def test_what_takes_equally_long_is_said_once(messages: Messages) -> None:
    _, judgement = after(4, decode_seconds=1.06, first_token_seconds=1.3, finished_requests=1.0)
    messages.check("unmet conditions with equal times", judgement.message)


def test_the_reason_says_what_would_decide_it(messages: Messages) -> None:
    terms = replace(TERMS, dispersions={**TERMS.dispersions, TOKENS_PER_STEP: replace(CALM, variance=0.002)})
    state = AnalysisState(0.0)
    for index in range(1, 21):
        swing = 0.07 * (-1) ** index
        state = add_block(
            state, ClosedBlock(120.0 * index - 120, 120.0 * index, side(accepted_tokens=1.02 + swing), side()), terms
        )
    _, judgement = evaluate_analysis(state, terms, 2400.0)
    messages.check("the first criterion", judgement.message)
    figures = next(one for one in judgement.comparisons if one.metric == TOKENS_PER_STEP)
    assert figures.lower is not None
    assert figures.upper is not None
    assert figures.lower < 0.012 < figures.upper
    assert figures.sample_count == 20


@pytest.mark.parametrize("accepted", [0.98, 0.99, 1.0])
def test_the_bounds_in_the_sentence_are_those_of_the_status(accepted: float) -> None:
    terms = replace(TERMS, margin=0.001, max_duration_seconds=10_000 * 120.0)
    state, judgement = after(40, terms, seed=3, accepted_tokens=accepted)
    length = next(one for one in judgement.comparisons if one.metric == TOKENS_PER_STEP)
    told = re.findall(r"(?:bounds|to) ([-+][0-9.]+) %", judgement.message)
    if judgement.outcome == "Rollback":
        told = re.findall(r"significantly at most ([-+][0-9.]+) %", state.message)
        assert length.upper is not None
        assert float(told[0]) == pytest.approx(100 * length.upper, abs=0.06)
    else:
        assert [float(one) for one in told] == pytest.approx([100 * (length.lower or 0), 100 * (length.upper or 0)], abs=0.06)


def test_pods_that_differ_for_good_cannot_show_a_small_margin(messages: Messages) -> None:
    apart = replace(CALM, pod_effect_sd=0.02)
    _, judgement = after(20, replace(TERMS, dispersions={**TERMS.dispersions, TOKENS_PER_STEP: apart}))
    messages.check("permanent differences of pods", judgement.message)


def test_an_estimate_below_the_margin_needs_more_than_time(messages: Messages) -> None:
    state = AnalysisState(0.0)
    for index in range(1, 7):
        swing = 0.2 * (-1) ** index
        state = add_block(
            state, ClosedBlock(120.0 * index - 120, 120.0 * index, side(accepted_tokens=0.9 + swing), side()), TERMS
        )
    messages.check("estimate below the margin", evaluate_analysis(state, TERMS, 720.0)[1].message)


def test_alphas_of_rolling_back_add_up_to_five_percent_and_halve_with_each_attempt() -> None:
    def alphas(terms: AnalysisPlan) -> float:
        rejected = math.fsum(test.alpha for one in build_criteria(terms) for test in one.rollback_tests)
        return rejected + failed_requests_alpha(terms) + crashes_alpha(terms)

    for terms in (
        TERMS,
        replace(TERMS, projection=SampleProjection(3, 0.05, 1.0)),
        replace(TERMS, drafts_not_comparable_reason="x."),
        ADAPTIVE,
    ):
        assert alphas(terms) + equivalence.EQUIVALENCE_ALPHA <= 0.05 + 1e-12
        assert alphas(replace(terms, inconclusive_attempts=1)) == pytest.approx(alphas(terms) / 2)
        assert {test.alpha for one in build_criteria(replace(terms, inconclusive_attempts=1)) for test in one.promote_tests} == {
            0.025
        }


def test_terms_survive_a_crash() -> None:
    terms = replace(TERMS, projection=SampleProjection(3, 0.05, None), inconclusive_attempts=2, drafts_not_comparable_reason="x.")
    assert AnalysisPlan.from_dict(json.loads(json.dumps(terms.to_dict()))) == terms


@pytest.mark.parametrize(("seconds", "said"), [(20, "20 s"), (100, "2 min"), (3600, "1 h"), (4800, "1 h 20 min")])
def test_durations(seconds: float, said: str) -> None:
    assert format_duration(seconds) == said


# ---------------------------------------------------------------------------------------------------------------- afterwards
def test_a_growing_share_is_only_watched(messages: Messages) -> None:
    noise, state = np.random.default_rng(1), AnalysisState(0.0)
    judgement = check_guardrails(state, TERMS, 0.0)[1]
    for index in range(1, 121):
        state = add_block(state, ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise), side(noise)), TERMS)
        state, judgement = check_guardrails(state, TERMS, 120.0 * index)
        assert judgement.outcome == "Continue"
    messages.check("no regression", judgement.message)
    for index in range(121, 240):
        state = add_block(state, ClosedBlock(0.0, 120.0 * index, side(noise, accepted_tokens=0.8), side(noise)), TERMS)
    state, judgement = check_guardrails(state, TERMS, 30_000.0)
    assert judgement.outcome == "Rollback"
    assert check_guardrails(state, TERMS, 40_000.0)[1] == judgement
    assert check_guardrails(AnalysisState(0.0), TERMS, 1.0, ["It crashes."])[1].message == "It crashes."


def test_bounds_in_the_status_are_those_that_decide() -> None:
    for seed in range(8):
        state, judgement = after(120, replace(TERMS, min_duration_seconds=0.0), seed, accepted_tokens=1.0 + 0.01 * (seed - 4))
        figures = next(one for one in judgement.comparisons if one.metric == TOKENS_PER_STEP)
        if judgement.outcome == "Promote":
            assert (figures.lower or -1) >= -TERMS.margin
        elif judgement.message.startswith("Tokens per step"):
            assert figures.upper is not None
            assert figures.upper <= 0
        assert state.paired_moments[TOKENS_PER_STEP].count == figures.sample_count
