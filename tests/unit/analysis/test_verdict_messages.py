"""Messages of verdicts: the condition that would decide, with the bounds of the status, and how long it takes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from aerie.analysis.criteria.criterion import TOKENS_PER_STEP
from aerie.analysis.formatting import format_duration
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.analysis.state import add_block
from aerie.analysis.verdict import evaluate_analysis
from tests.golden import Messages
from tests.unit.analysis.simulated_blocks import CALM, NEW_STATE, PLAN, run_blocks, side


def test_the_message_before_the_first_block(messages: Messages) -> None:
    messages.check("no block yet", evaluate_analysis(NEW_STATE, PLAN, 0.0)[1].message)


def test_conditions_with_equal_times_share_one_duration(messages: Messages) -> None:
    _, verdict = run_blocks(4, decode_seconds=1.06, first_token_seconds=1.3, finished_requests=1.0)
    messages.check("unmet conditions with equal times", verdict.message)


def test_the_message_has_the_condition_that_would_decide(messages: Messages) -> None:
    plan = replace(PLAN, dispersions={**PLAN.dispersions, TOKENS_PER_STEP: replace(CALM, variance=0.002)})
    state = NEW_STATE
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


def test_permanent_differences_of_pods_hide_a_small_margin(messages: Messages) -> None:
    apart = replace(CALM, pod_effect_sd=0.02)
    _, verdict = run_blocks(20, replace(PLAN, dispersions={**PLAN.dispersions, TOKENS_PER_STEP: apart}))
    messages.check("permanent differences of pods", verdict.message)


def test_an_estimate_below_the_margin_needs_more_than_time(messages: Messages) -> None:
    state = NEW_STATE
    for index in range(1, 7):
        swing = 0.2 * (-1) ** index
        state = add_block(state, ClosedBlock(120.0 * index - 120, 120.0 * index, side(accepted_tokens=0.9 + swing), side()), PLAN)
    messages.check("estimate below the margin", evaluate_analysis(state, PLAN, 720.0)[1].message)


@pytest.mark.parametrize(("seconds", "expected"), [(20, "20 s"), (100, "2 min"), (3600, "1 h"), (4800, "1 h 20 min")])
def test_durations(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected
