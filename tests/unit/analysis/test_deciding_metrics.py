"""Which metric decides: tokens per step or time per output token, and latency only under a comparable load."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from aerie.analysis.criteria.criterion import (
    ACCEPTANCE_LENGTH,
    SLOW_TIME_PER_OUTPUT_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    TOKENS_PER_STEP,
)
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.analysis.measurement.counts import SampleProjection
from aerie.analysis.state import add_block
from aerie.analysis.statistics.load_adjustment import LoadCurve
from aerie.analysis.verdict import evaluate_analysis
from tests.golden import Messages
from tests.unit.analysis.simulated_blocks import ADAPTIVE, CALM, NEW_STATE, PLAN, run_blocks, side


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


# -------------------------------------------------------------------------------------------------------------- what drafts give
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


# --------------------------------------------------------------------------------------------------------------- what users feel
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
    noise, state, outcome = np.random.default_rng(2), NEW_STATE, "Continue"
    for index in range(1, 400):
        canary_arm = side(noise, accepted_tokens=1.2, slow_output_requests=float(noise.poisson(canary)) / 6)
        control_arm = side(noise, slow_output_requests=float(noise.poisson(control)) / 6)
        state = add_block(state, ClosedBlock(120.0 * index - 120, 120.0 * index, canary_arm, control_arm), plan)
        state, verdict = evaluate_analysis(state, plan, 120.0 * index)
        outcome = verdict.outcome
        if outcome != "Continue":
            break
    assert (outcome == "Promote") is (expected_outcome == "Promote")
