"""Output equivalence: when two greedy answers differ, and how many different answers make a canary lossy."""

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


def make_answer(text: str, *likely: dict[str, float]) -> GreedyCompletion:
    """Make an answer of one token a letter, each by far the likeliest; `likely` replaces the last logprobs."""
    usual = [{letter: -0.01, "~": -5.0} for letter in text]
    return GreedyCompletion(tuple(text), (*usual[: len(text) - len(likely)], *likely))


def make_result(odd: int, usual: int, both: int = 0, same: int = 10) -> EquivalenceResult:
    prompts = [
        *[PromptDifference()] * same,
        *[PromptDifference(canary_position=3)] * odd,
        *[PromptDifference(control_position=5)] * usual,
        *[PromptDifference(canary_position=1, control_position=1)] * both,
    ]
    return EquivalenceResult(tuple(prompts), len(prompts))


def test_equal_answers_do_not_differ() -> None:
    assert find_first_difference(make_answer("abc"), make_answer("abc")) is None
    assert compare_answers(make_answer("abc"), make_answer("abc"), make_answer("abc")) == PromptDifference()


def test_the_first_difference_counts_wherever_it_is() -> None:
    assert find_first_difference(make_answer("abcd"), make_answer("abxy")) == 2
    assert find_first_difference(make_answer("x"), make_answer("y")) == 0
    assert compare_answers(make_answer("abx"), make_answer("aby"), make_answer("azy")) == PromptDifference(
        canary_position=2, control_position=1
    )


@pytest.mark.parametrize("gap", [0.0, 0.3, MAX_ROUNDING_LOGPROB_GAP])
def test_rounding_may_choose_either_of_two_nearly_equal_tokens(gap: float) -> None:
    answer, other_answer = make_answer("abcx", {"x": -1.0, "y": -1.0 - gap}), make_answer("abcy", {"y": -1.0, "x": -1.0 - gap})
    assert find_first_difference(answer, other_answer) is None


def test_tokens_after_a_rounding_difference_are_not_compared() -> None:
    answer, other_answer = make_answer("ax"), make_answer("ay")
    near = [{"x": -0.7, "y": -0.71}, {"y": -0.7, "x": -0.71}]
    assert find_first_difference(make_answer("ax", near[0]), make_answer("ay", near[1])) is None
    longer = (
        GreedyCompletion((*answer.tokens, "p"), (answer.top_logprobs[0], near[0], {"p": -0.1})),
        GreedyCompletion((*other_answer.tokens, "q"), (other_answer.top_logprobs[0], near[1], {"q": -0.1})),
    )
    assert find_first_difference(*longer) is None


def test_a_token_far_less_likely_in_the_other_engine_is_different() -> None:
    answer, other_answer = make_answer("x", {"x": -0.5, "y": -1.0}), make_answer("y", {"y": -0.1, "x": -3.0})
    assert find_first_difference(answer, other_answer) == find_first_difference(other_answer, answer) == 0


def test_a_token_that_is_not_its_own_engines_likeliest_is_different() -> None:
    """A verification that accepts too much gives such tokens: the target itself would have chosen the other one."""
    drafted, right = make_answer("x", {"x": -0.9, "y": -0.6}), make_answer("y", {"y": -0.6, "x": -0.9})
    assert find_first_difference(drafted, right) == find_first_difference(right, drafted) == 0


def test_an_unlisted_token_is_no_likelier_than_the_last_listed_one() -> None:
    flat = {"x": -1.0, "p": -1.2, "q": -1.4}
    assert find_first_difference(make_answer("x", flat), make_answer("y", {"y": -1.0, "x": -1.1})) is None
    steep = {"x": -0.1, "p": -3.0, "q": -3.4}
    assert find_first_difference(make_answer("x", steep), make_answer("y", {"y": -1.0, "x": -1.1})) == 0


def test_the_end_of_an_answer_is_no_difference() -> None:
    assert find_first_difference(make_answer("abc"), make_answer("ab")) is None


@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_first_difference_is_symmetric(text: str, other_text: str) -> None:
    assert find_first_difference(make_answer(text), make_answer(other_text)) == find_first_difference(
        make_answer(other_text), make_answer(text)
    )


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
def test_lossy_compares_the_canary_with_equal_engines(odd: int, usual: int, both: int, lossy: bool) -> None:
    result = make_result(odd, usual, both)
    assert result.is_lossy(EQUIVALENCE_ALPHA) is lossy
    assert (result.canary_difference_count, result.control_difference_count) == (odd + both, usual + both)


def test_an_equal_canary_is_lossy_with_probability_below_alpha() -> None:
    """Exact test: each prompt with one different answer is the canary's with probability 1/2."""
    for alpha in (EQUIVALENCE_ALPHA, EQUIVALENCE_ALPHA / 2, 0.05):
        for differing in range(25):
            wrong = sum(
                math.comb(differing, odd) for odd in range(differing + 1) if make_result(odd, differing - odd).is_lossy(alpha)
            )
            assert wrong <= alpha * 2**differing


def test_equivalence_result_messages() -> None:
    assert make_result(9, 1, 0, 14).message == (
        "Greedy answers differ from the control's in 9 of 24 prompts (the first after 3 tokens); the control's differ from the "
        "stable pods' in 1."
    )
    assert (
        make_result(0, 0).message
        == "Greedy answers differ from the control's in 0 of 10 prompts; the control's differ from the stable pods' in 0."
    )
    assert "(the first after 1 token)" in make_result(0, 0, 1).message
    some = EquivalenceResult((PromptDifference(),), 24, "the pod did not answer in time")
    assert some.message.endswith("in 0; 23 more were not answered: the pod did not answer in time.")
    none = EquivalenceResult(prompt_count=24, skip_reason="the engines ask for an API key, and Aerie has none")
    assert none.message == "Greedy answers were not compared: the engines ask for an API key, and Aerie has none."
    assert none.is_lossy(1.0) is False


def test_equivalence_result_is_restored_and_displayed() -> None:
    result = EquivalenceResult((PromptDifference(3, None), PromptDifference(None, 0), PromptDifference()), 24, "why")
    assert EquivalenceResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    assert result.comparison == Comparison("OutputEquivalence", 3, result.message)
