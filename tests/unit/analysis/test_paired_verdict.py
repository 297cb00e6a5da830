"""Verdicts of shadow evaluations, on the real pairs' kind of noise: what decides, what waits, and what is counted once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.criteria.criterion import FAILED_REQUESTS
from aerie.analysis.paired.answers import AnswerCounts, DifferenceSums
from aerie.analysis.paired.plan import PairedPlan
from aerie.analysis.paired.state import PairBatch, PairedState, add_batches
from aerie.analysis.paired.sums import BUCKETS, PairSums, paired_score
from aerie.analysis.paired.verdict import ANSWERS_DIFFER, evaluate_pairs
from tests.golden import Messages

PLAN = PairedPlan()
NO_ANSWERS = AnswerCounts()


def draw_batch(
    number: int, pairs: int, gain: float = 0.0, slowness: float = 0.0, *, noise: float = 0.1, seed: int = 0
) -> PairBatch:
    """Return a batch of pairs in which the canary has this gain in tokens per step and takes this much longer per token."""
    random = np.random.default_rng((seed, number))
    steps, seconds = PairSums(), PairSums()
    for _ in range(pairs):
        tokens = float(random.lognormal(4.0, 0.8))
        control = tokens / float(random.uniform(1.5, 3.0))
        canary = control / (1 + gain) * float(random.lognormal(-noise * noise / 2, noise))
        bucket = int(random.integers(BUCKETS))
        steps = steps.add_pair(bucket, *paired_score(canary, tokens, control, tokens))
        seconds = seconds.add_pair(bucket, *paired_score(tokens * 0.02 * (1 + slowness), tokens, tokens * 0.02, tokens))
    return PairBatch(number, steps, seconds, NO_ANSWERS, {}, pairs, 0)


def run(pairs: int, gain: float = 0.0, slowness: float = 0.0, plan: PairedPlan = PLAN) -> tuple[PairedState, int]:
    """Return the state after its verdict, or after all pairs, and the number of pairs."""
    state = PairedState()
    for number in range(1, pairs // 20 + 1):
        state = add_batches(state, "a", [draw_batch(number, 20, gain, slowness)])
        state, verdict = evaluate_pairs(state, plan, 60.0 * number)
        if verdict.outcome != "Continue":
            break
    return state, state.steps.pairs


@pytest.mark.parametrize(
    ("gain", "slowness", "outcome", "most_pairs"),
    [
        (0.09, 0.0, "Promote", 150),
        (0.03, 0.0, "Promote", 250),
        (0.0, 0.0, "Promote", 1200),
        (-0.03, 0.0, "Rollback", 800),
        (-0.45, 0.0, "Rollback", 60),
        (0.05, 0.5, "Rollback", 60),
    ],
)
def test_verdict_by_gain_and_time(gain: float, slowness: float, outcome: str, most_pairs: int, messages: Messages) -> None:
    state, pairs = run(1500, gain, slowness)
    assert state.outcome == outcome
    assert pairs <= most_pairs
    messages.check(f"gain {gain:+.0%}, time {slowness:+.0%}", state.message)


def test_different_pods_may_differ_in_time_and_one_engine_may_not() -> None:
    """8 % more time per token: two pods of one GPU model differ by that, rarely; one engine does not differ from itself."""
    assert run(1500, 0.1, 0.08)[0].outcome == "Promote"
    assert run(1500, 0.1, 0.08, replace(PLAN, same_engine=True))[0].outcome == "Rollback"


def test_a_canary_that_is_faster_is_accepted_with_fewer_tokens_per_step(messages: Messages) -> None:
    """A lighter drafter. In two pods, 4 % less time may be the pod's."""
    state, _ = run(400, -0.1, -0.04, replace(PLAN, same_engine=True))
    assert state.outcome == "Promote"
    messages.check("faster", state.message)
    assert run(400, -0.1, -0.04)[0].outcome == "Rollback"


def test_a_superior_goal_needs_more_than_the_margin() -> None:
    plan = replace(PLAN, goal="Superior")
    assert run(600, 0.0, plan=plan)[0].outcome == "Continue"
    assert run(1500, 0.05, plan=plan)[0].outcome == "Promote"


def test_a_final_verdict_stays() -> None:
    state, _ = run(600, 0.09)
    state, verdict = evaluate_pairs(add_batches(state, "a", [draw_batch(99, 400, -0.5)]), PLAN, 9e9)
    assert verdict.outcome == "Promote"
    assert verdict.message == state.message


def test_too_few_pairs_wait_and_the_deadline_is_inconclusive(messages: Messages) -> None:
    state = add_batches(PairedState(), "a", [draw_batch(1, 30, 0.01)])
    messages.check("few pairs", evaluate_pairs(state, PLAN, 60.0)[1].message)
    state = add_batches(state, "a", [draw_batch(2, 120, 0.0)])
    messages.check("more pairs", evaluate_pairs(state, PLAN, 300.0)[1].message)
    _, verdict = evaluate_pairs(state, PLAN, PLAN.max_duration_seconds)
    assert verdict.outcome == "Inconclusive"
    messages.check("deadline", verdict.message)
    messages.check("no pairs", evaluate_pairs(PairedState(), PLAN, 60.0)[1].message)


def test_the_bounds_of_the_status_are_those_that_decide() -> None:
    state, _ = run(1500, 0.03)
    steps, seconds = evaluate_pairs(state, PLAN, 0.0)[1].comparisons
    assert steps.lower is not None
    assert steps.estimate is not None
    assert steps.upper is not None
    assert -0.02 < steps.lower < steps.estimate < steps.upper
    assert seconds.estimate == pytest.approx(0.0)


def test_requests_that_give_no_pair_are_named(messages: Messages) -> None:
    batch = replace(draw_batch(1, 20), skipped={"too_short": 90, "rejected": 1}, received=111)
    messages.check("skipped requests", evaluate_pairs(add_batches(PairedState(), "a", [batch]), PLAN, 60.0)[1].message)


def test_a_canary_that_fails_requests_is_not_accepted_and_then_rolled_back(messages: Messages) -> None:
    state = add_batches(PairedState(), "a", [draw_batch(1, 800, 0.1)])
    few = add_batches(state, "a", [replace(draw_batch(2, 0), skipped={"canary_failed": 5, "control_failed": 1})])
    verdict = evaluate_pairs(few, PLAN, 60.0)[1]
    assert verdict.outcome == "Continue"
    messages.check("some failures", verdict.message)
    many = add_batches(state, "a", [replace(draw_batch(2, 0), skipped={"canary_failed": 15})])
    verdict = evaluate_pairs(many, PLAN, 60.0)[1]
    assert verdict.outcome == "Rollback"
    assert verdict.rollback_reason == FAILED_REQUESTS
    messages.check("many failures", verdict.message)


def test_a_canary_that_changes_answers_is_rolled_back_whatever_its_gain(messages: Messages) -> None:
    answers = replace(NO_ANSWERS, repetitions=DifferenceSums(60, 44.0, 6.0, 25.0))
    state = add_batches(PairedState(), "a", [replace(draw_batch(1, 800, 0.1), answers=answers)])
    verdict = evaluate_pairs(state, PLAN, 60.0)[1]
    assert verdict.outcome == "Rollback"
    assert verdict.rollback_reason == ANSWERS_DIFFER
    messages.check("changed answers", verdict.message)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4)), max_size=12))
def test_a_batch_counts_once_however_often_it_comes(deliveries: list[tuple[str, int]]) -> None:
    """A process closes its batches in order, and repeats what is not acknowledged."""
    state = PairedState()
    for process, last in deliveries:
        batches = [draw_batch(number, number, seed=ord(process)) for number in range(1, last + 1)]
        state = PairedState.from_dict(json.loads(json.dumps(add_batches(state, process, batches[::-1]).to_dict())))
    latest = {process: max(last for each, last in deliveries if each == process) for process, _ in deliveries}
    assert state.counted_batches == latest
    assert state.steps.pairs == state.received == sum(last * (last + 1) // 2 for last in latest.values())


def test_the_state_does_not_grow_with_pairs() -> None:
    state = run(300)[0]
    many = add_batches(state, "a", [draw_batch(99, 2000)])
    assert len(json.dumps(many.to_dict())) < 8000


def test_a_batch_of_an_evaluator_is_parsed_and_anything_else_is_an_error() -> None:
    batch = draw_batch(3, 5)
    document = {
        "number": 3,
        "started": 1.0,
        "ended": 2.0,
        "steps": batch.steps.to_dict(),
        "seconds": batch.seconds.to_dict(),
        "answers": {},
        "skipped": {"too_short": 2},
        "received": 7,
        "dropped": 0,
    }
    assert PairBatch.from_dict(document) == replace(batch, skipped={"too_short": 2}, received=7)
    changes: list[dict[str, Any]] = [
        {"steps": None},
        {"steps": {"buckets": [[]], "squares": []}},
        {"answers": {"unheard": 1}},
        {"number": []},
        {"number": "x"},
    ]
    for broken in ({"number": 1}, *({**document, **change} for change in changes)):
        with pytest.raises(ValueError, match="the evaluator's batch is not readable"):
            PairBatch.from_dict(broken)


def test_a_plan_survives_json() -> None:
    plan = PairedPlan("Superior", 0.03, 600.0, same_engine=True)
    assert PairedPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
