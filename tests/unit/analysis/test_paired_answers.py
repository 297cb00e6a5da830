"""Counts of answers: what is taken for a change of answers, and that equal drafters are not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.paired.answers import AnswerCounts, DifferenceSums, SampledAnswer
from tests.golden import Messages

ANSWER = st.builds(
    lambda tokens, share, truncated, logprob: SampledAnswer(tokens, truncated, max(1, int(share * tokens)), logprob),
    st.integers(1, 4096),
    st.floats(0, 1),
    st.booleans(),
    st.none() | st.floats(-50, 0),
)
UNIT = st.integers(0, 64).map(lambda part: part / 64)


@st.composite
def counts(draw: st.DrawFn) -> AnswerCounts:
    result = AnswerCounts()
    for canary, control in draw(st.lists(st.tuples(ANSWER, ANSWER), max_size=5)):
        result = result.add_sampled_pair(canary, control)
    for flags in draw(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=5)):
        result = result.add_repeated_request(canary_differs=flags[0], control_differs=flags[1])
        result = result.add_greedy_pair(is_different=flags[0])
    tokens = st.lists(st.tuples(st.booleans(), UNIT), max_size=5)
    return result.add_tokens(draw(tokens), draw(tokens)).add_tokens(draw(tokens), draw(tokens), is_exact=True)


@given(counts())
def test_counts_survive_json(value: AnswerCounts) -> None:
    assert AnswerCounts.from_dict(json.loads(json.dumps(value.to_dict()))) == value


@given(st.lists(st.tuples(UNIT, UNIT), max_size=20), st.lists(st.tuples(UNIT, UNIT), max_size=20))
def test_merged_sums_are_the_sums_of_all(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> None:
    def add(pairs: list[tuple[float, float]]) -> DifferenceSums:
        sums = DifferenceSums()
        for pair in pairs:
            sums = sums.add(*pair)
        return sums

    assert add(first).merge(add(second)) == add(first + second) == add(second).merge(add(first))


@given(counts(), counts())
def test_merged_counts_have_all_pairs(left: AnswerCounts, right: AnswerCounts) -> None:
    merged = left.merge(right)
    assert merged.sampled_pairs == left.sampled_pairs + right.sampled_pairs
    assert merged.repeated_requests == left.repeated_requests + right.repeated_requests
    assert merged.canary_only == left.canary_only + right.canary_only
    assert merged.merge(AnswerCounts()) == merged


@pytest.mark.parametrize("difference", [lambda r: r.random(), lambda r: float(r.random() < 0.03), lambda r: r.beta(0.2, 0.1)])
def test_equal_drafters_are_different_with_a_chance_of_alpha_at_most(difference: Callable[[np.random.Generator], float]) -> None:
    """400 runs, of which 20 may be wrong on average."""
    source, alpha, wrong = np.random.default_rng(1), 0.05, 0
    for _ in range(400):
        sums = DifferenceSums()
        for pair in range(300):
            sums = sums.add(difference(source), difference(source))
            if pair % 10 == 9 and sums.is_different(alpha):
                wrong += 1
                break
    assert wrong <= 28


def test_a_token_that_fills_the_answers_is_noticed_within_100_pairs(messages: Messages) -> None:
    value = AnswerCounts()
    source = np.random.default_rng(2)
    while not value.difference_message:
        canary = sum(source.random() < 0.74 for _ in range(40)) or 1
        value = value.add_sampled_pair(SampledAnswer(40, False, canary, None), SampledAnswer(40, False, 4, None))
    assert value.sampled_pairs < 60
    messages.check("most frequent token", value.difference_message)


def test_a_sampler_that_both_drafters_share_is_noticed_by_the_targets_own_probabilities(messages: Messages) -> None:
    """vLLM's CPU sampler with drawn drafts: 74 % of all tokens are the same, whatever the target's probabilities."""
    source, value, pairs = np.random.default_rng(3), AnswerCounts(), 0
    while not value.difference_message:
        tokens = [[(source.random() < 0.74, 0.5) for _ in range(20)] for _ in range(2)]
        value, pairs = value.add_tokens(*tokens), pairs + 1
    for _ in range(20):
        value = value.add_tokens([], [(source.random() < 0.74, 0.5) for _ in range(20)])
    assert pairs < 30
    messages.check("unlikely tokens", value.difference_message)


def test_fewer_unlikely_tokens_are_a_difference_in_exact_requests_alone(messages: Messages) -> None:
    """vLLM's CPU sampler with greedy drafts: 21 % of the tokens at temperature 1 are unlikely instead of 48 %."""
    source, value, pairs = np.random.default_rng(4), AnswerCounts(), 0
    while not value.difference_message:
        tokens = [[(source.random() < 0.21, 0.48) for _ in range(30)] for _ in range(2)]
        value, pairs = value.add_tokens(*tokens, is_exact=True), pairs + 1
    assert pairs < 10
    for _ in range(20):
        value = value.add_tokens([], [(source.random() < 0.21, 0.48) for _ in range(30)], is_exact=True)
    messages.check("likely tokens", value.difference_message)
    assert not AnswerCounts().add_tokens([(False, 0.5)] * 10_000, []).difference_message


def test_a_right_sampler_lacks_unlikely_tokens_with_a_chance_of_alpha_at_most() -> None:
    """400 runs, of which 20 may be wrong on average. The probabilities of a position vary, and the sampler follows them."""
    source, alpha, wrong = np.random.default_rng(5), 0.05, 0
    for _ in range(400):
        sums = DifferenceSums()
        for token in range(600):
            probability = source.beta(0.5, 0.5)
            sums = sums.add(float(source.random() < probability), probability)
            if token % 30 == 29 and sums.is_below(alpha):
                wrong += 1
                break
    assert wrong <= 28


def test_greedy_answers_count_where_only_the_canarys_differ(messages: Messages) -> None:
    value = AnswerCounts()
    for _ in range(1000):
        value = value.add_repeated_request(canary_differs=True, control_differs=True)
    assert not value.difference_message
    changed = value
    while not changed.difference_message:
        changed = changed.add_repeated_request(canary_differs=True, control_differs=False)
    assert changed.canary_only == 16
    messages.check("greedy answers", changed.difference_message)
    for _ in range(100):
        value = value.add_repeated_request(canary_differs=False, control_differs=True)
    assert not value.difference_message


@pytest.mark.parametrize("name", ["lengths", "truncations", "probabilities"])
def test_every_other_difference_has_its_message(name: str, messages: Messages) -> None:
    messages.check(name, AnswerCounts.from_dict({name: [500, 300.0, 150.0, 90.0]}).difference_message)


@pytest.mark.parametrize(("canary", "expected"), [(1.1, 0.0), (0.0, -0.1), (math.nan, 0.0)])
def test_numbers_out_of_range_are_refused(canary: float, expected: float) -> None:
    with pytest.raises(ValueError, match="give numbers from 0 to 1"):
        DifferenceSums().add(canary, expected)


def test_an_answer_without_tokens_is_refused() -> None:
    answer = SampledAnswer(0, False, 0, None)
    with pytest.raises(ValueError, match="most_frequent_token_count is 0 of token_count 0; skip answers without tokens"):
        AnswerCounts().add_sampled_pair(answer, answer)
