"""The request that both engines get, and the reasons why they get none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.paired.sums import BUCKETS
from aerie.evaluator.keyed_hash import KeyedHash
from aerie.evaluator.requests import CHAT_PATH, COMPLETIONS_PATH, ReplayRequest, ReplayRules, build_replay
from aerie.evaluator.skip_reasons import SkipReason
from tests.unit.evaluator.fake_engine import CHAT, COMPLETION, KEYED_HASH, REQUESTS, RULES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=8,
)
FIELDS = [
    "n",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "user",
    "cache_salt",
    "prompt",
    "messages",
    "tools",
]


def build(document: object, path: str = CHAT_PATH, rules: ReplayRules = RULES, header: str = "") -> ReplayRequest | SkipReason:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return build_replay(path, body, header, 7, rules, KEYED_HASH)


def replay_of(document: dict[str, Any], path: str = CHAT_PATH, rules: ReplayRules = RULES) -> dict[str, Any]:
    replay = build(document, path, rules)
    assert isinstance(replay, ReplayRequest)
    return dict(json.loads(replay.body))


def test_chat_is_replayed_with_one_whole_answer_and_its_log_probabilities() -> None:
    assert replay_of(CHAT | {"stream": True, "stream_options": {"include_usage": True}, "seed": 42, "logprobs": False}) == {
        **CHAT,
        "stream": False,
        "seed": 7,
        "max_completion_tokens": 64,
        "logprobs": True,
        "top_logprobs": 6,
        "return_tokens_as_token_ids": True,
    }


def test_completion_is_replayed_with_one_whole_answer_and_its_log_probabilities() -> None:
    assert replay_of({"prompt": [1, 2, 3], "echo": True, "logprobs": 1, "n": 1}, COMPLETIONS_PATH) == {
        "prompt": [1, 2, 3],
        "stream": False,
        "seed": 7,
        "max_tokens": 16,  # vLLM's default
        "logprobs": 6,
        "return_tokens_as_token_ids": True,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1},
        {"model": "adapter", "stop": ["\n"], "stop_token_ids": [5], "ignore_eos": True, "bad_words": ["x"]},
        {"tools": [{"type": "function"}], "tool_choice": "auto", "parallel_tool_calls": False},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]},
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "documents": []},
        {"a_field_of_a_later_release": 1},
    ],
)
def test_the_users_own_parameters_stay(fields: dict[str, Any]) -> None:
    assert replay_of(CHAT | fields).items() >= fields.items()


@pytest.mark.parametrize(
    "name",
    [
        *("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "session_id", "request_id"),
        *("priority", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
        *("stream_options", "stream_interval", "echo", "prompt_logprobs", "logprob_token_ids"),
        *("return_token_ids", "return_token_offsets", "return_prompt_text", "return_weight_versions"),
    ],
)
def test_fields_that_belong_to_the_original_request_are_left_out(name: str) -> None:
    assert name not in replay_of(CHAT | {name: "secret"})


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT_PATH, {}, 64),
        (CHAT_PATH, {"max_tokens": 10}, 10),
        (CHAT_PATH, {"max_tokens": 10, "max_completion_tokens": 20}, 20),
        (CHAT_PATH, {"max_tokens": None, "max_completion_tokens": None}, 64),
        (CHAT_PATH, {"max_tokens": 1000}, 64),
        (COMPLETIONS_PATH, {"max_tokens": None}, 16),
        (COMPLETIONS_PATH, {"max_tokens": 1000}, 64),
        (COMPLETIONS_PATH, {"max_tokens": 1}, SkipReason.TOO_SHORT),
        (CHAT_PATH, {"max_tokens": 0}, SkipReason.TOO_SHORT),
        (CHAT_PATH, {"max_tokens": -1}, SkipReason.TOO_SHORT),
        (CHAT_PATH, {"max_tokens": "10"}, SkipReason.INVALID),
        (CHAT_PATH, {"max_tokens": True}, SkipReason.INVALID),
    ],
)
def test_length_is_the_users_up_to_the_limit(path: str, fields: dict[str, Any], expected: int | SkipReason) -> None:
    replay = build(REQUESTS[path] | fields, path)
    if isinstance(replay, ReplayRequest):
        document = json.loads(replay.body)
        assert document.get("max_completion_tokens", document.get("max_tokens")) == expected
        assert not {"max_tokens", "max_completion_tokens"} <= document.keys()
    else:
        assert replay is expected


def test_minimum_length_stays_below_the_limit() -> None:
    assert replay_of(CHAT | {"min_tokens": 100})["min_tokens"] == 64
    assert replay_of(CHAT | {"min_tokens": 10})["min_tokens"] == 10


def test_priority_is_sent_only_to_engines_that_have_priorities() -> None:
    assert "priority" not in replay_of(CHAT | {"priority": 3})
    assert replay_of(CHAT | {"priority": 3}, rules=ReplayRules(64, priority=1000))["priority"] == 1000


def test_cache_salt_separates_the_same_requests_under_another_name() -> None:
    first, same, other = (replay_of(CHAT | {"cache_salt": salt})["cache_salt"] for salt in ("a", "a", "b"))
    assert first == same != other
    assert first != "a"
    assert len(first) == 32


@pytest.mark.parametrize(
    ("path", "document", "reason"),
    [
        ("/v1/responses", {"input": "x"}, SkipReason.UNSUPPORTED_PATH),
        ("/v1/messages", CHAT, SkipReason.UNSUPPORTED_PATH),
        (CHAT_PATH, b"\xff", SkipReason.INVALID),
        (CHAT_PATH, b"{", SkipReason.INVALID),
        (CHAT_PATH, b"[" * 100_000, SkipReason.INVALID),
        (CHAT_PATH, b'{"max_tokens": ' + b"9" * 5000 + b"}", SkipReason.INVALID),
        (CHAT_PATH, [], SkipReason.INVALID),
        (CHAT_PATH, {}, SkipReason.INVALID),
        (CHAT_PATH, {"messages": []}, SkipReason.INVALID),
        (CHAT_PATH, {"messages": ["x"]}, SkipReason.INVALID),
        (CHAT_PATH, {"prompt": "x"}, SkipReason.INVALID),
        (COMPLETIONS_PATH, {"prompt": ""}, SkipReason.INVALID),
        (COMPLETIONS_PATH, {"prompt": 3}, SkipReason.INVALID),
        (COMPLETIONS_PATH, {"prompt": ["a", "b"]}, SkipReason.SEVERAL_ANSWERS),
        (COMPLETIONS_PATH, {"prompt": [[1], [2]]}, SkipReason.SEVERAL_ANSWERS),
        (COMPLETIONS_PATH, COMPLETION | {"best_of": 2}, SkipReason.SEVERAL_ANSWERS),
        (CHAT_PATH, CHAT | {"n": 2}, SkipReason.SEVERAL_ANSWERS),
        (CHAT_PATH, CHAT | {"use_beam_search": True}, SkipReason.SEVERAL_ANSWERS),
    ],
)
def test_requests_without_counts_are_skipped(path: str, document: object, reason: SkipReason) -> None:
    assert build(document, path) is reason


@pytest.mark.parametrize(
    ("part", "is_skipped"),
    [
        ({"type": "text", "text": "https://example.com"}, False),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, True),
        ({"type": "image_url", "image_url": "https://example.com/a.png"}, True),
        ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, True),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, False),
    ],
)
def test_media_that_the_engines_would_fetch_are_skipped(part: dict[str, Any], is_skipped: bool) -> None:
    result = build({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [part, "x"]}]})
    assert (result is SkipReason.MEDIA_URL) is is_skipped


def bucket(document: dict[str, Any], header: str = "") -> int:
    replay = build(document, header=header)
    assert isinstance(replay, ReplayRequest)
    return replay.bucket


def test_cluster_is_the_header_else_the_user_else_the_session_else_the_request() -> None:
    def content(number: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": str(number)}], "temperature": 0}

    numbers = range(30)
    assert len({bucket(content(number)) for number in numbers}) > 5
    assert bucket(content(1)) == bucket(content(1) | {"seed": 3, "stream": True})  # a retry
    assert len({bucket(content(number) | {"user": "a"}) for number in numbers}) == 1
    assert len({bucket(content(number) | {"session_id": "a"}) for number in numbers}) == 1
    assert len({bucket(content(number) | {"user": str(number)}, "a") for number in numbers}) == 1
    assert len({bucket(content(number) | {"user": str(number), "session_id": "a"}) for number in numbers}) > 5
    assert bucket(content(1) | {"user": 5}) == bucket(content(1) | {"user": ""}) == bucket(content(1))


def test_hashes_of_two_processes_have_nothing_in_common() -> None:
    names = [str(number).encode() for number in range(100)]
    first, second = KeyedHash(), KeyedHash()
    assert [first.bucket(name) for name in names] == [first.bucket(name) for name in names]
    assert [first.bucket(name) for name in names] != [second.bucket(name) for name in names]
    assert first.cache_salt("a") != second.cache_salt("a")


def test_a_request_is_greedy_at_temperature_0_only() -> None:
    for temperature, is_greedy in ((0, True), (0.0, True), (0.7, False), (None, False)):
        replay = build(CHAT | {"temperature": temperature})
        assert isinstance(replay, ReplayRequest)
        assert replay.is_greedy is is_greedy


STATED = {"temperature": 1, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0}


@pytest.mark.parametrize(
    ("fields", "with_defaults_of_the_model", "with_neutral_defaults"),
    [
        (STATED, True, True),
        (STATED | {"top_p": 0.9, "max_tokens": 5, "stream": True, "user": "a"}, True, True),
        (STATED | {"temperature": 1.1}, False, False),
        (STATED | {"temperature": 0}, False, False),
        (STATED | {"repetition_penalty": 1.1}, False, False),
        (STATED | {"presence_penalty": None}, False, True),
        ({"temperature": None}, False, True),
        ({"temperature": 0.5}, False, True),
        (STATED | {"logit_bias": {"5": 10}}, False, False),
        (STATED | {"tools": []}, False, False),
        (STATED | {"response_format": {"type": "json_object"}}, False, False),
        (STATED | {"a_field_of_a_later_release": 1}, False, False),
    ],
)
def test_requests_whose_tokens_can_be_compared_with_the_targets_probabilities(
    fields: dict[str, Any], with_defaults_of_the_model: bool, with_neutral_defaults: bool
) -> None:
    for rules, is_plain in (
        (RULES, with_defaults_of_the_model),
        (ReplayRules(64, has_neutral_defaults=True), with_neutral_defaults),
    ):
        replay = build({"messages": CHAT["messages"], **fields}, rules=rules)
        assert isinstance(replay, ReplayRequest)
        assert replay.is_plain is is_plain


WHOLE = STATED | {"top_p": 1.0, "top_k": -1, "min_p": 0}


@pytest.mark.parametrize(
    ("fields", "with_defaults_of_the_model", "with_neutral_defaults"),
    [
        (WHOLE, True, True),
        (WHOLE | {"top_k": 0}, True, True),
        (STATED, False, True),
        ({}, False, True),
        (WHOLE | {"temperature": 0.7}, False, False),
        (WHOLE | {"top_p": 0.95}, False, False),
        (WHOLE | {"top_k": 20}, False, False),
        (WHOLE | {"min_p": 0.1}, False, False),
        (WHOLE | {"presence_penalty": 0.1}, False, False),
        (WHOLE | {"tools": []}, False, False),
    ],
)
def test_exact_requests_sample_as_the_target_says(
    fields: dict[str, Any], with_defaults_of_the_model: bool, with_neutral_defaults: bool
) -> None:
    for rules, is_exact in (
        (RULES, with_defaults_of_the_model),
        (ReplayRules(64, has_neutral_defaults=True), with_neutral_defaults),
    ):
        replay = build({"messages": CHAT["messages"], **fields}, rules=rules)
        assert isinstance(replay, ReplayRequest)
        assert replay.is_exact is is_exact


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(), JSON, max_size=6), st.sampled_from(sorted(REQUESTS)), st.booleans())
def test_any_document_is_replayed_as_one_answer_or_skipped(document: dict[str, Any], path: str, is_request: bool) -> None:
    replay = build((REQUESTS[path] if is_request else {}) | document, path)
    if isinstance(replay, ReplayRequest):
        sent = json.loads(replay.body)
        assert sent["seed"] == 7
        assert sent["stream"] is False
        assert 2 <= sent["max_completion_tokens" if path == CHAT_PATH else "max_tokens"] <= 64
        assert not {"n", "user", "request_id"} & sent.keys()
        assert 0 <= replay.bucket < BUCKETS
        assert "body" not in repr(replay)


@given(st.binary(max_size=200))
def test_any_bytes_are_skipped_or_replayed(body: bytes) -> None:
    assert isinstance(build(body), SkipReason | ReplayRequest)
