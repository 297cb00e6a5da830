"""What is recorded of a request: exactly the listed fields, in the form that the drafter's package reads."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.recorder.prompts import Prompt, encode_line, parse_prompt, parse_request
from aerie.recorder.skip_reasons import SkipReason
from aerie_drafter.chat_template import RESERVED_ARGUMENTS
from aerie_drafter.evaluate.prompts import read_prompts
from aerie_drafter.train.conversations import read_conversations

TIME = datetime(2026, 3, 1, 15, 59, 59, tzinfo=timezone(timedelta(hours=1)))
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "a"}'}}


def encode(document: Any) -> bytes:
    parsed = parse_request(document)
    assert isinstance(parsed, tuple), parsed
    line = encode_line(*parsed, TIME)
    assert isinstance(line, bytes)
    assert len(line.decode().splitlines()) == 1
    assert line.endswith(b"\n")
    return line


def record(document: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(encode(document))
    return result


def test_all_that_is_recorded() -> None:
    document = {
        "model": "chat",
        "messages": [
            {"role": "system", "content": "Be brief.", "name": "operator-marker"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "bob-marker"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Search.", "refusal": "marker"},
            {"role": "tool", "content": "result", "tool_call_id": "c1", "name": "search"},
        ],
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "documents": [{"text": "source"}],
        "temperature": 0.7,
        "max_tokens": 64,
        "top_p": None,
        "top_k": "marker",
        "stop": ["marker"],
        "user": "marker",
        "metadata": {"marker": "marker"},
        "session_id": "marker",
        "seed": 4711,
    }
    assert record(document) == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one\ntwo"},
            {"role": "assistant", "content": None, "reasoning_content": "Search.", "tool_calls": [CALL]},
            {"role": "tool", "content": "result", "tool_call_id": "c1", "name": "search"},
        ],
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low", "documents": [{"text": "source"}]},
        "sampling": {"temperature": 0.7, "max_tokens": 64},
        "time": "2026-03-01T14:00:00Z",
    }


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], SkipReason.INVALID),
        ({}, SkipReason.INVALID),
        ({"messages": []}, SkipReason.INVALID),
        ({"messages": ["hello"]}, SkipReason.INVALID),
        ({"messages": [{"role": "marker", "content": "a"}]}, SkipReason.INVALID),
        ({"messages": [{"role": ["user"], "content": "a"}]}, SkipReason.INVALID),
        ({"messages": [{"role": "user"}]}, SkipReason.INVALID),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, SkipReason.INVALID),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:"}]}]}, SkipReason.NOT_TEXT),
        ({"messages": [USER], "tools": {}, "chat_template_kwargs": 1}, SkipReason.INVALID),
        ({"messages": [USER], "tools": "a"}, SkipReason.INVALID),
        ({"messages": [USER], "tools": ["a"]}, SkipReason.INVALID),
        ({"messages": [{"role": "assistant", "tool_calls": ["a"]}, USER]}, SkipReason.INVALID),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}, USER]}, SkipReason.INVALID),
        ({"messages": [USER], "chat_template_kwargs": {"chat_template": "a"}}, SkipReason.OWN_TEMPLATE),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": False}}, SkipReason.OWN_TEMPLATE),
        ({"messages": [USER], "chat_template": "{{ messages }}"}, SkipReason.OWN_TEMPLATE),
        ({"messages": [USER, {"role": "assistant", "content": "a"}], "continue_final_message": True}, SkipReason.OWN_TEMPLATE),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, SkipReason.OWN_TEMPLATE),
    ],
)
def test_other_requests_are_not_recorded(document: Any, reason: SkipReason) -> None:
    assert parse_request(document) is reason


@pytest.mark.parametrize("name", sorted(RESERVED_ARGUMENTS))
def test_arguments_that_the_drafters_package_rejects_are_not_recorded(name: str) -> None:
    assert parse_request({"messages": [USER], "chat_template_kwargs": {name: True}}) is SkipReason.OWN_TEMPLATE


@pytest.mark.parametrize("arguments", ['{"text": "Card:\\n4111', "[1]", '"a"', "", "[" * 100_000])
def test_arguments_that_are_no_object_are_stored_as_they_are_rendered(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": arguments}}
    (stored, _) = record({"messages": [{"role": "assistant", "tool_calls": [call]}, USER]})["messages"]
    assert stored["tool_calls"] == [call | {"function": {"name": "search", "arguments": "{}"}}]


def test_numbers_and_texts_that_json_lacks() -> None:
    for document in ({"messages": [USER], "temperature": float("nan")}, {"messages": [{"role": "user", "content": "\ud800"}]}):
        parsed = parse_request(document)
        assert isinstance(parsed, tuple)
        assert encode_line(*parsed, TIME) is SkipReason.INVALID


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(["messages", "tools", "chat_template_kwargs", "role", "content", "user", "temperature", "documents"])


@given(JSON | st.dictionaries(NAMES, JSON | st.lists(st.dictionaries(NAMES, JSON))))
def test_whatever_is_sent_gives_a_record_or_a_reason(document: Any) -> None:
    parsed = parse_request(document)
    if isinstance(parsed, SkipReason):
        return
    line = encode_line(*parsed, datetime.now(UTC))
    if isinstance(line, SkipReason):
        return
    assert json.loads(line).keys() <= {"messages", "tools", "chat_template_kwargs", "sampling", "time"}
    prompt = parse_prompt(json.loads(line))
    assert isinstance(prompt, Prompt)
    assert json.dumps(prompt.to_json()) == json.dumps(parsed[0].to_json())


def test_the_drafters_package_reads_the_lines(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    turns = [USER, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "é\u2028"}]
    single = encode({"messages": [USER], "temperature": 0})
    several = encode({"messages": turns, "tools": [TOOL], "reasoning_effort": "low"})
    prompts.write_bytes(several)
    assert [list(conversation.messages) for conversation in read_conversations(prompts)] == [turns]
    prompts.write_bytes(single + several)
    assert [prompt.messages[-1]["role"] for prompt in read_prompts(prompts)] == ["user", "user"]
