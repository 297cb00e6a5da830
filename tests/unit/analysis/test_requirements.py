"""What an acceptance needs of each metric, as the status shows it: it never disagrees with the verdict, in any design."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.comparison import Comparison
from aerie.analysis.criteria.plan import AnalysisGoal, AnalysisPlan
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.analysis.measurement.counts import SampleProjection
from aerie.analysis.paired.plan import PairedPlan
from aerie.analysis.paired.state import PairedState, add_batches
from aerie.analysis.paired.verdict import evaluate_pairs
from aerie.analysis.state import AnalysisState, add_block
from aerie.analysis.switchback.plan import SwitchbackPlan
from aerie.analysis.switchback.verdict import evaluate_switchback
from aerie.analysis.verdict import check_guardrails, evaluate_analysis
from tests.unit.analysis.simulated_blocks import ADAPTIVE, NEW_STATE, PLAN, run_blocks, side, stable_pods
from tests.unit.analysis.test_paired_verdict import draw_batch
from tests.unit.analysis.test_switchback import PLAN as TURNS
from tests.unit.analysis.test_switchback import run_trial

gains = st.sampled_from([-0.05, -0.02, -0.01, 0.0, 0.02, 0.09])
slownesses = st.sampled_from([-0.1, -0.03, 0.0, 0.02, 0.1])


def read_requirements(comparisons: Sequence[Comparison]) -> dict[str, tuple[str, bool | None]]:
    """Return requirement and result by metric, of those that have one."""
    for comparison in comparisons:
        assert (comparison.requirement is None) == (comparison.met is None)
    return {each.metric: (each.requirement, each.met) for each in comparisons if each.requirement is not None}


def are_all_met(comparisons: Sequence[Comparison]) -> bool:
    return all(is_met for _, is_met in read_requirements(comparisons).values())


# ----------------------------------------------------------------------------------------------------------- between pods
@given(
    gains,
    slownesses,
    st.sampled_from([1.0, 1.15, 1.3]),
    st.sampled_from([0.0, 4.0]),
    st.sampled_from(["NonInferior", "Superior", "Faster"]),
    st.sampled_from([PLAN, ADAPTIVE]),
    st.sampled_from([None, 0.05]),
)
def test_between_pods_the_verdict_is_that_of_the_requirements(
    gain: float, slowness: float, lateness: float, failures: float, goal: AnalysisGoal, base: AnalysisPlan, edge: float | None
) -> None:
    """Nothing else prevents a promotion here: enough blocks and time, equal loads, no crash."""
    projection = SampleProjection(draft_positions=3, time_per_output_token_edge=edge)
    plan = replace(base, goal=goal, projection=projection, min_duration_seconds=0.0)
    change = {"accepted_tokens": 1 + gain, "decode_seconds": 1 + slowness, "first_token_seconds": lateness}
    change |= {"failed_requests": failures} if failures else {}
    noise, state = np.random.default_rng(1), NEW_STATE
    for index in range(1, 16):
        block = ClosedBlock(120.0 * (index - 1), 120.0 * index, side(noise, **change), side(noise), stable=stable_pods(index))
        state = add_block(state, block, plan)
        state, verdict = evaluate_analysis(state, plan, 120.0 * index)
        if verdict.outcome == "Promote":
            assert are_all_met(verdict.comparisons)
        if verdict.outcome == "Continue" and index >= plan.min_blocks:
            assert not are_all_met(verdict.comparisons)
        if verdict.outcome != "Continue":
            break


def test_between_pods_each_requirement_is_the_limit_of_its_tests() -> None:
    requirements = read_requirements(run_blocks(120)[1].comparisons)
    assert requirements == {
        "TokensPerStep": ("above -2.0 %", True),
        "TimePerOutputToken": ("below +2.5 % on these pods and below +4.0 %", True),
        "TimeToFirstToken": ("below +25.0 %", True),
        "FailedRequests": ("below 2 times control +0.5 points", True),
        "AbandonedRequests": ("below 2 times control +5 points", True),
    }
    objective = replace(PLAN, goal="Superior", projection=SampleProjection(3, 0.05, 1.0))
    requirements = read_requirements(run_blocks(10, objective)[1].comparisons)
    assert requirements["TokensPerStep"] == ("above the control", False)
    assert requirements["TimePerOutputToken"][0] == "measured below +2.5 %"
    assert requirements["SlowTimePerOutputToken"][0] == "below 5.00 % or 1.1 times control"


def test_being_faster_meets_the_requirement_of_tokens_per_step() -> None:
    _, verdict = run_blocks(120, accepted_tokens=0.9, decode_seconds=0.8)
    assert verdict.outcome == "Promote"
    requirement = read_requirements(verdict.comparisons)["TokensPerStep"]
    assert requirement == ("above -2.0 %, replaced by the time per output token", True)


def test_what_decides_no_acceptance_has_no_requirement() -> None:
    """Criteria that only roll back, an exploration, and the comparison after the verdict."""
    state, verdict = run_blocks(120)
    assert "OutputLength" not in read_requirements(verdict.comparisons)
    assert not read_requirements(run_blocks(10, replace(PLAN, goal="Explore"))[1].comparisons)
    assert not read_requirements(check_guardrails(state, PLAN, 9e9)[1].comparisons)


def test_a_share_has_its_requirement_while_the_control_has_no_event() -> None:
    """No ratio to the control exists then; the share is compared all the same."""
    _, verdict = run_blocks(120)
    failed = next(each for each in verdict.comparisons if each.metric == "FailedRequests")
    assert (failed.estimate, failed.met) == (None, True)


def test_an_acceptance_waits_for_more_than_the_requirements() -> None:
    """They are met, and the minimum duration is not over: the message states it."""
    state, verdict = run_blocks(14, accepted_tokens=1.2)
    assert (verdict.outcome, are_all_met(verdict.comparisons)) == ("Continue", True)
    assert "minimum duration" in evaluate_analysis(state, PLAN, 1700.0)[1].message


def test_an_analysis_without_blocks_has_no_comparisons() -> None:
    assert evaluate_analysis(AnalysisState(0.0), PLAN, 0.0)[1].comparisons == ()


# --------------------------------------------------------------------------------------------------------- equal requests
@given(gains, slownesses, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([20, 60, 200, 600]))
def test_of_equal_requests_the_verdict_is_that_of_the_requirements(
    gain: float, slowness: float, same_engine: bool, is_superior: bool, compares_tokens: bool, pairs: int
) -> None:
    plan = PairedPlan(goal="Superior" if is_superior else "NonInferior", same_engine=same_engine, compares_tokens=compares_tokens)
    state = add_batches(PairedState(), "a", [draw_batch(1, pairs, gain, slowness)])
    _, verdict = evaluate_pairs(state, plan, 300.0)
    assert len(read_requirements(verdict.comparisons)) == 1 + compares_tokens
    if verdict.outcome != "Rollback":
        assert (verdict.outcome == "Promote") == are_all_met(verdict.comparisons)


@pytest.mark.parametrize(
    ("plan", "tokens", "time"),
    [
        (PairedPlan(same_engine=True), "above -2.0 %", "below +25.0 % and measured below +2.5 %"),
        (PairedPlan(), "above -2.0 %", "below +32.9 % and measured below +10.4 %"),
        (PairedPlan(goal="Superior", same_engine=True), "above the control's", "below +25.0 % and measured below +2.5 %"),
        (PairedPlan(compares_tokens=False, same_engine=True), None, "below +2.5 %"),
        (PairedPlan(compares_time=False), "above -2.0 %", None),
    ],
)
def test_of_equal_requests_each_requirement_is_the_limit_of_its_test(
    plan: PairedPlan, tokens: str | None, time: str | None
) -> None:
    """The limits of times between two pods are wider by what pods of one GPU model may differ."""
    state = add_batches(PairedState(), "a", [draw_batch(1, 20)])
    steps, seconds = evaluate_pairs(state, plan, 60.0)[1].comparisons
    assert (steps.requirement, seconds.requirement) == (tokens, time)


# --------------------------------------------------------------------------------------------------------------- by turns
@given(gains, slownesses, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([4, 20, 60]))
def test_by_turns_the_verdict_is_that_of_the_requirements(
    gain: float, slowness: float, is_superior: bool, is_accepted: bool, is_deadline: bool, pairs: int
) -> None:
    plan = replace(TURNS, goal="Superior" if is_superior else "NonInferior", is_accepted=is_accepted, is_isolated=True)
    state = run_trial(pairs, 1 + gain, 1 + slowness, plan=plan)
    _, verdict = evaluate_switchback(state, plan, plan.max_duration_seconds if is_deadline else 300.0)
    if is_accepted:
        assert not read_requirements(verdict.comparisons)
    elif verdict.outcome != "Rollback":
        assert (verdict.outcome == "Promote") == are_all_met(verdict.comparisons)


def test_by_turns_each_requirement_is_the_limit_of_its_test() -> None:
    def read(plan: SwitchbackPlan) -> list[str | None]:
        return [each.requirement for each in evaluate_switchback(run_trial(4), plan, 60.0)[1].comparisons]

    assert read(TURNS) == ["above -2.0 %", "below +2.5 %", "below +25.0 %"]
    assert read(replace(TURNS, goal="Superior")) == ["above the stable drafter's", "below +2.5 %", "below +25.0 %"]
