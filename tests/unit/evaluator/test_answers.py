"""Counts of answers: whole ones, those without counts, and whatever else an engine may send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.evaluator.answers import Answer, AnswerProblem, parse_answer
from aerie.evaluator.requests import CHAT_PATH, COMPLETIONS_PATH
from tests.unit.evaluator.fake_engine import build_answer


def parse(document: object) -> Answer | AnswerProblem:
    return parse_answer(json.dumps(document).encode())


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
def test_counts_of_an_answer(path: str) -> None:
    answer = parse(build_answer(path, histogram=(1, 1, 0, 2), tokens=12, seconds=1.5))
    assert isinstance(answer, Answer)
    assert (answer.tokens, answer.drafted_tokens, answer.steps, answer.histogram) == (12, 11, 4, (1, 1, 0, 2))
    assert (answer.finish_reason, answer.engine_seconds) == ("stop", 1.5)
    assert answer.completion is not None
    assert answer.completion.tokens[:2] == ("token_id:0", "token_id:1")
    likeliest = {f"token_id:{900 + rank}": -2.0 - rank for rank in range(5)}
    assert answer.completion.top_logprobs[1] == {"token_id:1": -0.5, **likeliest}
    assert "token_id" not in repr(answer)


@pytest.mark.parametrize(
    ("histogram", "tokens", "steps"),
    [
        ((0, 0, 0, 3), 13, 3),  # three full steps after the first token
        ((0, 0, 0, 3), 10, 3),  # the last step has accepted three tokens past the end
        ((2, 0), 3, 2),
        ((2, 0), 8, 7),  # five tokens that no step with drafts has produced
        ((0, 0), 1, 0),
        ((0, 0), 5, 4),  # nothing was drafted
    ],
)
def test_steps_without_drafts_are_added_where_tokens_prove_them(histogram: tuple[int, ...], tokens: int, steps: int) -> None:
    answer = parse(build_answer(histogram=histogram, tokens=tokens))
    assert isinstance(answer, Answer)
    assert answer.steps == steps


def with_metrics(metrics: object) -> dict[str, Any]:
    return build_answer() | {"metrics": metrics}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([], AnswerProblem.FAILED),
        ({}, AnswerProblem.FAILED),
        ({"error": {"message": "x"}}, AnswerProblem.FAILED),
        (build_answer() | {"choices": []}, AnswerProblem.FAILED),
        (build_answer() | {"usage": None}, AnswerProblem.FAILED),
        (build_answer(tokens=0), AnswerProblem.FAILED),
        (build_answer(finish_reason="abort"), AnswerProblem.UNAVAILABLE),
        (build_answer(finish_reason="error"), AnswerProblem.FAILED),
        (with_metrics(None), AnswerProblem.WITHOUT_METRICS),
        (with_metrics({}), AnswerProblem.WITHOUT_METRICS),
        (with_metrics({"speculative_decoding": None}), AnswerProblem.WITHOUT_METRICS),
        (with_metrics({"speculative_decoding": {"acceptance_histogram": [1]}}), AnswerProblem.WITHOUT_METRICS),
        (
            with_metrics({"speculative_decoding": {"acceptance_histogram": [1, -1], "num_spec_steps": 0}}),
            AnswerProblem.WITHOUT_METRICS,
        ),
        (
            with_metrics({"speculative_decoding": {"acceptance_histogram": [1, 1], "num_spec_steps": 3}}),
            AnswerProblem.WITHOUT_METRICS,
        ),
        (build_answer(stop_reason="\n") | {"metrics": None}, AnswerProblem.STOP_STRING),
        (build_answer(stop_reason=5) | {"metrics": None}, AnswerProblem.WITHOUT_METRICS),
    ],
)
def test_answers_without_counts(document: object, problem: AnswerProblem) -> None:
    assert parse(document) is problem


def test_unknown_fields_and_finish_reasons_are_accepted() -> None:
    document = build_answer(finish_reason="a prompt in the wrong field")
    document["metrics"]["speculative_decoding"]["acceptance_histogram_by_draft_length"] = [[1]]
    answer = parse(document)
    assert isinstance(answer, Answer)
    assert answer.finish_reason == "other"


@pytest.mark.parametrize("milliseconds", [None, -1, "5", True, float("nan"), float("inf"), 10**400])
def test_seconds_need_a_number(milliseconds: object) -> None:
    document = build_answer()
    document["metrics"]["generation_time_ms"] = milliseconds
    answer = parse(document)
    assert isinstance(answer, Answer)
    assert answer.engine_seconds is None


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {},
        {"content": None},
        {"content": []},
        {"content": [{"token": "a", "logprob": None, "top_logprobs": []}]},
        {"content": [{"token": "a", "logprob": -1}]},
        {"tokens": ["a"], "token_logprobs": [], "top_logprobs": []},
        {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None]},
    ],
)
def test_malformed_log_probabilities_cost_the_comparison_of_answers_only(logprobs: object) -> None:
    answer = parse(build_answer(logprobs=logprobs))
    assert isinstance(answer, Answer)
    assert answer.completion is None
    assert answer.steps == 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_no_response_raises(data: st.DataObject) -> None:
    document = build_answer(data.draw(st.sampled_from([CHAT_PATH, COMPLETIONS_PATH])))
    node: Any = document
    for _ in range(data.draw(st.integers(0, 4))):
        children = [
            value for value in (node.values() if isinstance(node, dict) else node) if isinstance(value, dict | list) and value
        ]
        if not children:
            break
        node = data.draw(st.sampled_from(children))
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    node[data.draw(st.sampled_from(keys))] = data.draw(JSON)
    answer = parse(document)
    if isinstance(answer, Answer):
        assert answer.tokens >= 1
        assert answer.steps >= sum(answer.histogram)


@given(st.binary(max_size=100))
def test_no_bytes_raise(body: bytes) -> None:
    assert isinstance(parse_answer(body), Answer | AnswerProblem)
