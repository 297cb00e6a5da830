"""When two greedy answers are different, and when the canary's are so too often."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.comparison import Comparison
from aerie.analysis.equivalence import (
    EQUIVALENCE_ALPHA,
    MAX_ROUNDING_LOGPROB_GAP,
    EquivalenceResult,
    PromptDifference,
    compare_answers,
    find_first_difference,
)
from aerie.engine.completions import GreedyCompletion

LIKELY = {"a": -0.1, "b": -3.0, "c": -4.0}


def answer(text: str, *likely: dict[str, float]) -> GreedyCompletion:
    """An answer of one token a letter; each is its engine's likeliest by far, but at the last places as `likely` says."""
    usual = [{letter: -0.01, "~": -5.0} for letter in text]
    return GreedyCompletion(tuple(text), (*usual[: len(text) - len(likely)], *likely))


def answers(odd: int, usual: int, both: int = 0, same: int = 10) -> EquivalenceResult:
    prompts = [
        *[PromptDifference()] * same,
        *[PromptDifference(canary_position=3)] * odd,
        *[PromptDifference(control_position=5)] * usual,
        *[PromptDifference(canary_position=1, control_position=1)] * both,
    ]
    return EquivalenceResult(tuple(prompts), len(prompts))


def test_equal_answers_do_not_differ() -> None:
    assert find_first_difference(answer("abc"), answer("abc")) is None
    assert compare_answers(answer("abc"), answer("abc"), answer("abc")) == PromptDifference()


def test_the_first_difference_counts_wherever_it_is() -> None:
    assert find_first_difference(answer("abcd"), answer("abxy")) == 2
    assert find_first_difference(answer("x"), answer("y")) == 0
    assert compare_answers(answer("abx"), answer("aby"), answer("azy")) == PromptDifference(canary_position=2, control_position=1)


@pytest.mark.parametrize("gap", [0.0, 0.3, MAX_ROUNDING_LOGPROB_GAP])
def test_of_two_tokens_nearly_as_likely_rounding_may_give_either(gap: float) -> None:
    one, other = answer("abcx", {"x": -1.0, "y": -1.0 - gap}), answer("abcy", {"y": -1.0, "x": -1.0 - gap})
    assert find_first_difference(one, other) is None


def test_whatever_follows_such_a_token_tells_nothing() -> None:
    one, other = answer("ax"), answer("ay")
    near = [{"x": -0.7, "y": -0.71}, {"y": -0.7, "x": -0.71}]
    assert find_first_difference(answer("ax", near[0]), answer("ay", near[1])) is None
    longer = (
        GreedyCompletion((*one.tokens, "p"), (one.top_logprobs[0], near[0], {"p": -0.1})),
        GreedyCompletion((*other.tokens, "q"), (other.top_logprobs[0], near[1], {"q": -0.1})),
    )
    assert find_first_difference(*longer) is None


def test_a_token_that_is_far_less_likely_in_the_other_engine_is_different() -> None:
    one, other = answer("x", {"x": -0.5, "y": -1.0}), answer("y", {"y": -0.1, "x": -3.0})
    assert find_first_difference(one, other) == find_first_difference(other, one) == 0


def test_a_token_that_its_own_engine_does_not_hold_for_the_likeliest_is_different_however_near() -> None:
    """What a verification that lets too much through looks like: the target itself would have said the other's."""
    drafted, right = answer("x", {"x": -0.9, "y": -0.6}), answer("y", {"y": -0.6, "x": -0.9})
    assert find_first_difference(drafted, right) == find_first_difference(right, drafted) == 0


def test_a_token_that_was_not_told_is_no_likelier_than_the_last_that_was() -> None:
    flat = {"x": -1.0, "p": -1.2, "q": -1.4}
    assert find_first_difference(answer("x", flat), answer("y", {"y": -1.0, "x": -1.1})) is None
    steep = {"x": -0.1, "p": -3.0, "q": -3.4}
    assert find_first_difference(answer("x", steep), answer("y", {"y": -1.0, "x": -1.1})) == 0


def test_where_one_answer_ends_nothing_is_told() -> None:
    assert find_first_difference(answer("abc"), answer("ab")) is None


@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_neither_answer_is_the_right_one(one: str, other: str) -> None:
    assert find_first_difference(answer(one), answer(other)) == find_first_difference(answer(other), answer(one))


@pytest.mark.parametrize(
    ("odd", "usual", "both", "lossy"),
    [
        (0, 0, 0, False),
        (9, 0, 0, False),
        (10, 0, 0, True),
        (12, 1, 0, False),
        (13, 1, 0, True),
        (14, 14, 0, False),
        (0, 24, 0, False),
        (0, 0, 24, False),
        (20, 1, 3, True),
    ],
)
def test_answers_of_the_canary_against_those_of_equal_engines(odd: int, usual: int, both: int, lossy: bool) -> None:
    found = answers(odd, usual, both)
    assert found.is_lossy(EQUIVALENCE_ALPHA) is lossy
    assert (found.canary_difference_count, found.control_difference_count) == (odd + both, usual + both)


def test_an_equal_canary_is_taken_for_lossy_as_seldom_as_promised() -> None:
    """Exactly: of the prompts that tell anything, each is the canary's with probability 1/2."""
    for alpha in (EQUIVALENCE_ALPHA, EQUIVALENCE_ALPHA / 2, 0.05):
        for telling in range(25):
            wrong = sum(math.comb(telling, odd) for odd in range(telling + 1) if answers(odd, telling - odd).is_lossy(alpha))
            assert wrong <= alpha * 2**telling


def test_sentences() -> None:
    assert answers(9, 1, 0, 14).message == (
        "Greedy answers differ from the control's in 9 of 24 prompts (the first after 3 tokens); the control's differ from the "
        "stable pods' in 1."
    )
    assert (
        answers(0, 0).message
        == "Greedy answers differ from the control's in 0 of 10 prompts; the control's differ from the stable pods' in 0."
    )
    assert "(the first after 1 token)" in answers(0, 0, 1).message
    some = EquivalenceResult((PromptDifference(),), 24, "the pod did not answer in time")
    assert some.message.endswith("in 0; 23 more were not answered: the pod did not answer in time.")
    none = EquivalenceResult(prompt_count=24, skip_reason="the engines ask for an API key, and Aerie has none")
    assert none.message == "Greedy answers were not compared: the engines ask for an API key, and Aerie has none."
    assert none.is_lossy(1.0) is False


def test_answers_survive_a_crash_and_are_shown() -> None:
    found = EquivalenceResult((PromptDifference(3, None), PromptDifference(None, 0), PromptDifference()), 24, "why")
    assert EquivalenceResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert found.comparison == Comparison("OutputEquivalence", 3, found.message)
