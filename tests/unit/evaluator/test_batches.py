"""Batches: what is counted of pairs, and that the operator counts each pair once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.paired.answers import AnswerCounts
from aerie.analysis.paired.failures import FailureCounts
from aerie.analysis.paired.sums import PairSums
from aerie.engine.completions import GreedyCompletion
from aerie.evaluator.answers import Answer
from aerie.evaluator.batches import BatchLog
from aerie.evaluator.metrics import EvaluatorMetrics
from aerie.evaluator.pairs import Pair, add_answers
from aerie.evaluator.requests import CHAT_PATH, ReplayRequest
from aerie.evaluator.skip_reasons import SkipReason


def completion(*tokens: str, top: dict[str, float] | None = None) -> GreedyCompletion:
    return GreedyCompletion(tokens, tuple((top or {}) | {token: (top or {}).get(token, -1.0)} for token in tokens))


def answer(tokens: int = 11, steps: int = 5, completion: GreedyCompletion | None = None, finish_reason: str = "stop") -> Answer:
    return Answer(tokens, steps, (0, steps), finish_reason, None, completion)


def pair(
    canary: Answer,
    control: Answer,
    *,
    is_greedy: bool = True,
    is_plain: bool = False,
    is_exact: bool = False,
    repeat: GreedyCompletion | None = None,
) -> Pair:
    return Pair(ReplayRequest(CHAT_PATH, b"", 3, is_greedy, is_plain, is_exact), canary, control, 1.0, 3.0, repeat)


def new_log() -> BatchLog:
    return BatchLog(EvaluatorMetrics(), lambda: 5.0)


def test_times_are_summed_by_the_slot_in_which_a_pair_ended() -> None:
    times = iter((0.0, 9.9, 10.0, 649.0, 650.0, 700.0))  # of the log's begin, four pairs, and the fetch
    log = BatchLog(EvaluatorMetrics(), lambda: next(times))
    for _ in range(4):
        log.add(pair(answer(), answer()))
    (batch,) = log.fetch("", 0)["batches"]
    assert [row[:2] for row in batch["slots"]["buckets"]] == [[0, 2], [1, 2]]
    assert [row[:2] for row in batch["seconds"]["buckets"]] == [[3, 4]]


def test_a_batch_has_the_sums_of_its_pairs() -> None:
    log = new_log()
    for outcome in (SkipReason.CANARY_FAILED, SkipReason.INVALID, SkipReason.CANARY_FAILED, None, None):
        log.receive()
        if outcome is None:
            log.add(pair(answer(steps=4), answer(steps=6, finish_reason="length")))
        else:
            log.skip(outcome)
    log.receive()
    log.drop()
    (batch,) = json.loads(json.dumps(log.fetch("", 0)))["batches"]
    steps, seconds = PairSums.from_dict(batch.pop("steps")), PairSums.from_dict(batch.pop("seconds"))
    assert (steps.pairs, steps.counts[3], steps.canary[3], steps.control[3]) == (2, 2, 4.0, 6.0)
    assert (seconds.pairs, seconds.canary[3], seconds.control[3]) == (2, 1.0, 3.0)
    slots = PairSums.from_dict(batch.pop("slots"))
    assert (slots.pairs, slots.canary[0], slots.control[0]) == (2, 1.0, 3.0)
    assert batch == {
        "number": 1,
        "started": 5.0,
        "ended": 5.0,
        "answers": {},
        "canary": {"tokens": 22, "steps": 8, "seconds": 2.0, "accepted": [0, 8], "finish_reasons": {"stop": 2}},
        "control": {"tokens": 22, "steps": 12, "seconds": 6.0, "accepted": [0, 12], "finish_reasons": {"length": 2}},
        "skipped": {"canary_failed": 2, "invalid": 1},
        "received": 6,
        "dropped": 1,
        "failures": FailureCounts().to_dict(),
    }


def test_a_batch_stays_until_it_is_acknowledged() -> None:
    log = new_log()
    assert log.fetch("", 0) == {"process": log.process, "batches": []}
    log.receive()
    first = log.fetch("", 0)
    log.receive()
    assert log.fetch("", 0) == log.fetch(log.process, 0) == first
    second = log.fetch(log.process, 1)
    assert [batch["number"] for batch in second["batches"]] == [2]
    assert log.fetch(log.process, 2)["batches"] == []


def test_the_number_of_another_process_acknowledges_nothing() -> None:
    old, new = new_log(), new_log()
    assert old.process != new.process
    new.receive()
    first = new.fetch(old.process, 57)
    assert new.fetch(old.process, 57) == first
    assert [batch["number"] for batch in first["batches"]] == [1]


def test_failures_alone_close_a_batch() -> None:
    log = new_log()
    log.receive()
    log.fetch("", 0)
    log.skip(SkipReason.CANARY_FAILED)  # of a request that an earlier batch has received
    (batch,) = log.fetch(log.process, 1)["batches"]
    assert batch["skipped"] == {"canary_failed": 1}


class Operator:
    """The operator's side: what it has counted survives it, and an answer may be lost before it counts."""

    def __init__(self) -> None:
        self.process, self.number, self.pairs = "", 0, 0

    def count(self, document: dict[str, Any], *, is_answer_lost: bool) -> None:
        """Count what a fetch after `number` of `process` has returned."""
        if is_answer_lost:
            return
        if document["process"] != self.process:
            self.process, self.number = document["process"], 0
        for batch in document["batches"]:
            if batch["number"] > self.number:
                self.pairs += PairSums.from_dict(batch["steps"]).pairs
                self.number = batch["number"]


@given(st.lists(st.sampled_from(("pair", "fetch", "lose an answer", "restart")), max_size=60))
def test_no_pair_is_counted_twice_and_only_restarts_lose_any(events: list[str]) -> None:
    log, operator = new_log(), Operator()
    added = in_process = lost = 0
    counted_before = 0
    for event in [*events, "fetch", "fetch"]:
        if event == "pair":
            log.add(pair(answer(), answer()))
            added += 1
            in_process += 1
        elif event == "restart":
            lost += in_process - (operator.pairs - counted_before)
            counted_before, in_process = operator.pairs, 0
            log = new_log()
        else:
            operator.count(log.fetch(operator.process, operator.number), is_answer_lost=event != "fetch")
    assert operator.pairs == added - lost


def test_memory_does_not_grow_while_nobody_fetches() -> None:
    log = new_log()
    sizes = set()
    for number in range(1000):
        log.receive()
        log.add(pair(answer(), answer()))
        if number % 100 == 50:
            sizes.add(len(log.fetch("", 0)["batches"]))
    assert sizes == {1}


# ----------------------------------------------------------------------------------------------------------------- answers
def test_greedy_answers_are_compared_token_by_token() -> None:
    same, other = completion("a", "b"), completion("a", "c")
    counts = AnswerCounts()
    for canary, control in ((same, same), (other, same), (completion("a"), same)):
        counts = add_answers(counts, pair(answer(completion=canary), answer(completion=control)))
    assert counts == AnswerCounts(greedy_pairs=3, greedy_different_pairs=2)


def test_a_difference_counts_beyond_rounding_only_against_the_controls_second_answer() -> None:
    near_tie = {"b": -0.70, "c": -0.70}
    right, wrong = completion("a", "b"), completion("a", "z", top={"a": -1.0, "b": -0.01, "z": -9.0})
    rounded = completion("a", "c", top={"a": -1.0, **near_tie})
    tied = completion("a", "b", top={"a": -1.0, **near_tie})
    cases = [
        (right, right, right, (0, 0)),
        (wrong, right, right, (1, 0)),
        (right, right, wrong, (0, 1)),
        (wrong, right, wrong, (0, 0)),
        (rounded, tied, tied, (0, 0)),
    ]
    for canary, control, repeat, expected in cases:
        counts = add_answers(AnswerCounts(), pair(answer(completion=canary), answer(completion=control), repeat=repeat))
        assert counts.repeated_requests == 1
        assert (counts.canary_only, counts.control_only) == expected


def test_sampled_answers_are_compared_by_length_end_repetition_and_probability() -> None:
    canary = answer(completion=completion("a", "a", "a", "b"), finish_reason="length")
    control = answer(completion=completion("a", "b"))
    counts = add_answers(AnswerCounts(), pair(canary, control, is_greedy=False))
    assert counts.sampled_pairs == 1
    assert (counts.lengths.canary_sum, counts.lengths.expected_sum) == (4 / 104, 2 / 102)
    assert (counts.truncations.canary_sum, counts.truncations.expected_sum) == (1.0, 0.0)
    assert (counts.repetitions.canary_sum, counts.repetitions.expected_sum) == (0.75, 0.5)
    assert counts.probabilities.canary_sum == counts.probabilities.expected_sum
    assert counts.unlikely.count == 0


TOP = {"a": -1.0, "b": -2.0, "c": -3.0, "d": -4.0, "e": -5.0}
"""The likeliest tokens; no two have the same probability."""


def test_unlikely_tokens_are_counted_against_the_probability_of_those_beyond_the_four_likeliest() -> None:
    likely = 1 - sum(2.718281828459045**-number for number in range(1, 5))
    canary = answer(completion=completion("a", "d", "f", top=TOP | {"f": -6.0}))
    control = answer(completion=completion("e", top=TOP))
    counts = add_answers(AnswerCounts(), pair(canary, control, is_greedy=False, is_plain=True))
    assert (counts.unlikely.count, counts.unlikely.canary_sum) == (3, 1.0)
    assert abs(counts.unlikely.expected_sum - 3 * likely) < 1e-9
    assert (counts.control_unlikely.count, counts.control_unlikely.canary_sum) == (1, 1.0)
    assert counts.exact_unlikely.count == counts.control_exact_unlikely.count == 0


def test_tokens_of_exact_requests_count_once_more() -> None:
    pairs = pair(
        answer(completion=completion("a", "b", top=TOP)),
        answer(completion=completion("a", top=TOP)),
        is_greedy=False,
        is_plain=True,
        is_exact=True,
    )
    counts = add_answers(AnswerCounts(), pairs)
    assert (counts.exact_unlikely, counts.control_exact_unlikely) == (counts.unlikely, counts.control_unlikely)
    assert (counts.unlikely.count, counts.control_unlikely.count) == (2, 1)


@pytest.mark.parametrize(
    ("tied", "likely"),
    [
        ({"d": -5.0}, 3),  # fourth and fifth, and perhaps the sixth: all three are likely or none
        ({"c": -5.0, "d": -5.0}, 2),
        ({"b": -1.0}, 4),
        ({"a": -5.0, "b": -5.0, "c": -5.0, "d": -5.0}, 0),
    ],
)
def test_tokens_of_equal_probability_are_likely_together(tied: dict[str, float], likely: int) -> None:
    """Otherwise a sampler that draws them equally often would seem to prefer those that the engine names first."""
    top = TOP | tied
    tokens = sorted(top, key=lambda token: -top[token])
    counts = add_answers(
        AnswerCounts(),
        pair(answer(completion=completion(*tokens, top=top)), answer(completion=completion("a")), is_greedy=False, is_plain=True),
    )
    assert counts.unlikely.count == (5 if likely else 0)
    assert counts.unlikely.canary_sum == (5 - likely if likely else 0)


def test_answers_without_log_probabilities_are_not_compared() -> None:
    for is_greedy in (True, False):
        assert (
            add_answers(AnswerCounts(), pair(answer(), answer(completion=completion("a")), is_greedy=is_greedy)) == AnswerCounts()
        )
