"""A trial by turns: windows are counted once, in whatever order they come, and the verdict follows from the evidence."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.measurement.codec import pack, unpack
from aerie.analysis.measurement.counts import EngineCounts
from aerie.analysis.reference import AcceptanceCounts
from aerie.analysis.statistics.crash_rate import CrashCounts
from aerie.analysis.switchback.carryover import carried_shares, estimate_carryover, shown_share
from aerie.analysis.switchback.design import Window, WindowSchedule, drafter_in_window
from aerie.analysis.switchback.plan import TOKENS_PER_STEP, TOKENS_PER_STEP_CRITERION, SwitchbackPlan, WindowCounts
from aerie.analysis.switchback.state import SwitchbackState, add_window, close_pair, start_trial, weighted_costs
from aerie.analysis.switchback.verdict import MIN_QUIET_PAIRS, evaluate_switchback

PLAN = SwitchbackPlan("seed", WindowSchedule(5.0, 30.0))
COUNTS = st.builds(
    WindowCounts,
    decode_tokens=st.floats(1.0, 1e5),
    request_steps=st.floats(1.0, 1e5),
    decode_seconds=st.floats(0.01, 1e4),
    first_tokens=st.floats(1.0, 1e3),
    first_token_seconds=st.floats(0.01, 1e3),
    finished_requests=st.integers(0, 100).map(float),
    drafts=st.integers(0, 1000).map(float),
    accepted_tokens=st.integers(0, 3000).map(float),
)
WINDOWS = st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 9)), st.one_of(st.none(), COUNTS), max_size=40)
"""Counts of windows, by pod and window number."""


def close_pairs(state: SwitchbackState, numbers: Iterable[int], pods: Iterable[int] = range(4)) -> SwitchbackState:
    for number in numbers:
        state = close_pair(state, PLAN, number, pods)
    return state


def window_counts(drafter: str, noise: float = 1.0, gain: float = 1.0, slowdown: float = 1.0) -> WindowCounts:
    """Return the counts of a window of 30 requests; the canary has `gain` in tokens per step and `slowdown` in time."""
    is_canary = drafter == "canary"
    steps = 1000.0 * noise / (gain if is_canary else 1.0)
    return WindowCounts(2400.0, steps, 0.02 * steps * (slowdown if is_canary else 1.0), 30.0, 1.5, 30.0)


def run_trial(
    pairs: int,
    gain: float = 1.0,
    slowdown: float = 1.0,
    pods: int = 2,
    plan: SwitchbackPlan = PLAN,
    failures: float = 0.0,
    time_sd: float = 0.0,
) -> SwitchbackState:
    """Return the state after a trial in which windows differ by 3 % at random, and times by `time_sd` more."""
    noise, state = random.Random(1), SwitchbackState()  # noqa: S311 - noise of a test
    for pair in range(pairs):
        for pod in range(pods):
            for window in (2 * pair, 2 * pair + 1):
                drafter = drafter_in_window(plan.seed, pod, window)
                counts = window_counts(drafter, noise.gauss(1, 0.03), gain, slowdown)
                if time_sd:
                    counts = replace(counts, decode_seconds=counts.decode_seconds * noise.lognormvariate(0, time_sd))
                if drafter == "canary":
                    counts = replace(counts, failed_requests=failures)
                state = add_window(state, pod, window, counts)
        state = close_pair(state, plan, pair, range(pods))
    return state


# -------------------------------------------------------------------------------------------------------------------- state
@given(WINDOWS, st.randoms())
def test_the_order_of_windows_and_duplicates_change_nothing(
    windows: dict[tuple[int, int], WindowCounts | None], shuffler: random.Random
) -> None:
    once = SwitchbackState()
    for (pod, number), counts in windows.items():
        once = add_window(once, pod, number, counts)
    shuffled = [*windows.items(), *windows.items()]
    shuffler.shuffle(shuffled)
    twice = SwitchbackState()
    for (pod, number), counts in shuffled:
        twice = add_window(twice, pod, number, counts)
    once, twice = close_pairs(once, range(5)), close_pairs(twice, (0, 0, 1, 2, 1, 3, 4))
    assert once == twice
    for (pod, number), counts in windows.items():
        assert add_window(once, pod, number, counts) is once


@given(WINDOWS, st.integers(0, 4))
def test_a_trial_resumes_from_its_saved_state(windows: dict[tuple[int, int], WindowCounts | None], saved_at: int) -> None:
    """The operator ends after some pair: the saved state, with windows repeated after the restart, gives the same result."""
    state = SwitchbackState()
    for (pod, number), counts in windows.items():
        state = add_window(state, pod, number, counts)
    saved = unpack(pack(close_pairs(state, range(saved_at)).to_dict()))
    resumed = SwitchbackState.from_dict(saved)
    assert resumed == close_pairs(state, range(saved_at))
    for (pod, number), counts in windows.items():
        resumed = add_window(resumed, pod, number, counts)
    assert close_pairs(resumed, range(5)) == close_pairs(state, range(5))


def test_the_first_result_of_a_window_is_final() -> None:
    state = add_window(SwitchbackState(), 0, 3, None)
    assert add_window(state, 0, 3, window_counts("stable")) is state


def test_a_pair_without_both_windows_is_lost_and_the_partner_counts() -> None:
    state = SwitchbackState()
    for pod, number in ((0, 0), (1, 0), (1, 1)):
        state = add_window(state, pod, number, window_counts(drafter_in_window(PLAN.seed, pod, number), gain=1.1))
    state = close_pair(state, PLAN, 0, (0, 1))
    assert (state.counted_pairs, state.lost_pairs, state.tests["EnoughTokens"].units) == (1, 1, 1)
    assert state.open_windows == {}


def test_pairs_that_no_operator_closed_are_dropped() -> None:
    state = add_window(SwitchbackState(), 0, 0, window_counts("stable"))
    state = close_pair(state, PLAN, 4, ())
    assert (state.closed_pair_count, state.counted_pairs, state.lost_pairs, state.open_windows) == (5, 0, 0, {})


def test_crashes_count_for_the_drafter_of_their_window() -> None:
    state = add_window(SwitchbackState(), 0, 0, None, restarts=2)
    crashes = close_pair(state, PLAN, 0, (0,)).crashes
    drafter = drafter_in_window(PLAN.seed, 0, 0)
    assert (crashes.canary_crashes, crashes.control_crashes) == ((2, 0) if drafter == "canary" else (0, 2))
    assert crashes.canary_pod_hours == crashes.control_pod_hours == pytest.approx(5 / 3600)


def test_windows_without_requests_are_no_evidence() -> None:
    state = SwitchbackState()
    for number in (0, 1):
        state = add_window(state, 0, number, WindowCounts())
    state = close_pair(state, PLAN, 0, (0,))
    assert (state.counted_pairs, state.tests["EnoughTokens"].units, dict(state.moments)) == (1, 0, {})
    assert evaluate_switchback(state, PLAN, 10.0)[1].outcome == "Continue"


def test_a_state_and_a_plan_are_json() -> None:
    state = run_trial(3)
    assert SwitchbackState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert SwitchbackPlan.from_dict(json.loads(json.dumps(PLAN.to_dict()))) == PLAN
    assert len(pack(run_trial(200).to_dict())) < 4000


def test_counts_of_an_engine_are_those_of_a_window() -> None:
    counts = EngineCounts(decode_tokens=5.0, request_steps=2.0, failed_requests=1.0, drafts=9.0, iterations=3.0)
    assert WindowCounts.from_engine_counts(counts) == WindowCounts(5.0, 2.0, failed_requests=1.0, drafts=9.0)


def test_the_acceptance_of_the_canary_is_that_of_its_counted_windows() -> None:
    """Those of the stable drafter, and of lost pairs, are not in it."""
    state, lengths = SwitchbackState(), {"canary": 3.0, "stable": 2.0}
    for pair in range(4):
        for number in (2 * pair, 2 * pair + 1):
            accepted = lengths[drafter_in_window(PLAN.seed, 0, number)] - 1
            counts = WindowCounts(first_tokens=50.0, drafts=500.0, accepted_tokens=500.0 * accepted)
            state = add_window(state, 0, number, None if number == 1 else counts)
        state = close_pair(state, PLAN, pair, (0,))
    assert state.canary_acceptance == AcceptanceCounts(150.0, 1500.0, 3000.0)
    assert state.canary_acceptance.reference_length == 3.0


def test_a_state_of_a_release_without_acceptance_is_read() -> None:
    document = json.loads(json.dumps(add_window(run_trial(3), 0, 6, window_counts("canary")).to_dict()))
    del document["canary_acceptance"]
    document["open_windows"] = {key: [counts[:7], restarts] for key, (counts, restarts) in document["open_windows"].items()}
    state = SwitchbackState.from_dict(document)
    assert (state.counted_pairs, state.canary_acceptance) == (6, AcceptanceCounts())
    assert state.open_windows["6/0"].counts == window_counts("canary")


@given(COUNTS, COUNTS, st.floats(0.5, 2.0))
def test_the_score_is_antisymmetric_where_the_canary_is_at_the_ratio(
    first: WindowCounts, second: WindowCounts, ratio: float
) -> None:
    """The same two windows in both orders, if the canary takes 1 / ratio of the steps."""

    def score(canary: WindowCounts, stable: WindowCounts) -> float:
        improved = replace(canary, request_steps=canary.request_steps / ratio)
        upper, lower = weighted_costs(TOKENS_PER_STEP_CRITERION, improved, stable)
        return upper - ratio * lower

    assert score(first, second) == pytest.approx(-score(second, first), rel=1e-6, abs=1e-6)


# --------------------------------------------------------------------------------------------------------------- carry-over
def test_long_windows_show_nearly_all_of_an_effect_and_short_ones_nothing() -> None:
    long, short = Window(0, 0.0, 60.0, 20.0), Window(0, 0.0, 10.0, 3.0)
    assert shown_share(long, 30.0, is_repeat=True) == pytest.approx(0.958, abs=0.001)
    assert shown_share(long, 30.0, is_repeat=False) == pytest.approx(0.917, abs=0.001)
    assert shown_share(short, 30.0, is_repeat=True) == 0.0
    assert shown_share(Window(0, 0.0, 90.0, 30.0), 30.0, is_repeat=False) == 1.0


@given(st.floats(15.0, 120.0), st.booleans())
def test_the_shown_share_is_that_of_a_straight_course(length: float, is_repeat: bool) -> None:
    """Against a sum over the moments of both windows: four windows of equal length, the drafters as drawn."""
    carryover, window = 30.0, Window(0, 0.0, length, length / 3)
    first = 1.0 if is_repeat else 0.0  # the canary's pair, after windows with the stable drafter and the canary
    drafters = (0.0, 1.0, first, 1.0 - first)

    def level(time: float) -> float:
        steps = 300
        moments = (time - carryover * (step + 0.5) / steps for step in range(steps))
        return sum(drafters[max(0, int(moment // length))] for moment in moments) / steps

    def mean(number: int) -> float:
        moments = (number * length + length / 3 + length * 2 / 3 * (step + 0.5) / 60 for step in range(60))
        return sum(level(moment) for moment in moments) / 60

    effect = (mean(2) - mean(3)) * (1 if is_repeat else -1)
    assert shown_share(window, carryover, is_repeat=is_repeat) == pytest.approx(max(0.0, effect), abs=0.02)
    assert sum(carried_shares(window, carryover)) < 1


def test_a_carryover_is_measured() -> None:
    noise, state = random.Random(2), SwitchbackState()  # noqa: S311 - noise of a test
    for pair in range(120):
        for pod in range(2):
            levels = []
            for window in (2 * pair, 2 * pair + 1):
                before = drafter_in_window(PLAN.seed, pod, window - 1) if window else "stable"
                own = drafter_in_window(PLAN.seed, pod, window)
                levels.append(1.2 if own == before == "canary" else 1.1 if "canary" in (own, before) else 1.0)
                counts = window_counts("stable", noise.gauss(1, 0.01) / levels[-1])
                state = add_window(state, pod, window, counts)
        state = close_pair(state, PLAN, pair, (0, 1))
    carryover = estimate_carryover(state.carryover_moments)
    assert carryover is not None
    assert carryover.lower < carryover.estimate < carryover.upper
    assert carryover.estimate == pytest.approx(0.09, abs=0.02)
    assert carryover.lower > 0


# ------------------------------------------------------------------------------------------------------------------ verdict
def test_a_better_drafter_is_promoted() -> None:
    state, verdict = evaluate_switchback(run_trial(12, gain=1.09), PLAN, 120.0)
    assert verdict.outcome == state.outcome == "Promote"
    assert "+9." in verdict.message or "+8." in verdict.message
    tokens = next(row for row in verdict.comparisons if row.metric == TOKENS_PER_STEP)
    assert tokens.estimate == pytest.approx(0.09, abs=0.02)
    assert tokens.estimate is not None and tokens.lower is not None and tokens.upper is not None  # noqa: PT018 - for the types
    assert tokens.lower < tokens.estimate < tokens.upper


def test_a_weak_drafter_is_rolled_back_within_90_seconds_on_one_pod() -> None:
    """Windows of 4 seconds, as at 6 requests/s: nine pairs in one direction have a chance of 1 in 512."""
    plan = replace(PLAN, schedule=WindowSchedule(4.0, 30.0))
    pairs = next(
        pairs
        for pairs in range(1, 40)
        if evaluate_switchback(run_trial(pairs, 0.55, pods=1, plan=plan), plan, 1.0)[1].outcome != "Continue"
    )
    _, verdict = evaluate_switchback(run_trial(pairs, 0.55, pods=1, plan=plan), plan, 1.0)
    assert verdict.outcome == "Rollback"
    assert plan.schedule.window(2 * pairs - 1).end_seconds <= 90
    assert "number of tokens per step is significantly below" in verdict.message


def test_a_verdict_is_final() -> None:
    state, _ = evaluate_switchback(run_trial(30, gain=0.9), PLAN, 300.0)
    later_state, verdict = evaluate_switchback(replace(state, tests={}), PLAN, 1e9)
    assert verdict.outcome == later_state.outcome == "Rollback"
    assert verdict.message == state.message


def test_equal_drafters_have_no_early_verdict_and_are_promoted_in_long_windows() -> None:
    assert evaluate_switchback(run_trial(20), PLAN, 300.0)[1].outcome == "Continue"
    assert evaluate_switchback(run_trial(120), PLAN, 3000.0)[1].outcome == "Promote"


def test_an_equal_drafter_is_not_superior() -> None:
    plan = replace(PLAN, goal="Superior")
    assert evaluate_switchback(run_trial(120, plan=plan), plan, 3000.0)[1].outcome == "Continue"
    assert evaluate_switchback(run_trial(120, plan=plan), plan, plan.max_duration_seconds)[1].outcome == "Inconclusive"


def test_a_lighter_drafter_that_is_faster_is_promoted() -> None:
    assert evaluate_switchback(run_trial(60, gain=0.95, slowdown=0.85), PLAN, 1.0)[1].outcome == "Promote"


def test_a_drafter_with_more_tokens_per_step_that_is_slower_is_rolled_back() -> None:
    verdict = evaluate_switchback(run_trial(60, gain=1.08, slowdown=1.2), PLAN, 1.0)[1]
    assert verdict.outcome == "Rollback"
    assert "time per output token is significantly above the stable drafter's by more than 2 %" in verdict.message


def find_outcome(pairs: int, **trial: Any) -> str:
    """Return the first outcome other than Continue of a trial of this many pairs at most; Continue if there is none."""
    outcomes = (evaluate_switchback(run_trial(count, **trial), trial["plan"], 1.0)[1].outcome for count in range(4, pairs + 1, 4))
    return next((outcome for outcome in outcomes if outcome != "Continue"), "Continue")


@pytest.mark.parametrize("slowdown", [1.05, 1.08])
@pytest.mark.parametrize("seed", ["a", "b", "c", "d"])
def test_slower_steps_within_the_allowance_are_rolled_back_where_times_vary_little(seed: str, slowdown: float) -> None:
    assert find_outcome(80, gain=1.0, slowdown=slowdown, plan=replace(PLAN, seed=seed), time_sd=0.02) == "Rollback"


@pytest.mark.parametrize("seed", ["a", "b", "c", "d"])
def test_a_slow_path_is_never_promoted_however_much_times_vary(seed: str) -> None:
    plan = replace(PLAN, seed=seed)
    assert find_outcome(80, gain=1.05, slowdown=1.25, plan=plan, time_sd=0.2) != "Promote"


def test_failed_requests_roll_back() -> None:
    verdict = evaluate_switchback(run_trial(8, gain=1.09, failures=3.0), PLAN, 1.0)[1]
    assert verdict.outcome == "Rollback"
    assert "48 requests failed with the canary's drafter and 0 with the stable one" in verdict.message


def without_answers(counts: WindowCounts, drafter: str, hanging: str) -> WindowCounts:
    return WindowCounts() if drafter == hanging else counts


@pytest.mark.parametrize(("hanging", "outcome"), [("canary", "Rollback"), ("stable", "Continue")])
def test_an_engine_that_hangs_with_a_drafter_is_evidence_against_it_alone(hanging: str, outcome: str) -> None:
    state = SwitchbackState()
    for pair in range(16):
        for number in (2 * pair, 2 * pair + 1):
            drafter = drafter_in_window(PLAN.seed, 0, number)
            state = add_window(state, 0, number, without_answers(window_counts(drafter), drafter, hanging))
        state = close_pair(state, PLAN, pair, (0,))
    verdict = evaluate_switchback(state, PLAN, 1.0)[1]
    assert verdict.outcome == outcome
    assert ("number of answer tokens" in verdict.message) == (outcome == "Rollback")


def test_few_long_answers_do_not_roll_back_an_equal_drafter() -> None:
    """Most windows have no answer, and the lengths are heavy-tailed."""
    rolled_back = 0
    for seed in range(100):
        plan, noise, state = replace(PLAN, seed=str(seed)), random.Random(seed), SwitchbackState()  # noqa: S311 - noise of a test
        for pair in range(60):
            for number in (2 * pair, 2 * pair + 1):
                tokens = noise.lognormvariate(5, 1.5) if noise.random() < 0.2 else 0.0
                state = add_window(state, 0, number, WindowCounts(tokens, tokens / 2.5, tokens / 100, 1.0, 0.1, 1.0))
            state = close_pair(state, plan, pair, (0,))
            if evaluate_switchback(state, plan, 1.0)[1].outcome == "Rollback":
                rolled_back += 1
                break
    assert rolled_back <= 3


def test_lost_pairs_in_an_isolated_pod_roll_back_at_the_deadline() -> None:
    isolated = replace(PLAN, is_isolated=True)
    state = replace(run_trial(6), lost_pairs=20)
    assert evaluate_switchback(state, isolated, 1.0)[1].outcome == "Continue"
    verdict = evaluate_switchback(state, isolated, isolated.max_duration_seconds)[1]
    assert verdict.outcome == "Rollback"
    assert "20 of 32 pairs of windows are lost" in verdict.message
    assert evaluate_switchback(state, PLAN, PLAN.max_duration_seconds)[1].outcome == "Inconclusive"


def test_crashes_roll_back_and_a_single_one_delays() -> None:
    state = run_trial(12, gain=1.09)
    suspicious = replace(state, crashes=CrashCounts(1, 0, 0.1, 0.1))
    assert "more time without a crash" in evaluate_switchback(suspicious, PLAN, 1.0)[1].message
    significant = replace(state, crashes=CrashCounts(3, 0, 0.1, 0.1))
    assert evaluate_switchback(significant, PLAN, 1.0)[1].outcome == "Rollback"


def test_crashes_of_a_cluster_that_crashes_anyway_do_not_roll_back() -> None:
    crashes = start_trial(48.0, 24).crashes
    state = replace(run_trial(12, gain=1.09), crashes=replace(crashes, canary_crashes=2, canary_pod_hours=1.0))
    assert evaluate_switchback(state, PLAN, 1.0)[1].outcome != "Rollback"
    healthy = start_trial(48.0, 0).crashes
    state = replace(state, crashes=replace(healthy, canary_crashes=2, canary_pod_hours=1.0))
    assert evaluate_switchback(state, PLAN, 1.0)[1].outcome == "Rollback"


def test_many_lost_pairs_prevent_a_promotion() -> None:
    state = replace(run_trial(12, gain=1.09), lost_pairs=20)
    verdict = evaluate_switchback(state, PLAN, 1.0)[1]
    assert verdict.outcome == "Continue"
    assert "fewer lost pairs of windows (20 of 44)" in verdict.message


ACCEPTED = replace(PLAN, is_accepted=True, error_share=0.5)


def test_a_drafter_that_was_accepted_before_needs_no_evidence_for_it() -> None:
    state = SwitchbackState()
    for pair in range(MIN_QUIET_PAIRS):
        assert evaluate_switchback(state, ACCEPTED, 1.0)[1].outcome == "Continue"
        for number in (2 * pair, 2 * pair + 1):
            state = add_window(state, 0, number, WindowCounts())  # no user sends a request
        state = close_pair(state, ACCEPTED, pair, (0,))
    verdict = evaluate_switchback(state, ACCEPTED, 1.0)[1]
    assert verdict.outcome == "Promote"
    assert "was accepted by its shadow evaluation" in verdict.message


@pytest.mark.parametrize(
    "state",
    [
        SwitchbackState(late_pairs=300),
        replace(run_trial(12), lost_pairs=20),
        replace(run_trial(12), crashes=CrashCounts(1, 0, 0.1, 0.1)),
        SwitchbackState(lost_pairs=300),
    ],
)
def test_a_drafter_that_was_accepted_before_is_not_promoted_without_pairs_or_with_suspicions(state: SwitchbackState) -> None:
    assert evaluate_switchback(state, ACCEPTED, 1.0)[1].outcome == "Continue"
    assert evaluate_switchback(state, ACCEPTED, ACCEPTED.max_duration_seconds)[1].outcome == "Inconclusive"


@pytest.mark.parametrize(
    "trial", [{"gain": 0.9}, {"slowdown": 1.2, "gain": 1.08}, {"gain": 1.09, "failures": 3.0}], ids=["tokens", "time", "failures"]
)
def test_a_drafter_that_was_accepted_before_is_rolled_back_all_the_same(trial: dict[str, Any]) -> None:
    assert evaluate_switchback(run_trial(60, plan=ACCEPTED, **trial), ACCEPTED, 1.0)[1].outcome == "Rollback"


def test_a_share_of_the_errors_is_a_share_of_every_alpha() -> None:
    halves = {name: test.alpha for name, test in ACCEPTED.tests.items()}
    assert halves == {name: test.alpha / 2 for name, test in PLAN.tests.items()}


def test_late_pairs_do_not_prevent_a_promotion_and_are_none_of_its_evidence() -> None:
    state = close_pair(run_trial(12, gain=1.09), PLAN, 12, (), late_pairs=20)
    assert (state.counted_pairs, state.lost_pairs, state.late_pairs) == (24, 0, 20)
    assert state.crashes == run_trial(12, gain=1.09).crashes
    assert close_pair(state, PLAN, 12, (), late_pairs=20) is state
    assert evaluate_switchback(state, PLAN, 1.0)[1].outcome == "Promote"


@pytest.mark.parametrize("elapsed_seconds", [1.0, PLAN.max_duration_seconds])
def test_canary_whose_pairs_are_all_late_is_not_promoted_and_the_message_says_why(elapsed_seconds: float) -> None:
    verdict = evaluate_switchback(SwitchbackState(late_pairs=300), PLAN, elapsed_seconds)[1]
    assert verdict.outcome == ("Continue" if elapsed_seconds == 1.0 else "Inconclusive")
    assert "300 more pairs are no evidence, because their drafter was changed too late or not at all" in verdict.message
