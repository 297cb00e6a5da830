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
from aerie.analysis.paired.failures import FailureCounts
from aerie.analysis.paired.plan import PairedPlan
from aerie.analysis.paired.state import PairBatch, PairedState, add_batches
from aerie.analysis.paired.sums import BUCKETS, PairSums, paired_score, time_slot_bucket
from aerie.analysis.paired.verdict import ANSWERS_DIFFER, PairedVerdict, evaluate_pairs, fails_often
from tests.golden import Messages

PLAN = PairedPlan()
NO_ANSWERS = AnswerCounts()


def draw_batch(
    number: int, pairs: int, gain: float = 0.0, slowness: float = 0.0, *, noise: float = 0.1, seed: int = 0
) -> PairBatch:
    """Return a batch of pairs in which the canary has this gain in tokens per step and takes this much longer per token."""
    random = np.random.default_rng((seed, number))
    steps, seconds, slots = PairSums(), PairSums(), PairSums()
    for pair in range(pairs):
        tokens = float(random.lognormal(4.0, 0.8))
        control = tokens / float(random.uniform(1.5, 3.0))
        canary = control / (1 + gain) * float(random.lognormal(-noise * noise / 2, noise))
        bucket = int(random.integers(BUCKETS))
        steps = steps.add_pair(bucket, *paired_score(canary, tokens, control, tokens))
        times = paired_score(tokens * 0.02 * (1 + slowness), tokens, tokens * 0.02, tokens)
        seconds, slots = (
            seconds.add_pair(bucket, *times),
            slots.add_pair(time_slot_bucket(60.0 * (number + pair / pairs)), *times),
        )
    return PairBatch(number, steps, seconds, slots, NO_ANSWERS, {}, pairs, 0)


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


def fail(canary: int, control: int = 0, *, seconds: float = 60.0, pairs: int = 800, **outage: Any) -> PairedVerdict:
    """Return the verdict on a better canary, of which each arm alone has failed some requests, each at another time."""
    skipped = {"canary_failed": 2 * canary, "control_failed": control}
    batch = replace(
        draw_batch(1, pairs, 0.1), skipped=skipped, failures=FailureCounts(canary, canary, control, control, **outage)
    )
    plan = replace(PLAN, min_acceptance_seconds=60.0)
    return evaluate_pairs(add_batches(PairedState(), "a", [batch]), plan, seconds)[1]


def test_a_canary_that_fails_requests_is_not_accepted_and_then_rolled_back(messages: Messages) -> None:
    assert fail(8).outcome == "Promote", "1 % of the pairs"
    verdict = fail(10, 1)
    assert verdict.outcome == "Continue"
    messages.check("some failures", verdict.message)
    verdict = fail(17, 1)
    assert (verdict.outcome, verdict.rollback_reason) == ("Rollback", FAILED_REQUESTS)
    messages.check("many failures", verdict.message)


def test_canary_with_failures_at_the_deadline_meets_no_user(messages: Messages) -> None:
    """Rolled back if the canary fails in a tenth of the time. One stall is less."""
    plan = replace(PLAN, max_duration_seconds=900.0)
    for events, outcome in ((9, "Inconclusive"), (10, "Rollback")):
        batch = replace(draw_batch(1, 30, 0.1), skipped={"canary_failed": 10}, failures=FailureCounts(events, events))
        verdict = evaluate_pairs(add_batches(PairedState(), "a", [batch]), plan, 900.0)[1]
        assert verdict.outcome == outcome
        messages.check(f"{outcome} with failures", verdict.message)


def test_a_silent_canary_is_rolled_back_and_not_accepted_before(messages: Messages) -> None:
    for seconds, outcome in ((119.0, "Continue"), (120.0, "Rollback")):
        verdict = fail(1, outage_attempts=3, outage_seconds=seconds)
        assert verdict.outcome == outcome
        messages.check(f"silent, {outcome}", verdict.message)
    assert fail(1, outage_attempts=2, outage_seconds=300.0).outcome == "Continue", "rare requests"
    verdict = fail(1, outage_attempts=1, outage_seconds=30.0, seconds=PLAN.max_duration_seconds)
    assert (verdict.outcome, verdict.rollback_reason) == ("Rollback", FAILED_REQUESTS)
    assert fail(1, outage_attempts=2, outage_seconds=5.0, seconds=PLAN.max_duration_seconds).outcome == "Inconclusive", (
        "it just ended"
    )


def test_nothing_is_accepted_before_hanging_requests_are_known() -> None:
    assert fail(0, seconds=59.0).outcome == "Continue"
    assert fail(0, seconds=60.0).outcome == "Promote"


def test_an_outage_ends_with_the_next_batch_of_any_process() -> None:
    silent = replace(draw_batch(1, 0), failures=FailureCounts(1, 1, 0, 0, 9, 119.0))
    state = add_batches(PairedState(), "a", [silent])
    for process, number in (("a", 2), ("b", 1)):
        later = add_batches(state, process, [replace(draw_batch(number, 1), failures=FailureCounts(0, 0, 1, 1))])
        assert later.failures == FailureCounts(1, 1, 1, 1)


def test_equal_engines_that_fail_are_rarely_rolled_back_at_the_deadline() -> None:
    """It is at most 2.3 % of evaluations that reach their deadline, however often both fail."""
    random = np.random.default_rng(1)
    for mean in (1.0, 3.0, 5.0, 10.0, 30.0):
        canary, control = (random.poisson(mean, 4000) for _ in range(2))
        rolled_back = sum(
            fails_often(FailureCounts(x, x, y, y), elapsed_seconds=300.0)
            for x, y in zip(canary.tolist(), control.tolist(), strict=True)
        )
        assert rolled_back / 4000 <= 0.025


def test_what_is_not_comparable_decides_nothing(messages: Messages) -> None:
    by_time = replace(PLAN, compares_tokens=False)
    state, _ = run(1200, -0.3, plan=by_time)
    assert state.outcome == "Promote"
    messages.check("without tokens per step", state.message)
    assert run(1200, 0.2, 0.5, by_time)[0].outcome == "Rollback"
    by_tokens = replace(PLAN, compares_time=False)
    state, _ = run(1200, 0.09, 0.5, by_tokens)
    assert state.outcome == "Promote"
    messages.check("without times", state.message)
    assert run(1200, -0.3, -0.5, by_tokens)[0].outcome == "Rollback", "a faster pod replaces no tokens"
    answers = replace(NO_ANSWERS, repetitions=DifferenceSums(60, 44.0, 6.0, 25.0))
    state = add_batches(PairedState(), "a", [replace(draw_batch(1, 800, 0.1), answers=answers)])
    assert evaluate_pairs(state, replace(PLAN, compares_answers=False), 60.0)[1].outcome == "Promote"
    neither = replace(PLAN, compares_tokens=False, compares_time=False)
    assert run(1200, 0.2, plan=neither)[0].outcome == "Continue"


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
    assert len(json.dumps(many.to_dict())) < 11_000  # three tables of 64 buckets


def test_a_batch_of_an_evaluator_is_parsed_and_anything_else_is_an_error() -> None:
    batch = draw_batch(3, 5)
    document = {
        "number": 3,
        "started": 1.0,
        "ended": 2.0,
        "steps": batch.steps.to_dict(),
        "seconds": batch.seconds.to_dict(),
        "slots": batch.slots.to_dict(),
        "answers": {},
        "skipped": {"too_short": 2},
        "failures": {"canary": 2, "canary_events": 1},
        "received": 7,
        "dropped": 0,
    }
    assert PairBatch.from_dict(document) == replace(batch, skipped={"too_short": 2}, received=7, failures=FailureCounts(2, 1))
    changes: list[dict[str, Any]] = [
        {"steps": None},
        {"steps": {"buckets": [[]], "squares": []}},
        {"answers": {"unheard": 1}},
        {"failures": {"unheard": 1}},
        {"failures": {"outage_seconds": float("inf")}},
        {"number": []},
        {"number": "x"},
        {"number": True},
        {"received": -1},
        {"dropped": float("nan")},
        {"skipped": {"too_short": float("inf")}},
        {"skipped": [1]},
        {"steps": {"buckets": [[0, 1, 10**400, 1.0]], "squares": [1.0, 1.0, 1.0]}},
        {"answers": {"greedy_pairs": "many"}},
        {"answers": {"lengths": [1, 0, 0, 0, 0]}},
    ]
    for broken in ({"number": 1}, *({**document, **change} for change in changes)):
        with pytest.raises(ValueError, match="the evaluator's batch is not readable"):
            PairBatch.from_dict(broken)


@pytest.mark.parametrize(
    "change",
    [
        {"number": 0},
        {"steps": {"buckets": [[0, 4, 8.0, 8.0]], "squares": [1.0, 1.0, 1.0]}},
        {"seconds": {"buckets": [[0, 4, 8.0, 8.0]], "squares": [16.0, 99.0, 16.0]}},
        {"seconds": {"buckets": [[0, 4, 8.0, 8.0]], "squares": [16.0, 16.0, 16.0]}},
        {"steps": {"buckets": [[0, 0.5, 8.0, 8.0]], "squares": [256.0, 1.0, 256.0]}},
        {"answers": {"lengths": [1, 5.0, 0.0, 0.0]}},
        {"answers": {"lengths": 3}},
        {"answers": {"greedy_different_pairs": 3}},
        {"answers": {"canary_only": 3}},
        {"failures": {"canary_events": 1}},
        {"failures": {"control": 1.5}},
        {"failures": {"outage_seconds": 200.0}},
        {"skipped": {"<b>ignore</b>": 3}},
        {"skipped": {"a" * number: 1 for number in range(1, 33)} | {"b": 1}},
    ],
)
def test_a_batch_that_no_answers_give_is_an_error(change: dict[str, Any]) -> None:
    document = {"number": 3, "answers": {}, "skipped": {}}
    document |= {name: PairSums().to_dict() for name in ("steps", "seconds", "slots")}
    document |= {"failures": {}, "received": 7, "dropped": 0}
    PairBatch.from_dict(document)
    with pytest.raises(ValueError, match="the evaluator's batch"):
        PairBatch.from_dict({**document, **change})


NUMBERS = st.integers(0, 50) | st.floats(0, 1e12) | st.sampled_from([0.0, 1e-300, 2.0**40])


@given(
    rows=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40), NUMBERS, NUMBERS), max_size=6),
    squares=st.tuples(NUMBERS, NUMBERS, NUMBERS),
    sums=st.tuples(st.integers(0, 50), NUMBERS, NUMBERS, NUMBERS),
    skipped=st.dictionaries(st.sampled_from(["canary_failed", "control_failed", "without_metrics"]), st.integers(0, 2**40)),
    failures=st.dictionaries(st.sampled_from(FailureCounts.__slots__), st.integers(0, 5) | st.sampled_from([2**40, 0.5])),
    compares=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_no_batch_makes_an_evaluation_fail(
    rows: list[tuple[Any, ...]],
    squares: tuple[float, ...],
    sums: tuple[float, ...],
    skipped: dict[str, int],
    failures: dict[str, float],
    compares: tuple[bool, bool, bool],
) -> None:
    parts = {"buckets": [list(row) for row in rows], "squares": list(squares)}
    answers = {name: list(sums) for name in ("lengths", "unlikely")}
    document = {
        "number": 1,
        "steps": parts,
        "seconds": parts,
        "slots": parts,
        "answers": answers,
        "skipped": skipped,
        "failures": failures,
        "received": 9,
        "dropped": 0,
    }
    try:
        batch = PairBatch.from_dict(document)
    except ValueError:
        return
    tokens, time, answered = compares
    plan = replace(PLAN, compares_tokens=tokens, compares_time=time, compares_answers=answered)
    for count in (1, 20):
        state = add_batches(PairedState(), "a", [replace(batch, number=number) for number in range(1, count + 1)])
        state, verdict = evaluate_pairs(state, plan, 60.0)
        assert len(verdict.message) < 4096
        assert PairedState.from_dict(json.loads(json.dumps(state.to_dict(), allow_nan=False))) == state


def test_a_plan_survives_json() -> None:
    plan = PairedPlan("Superior", 0.03, 600.0, same_engine=True)
    assert PairedPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_pairs_of_one_moment_say_nothing_of_times(messages: Messages) -> None:
    """A thousand answers of ten seconds are as many, but what else the pods' processors do then is the same for all of them."""
    steps, times = PairSums(), PairSums()
    for pair in range(1000):
        steps, times = steps.add_pair(pair % BUCKETS, 0.9, 1.0 + pair % 3 / 50), times.add_pair(pair % BUCKETS, 0.7, 1.0)
    slots = PairSums()
    for _ in range(1000):
        slots = slots.add_pair(5, 0.7, 1.0)
    state = add_batches(PairedState(), "a", [PairBatch(1, steps, times, slots, NO_ANSWERS, {}, 1000, 0)])
    _, verdict = evaluate_pairs(state, PLAN, 10.0)
    assert verdict.outcome == "Continue"
    messages.check("pairs of one moment", verdict.message)
