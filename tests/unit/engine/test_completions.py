"""The completion request of the greedy answers, and the parser of vLLM's response."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aerie.engine.completions import (
    MAX_COMPLETION_TOKENS,
    PROBE_PROMPTS,
    TOP_LOGPROBS,
    CompletionError,
    GreedyCompletion,
    build_completion_request,
    parse_completion,
    read_error_type,
)

# Response of vLLM 0.32.0 to a request with max_tokens 2, shortened.
BODY: dict[str, Any] = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": "target",
    "choices": [
        {
            "index": 0,
            "text": " th",
            "logprobs": {
                "text_offset": [0, 12],
                "token_logprobs": [-0.5, -0.25],
                "tokens": ["token_id:32", "token_id:116"],
                "top_logprobs": [{"token_id:32": -0.5, "token_id:46": -1.5}, {"token_id:116": -0.25, "token_id:97": -9999.0}],
            },
            "finish_reason": "length",
        }
    ],
}


def build_body(**logprobs: Any) -> bytes:
    choice = BODY["choices"][0]
    return json.dumps({**BODY, "choices": [{**choice, "logprobs": {**choice["logprobs"], **logprobs}}]}).encode()


def test_the_request_is_greedy_short_and_without_penalties() -> None:
    request = json.loads(build_completion_request("chat", PROBE_PROMPTS[0]))
    assert request == {
        "model": "chat",
        "prompt": PROBE_PROMPTS[0],
        "max_tokens": MAX_COMPLETION_TOKENS,
        "temperature": 0,
        "seed": 0,
        "repetition_penalty": 1.0,
        "logprobs": TOP_LOGPROBS,
        "return_tokens_as_token_ids": True,
    }


def test_prompts_are_short_and_begin_differently() -> None:
    assert len(PROBE_PROMPTS) == 24
    assert len({prompt[:8] for prompt in PROBE_PROMPTS}) == 24
    assert max(len(prompt.encode()) for prompt in PROBE_PROMPTS) < 100


def test_a_response_of_vllm_is_parsed() -> None:
    expected = ({"token_id:32": -0.5, "token_id:46": -1.5}, {"token_id:116": -0.25, "token_id:97": -9999.0})
    assert parse_completion(json.dumps(BODY).encode()) == GreedyCompletion(("token_id:32", "token_id:116"), expected)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "has no log probabilities in vLLM's form"),
        (b"[]", "has no log probabilities in vLLM's form"),
        (b"\xff", "has no log probabilities in vLLM's form"),
        (b'{"choices": []}', "has no log probabilities in vLLM's form"),
        (json.dumps({"choices": [{"logprobs": None}]}).encode(), "has no log probabilities in vLLM's form"),
        (build_body(top_logprobs=[None, None]), "has no log probabilities in vLLM's form"),
        (build_body(top_logprobs=[{"token_id:32": "x"}, {}]), "has no log probabilities in vLLM's form"),
        (build_body(tokens=[], top_logprobs=[]), "has 0 tokens"),
        (build_body(tokens=["token_id:32"]), "has 1 tokens and log probabilities of 2"),
        (build_body(tokens=["a"] * 65, top_logprobs=[{"a": 0.0}] * 65), "has 65 tokens"),
        (build_body(tokens=["token_id:32", "token_id:99"]), "of one of its tokens"),
    ],
)
def test_invalid_responses_are_rejected(body: bytes, message: str) -> None:
    with pytest.raises(CompletionError, match=message):
        parse_completion(body)


@pytest.mark.parametrize(
    ("body", "error_type"),
    [
        (b'{"error": {"message": "The model `x` does not exist.", "type": "NotFoundError", "code": 404}}', "NotFoundError"),
        (b'{"error": {"message": "hunter2", "type": "hunter2"}}', ""),
        (b'{"error": {"type": ["NotFoundError"]}}', ""),
        (b'{"error": "Unauthorized"}', ""),
        (b'{"message": "no"}', ""),
        (b"[" * 100_000, ""),
        (b"<html>", ""),
        (b"[1]", ""),
        (b"\xff", ""),
    ],
    ids=range(9),
)
def test_the_error_type_of_an_error_response(body: bytes, error_type: str) -> None:
    assert read_error_type(body) == error_type
