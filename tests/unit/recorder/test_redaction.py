"""Redaction by patterns: every text at any depth, literally, and in linear time."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.recorder.prompts import Prompt
from aerie.recorder.redaction import Pattern, PatternError, Redaction

MAIL = Pattern(r"[\w.+-]+@[\w.-]+", r"<mail \1>")


def redact(messages: list[dict[str, Any]], *patterns: Pattern, **fields: Any) -> dict[str, Any]:
    return Redaction(patterns).redact(Prompt(messages, **fields)).to_json()


def test_every_text_is_redacted() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "mail", "arguments": '{"to": "bob@example.com"}'}}
    prompt = redact(
        [
            {"role": "user", "content": "From bob@example.com to amy@example.com."},
            {"role": "assistant", "content": None, "reasoning": "bob@example.com", "tool_calls": [call]},
            {"role": "tool", "content": "sent to bob@example.com", "tool_call_id": "c"},
        ],
        MAIL,
        tools=[{"type": "function", "function": {"description": "as bob@example.com"}}],
        template_arguments={"documents": [{"text": "bob@example.com"}], "depth": 3, "on": True},
    )
    assert prompt["messages"][0]["content"] == r"From <mail \1> to <mail \1>"
    text = json.dumps(prompt)
    assert "example.com" not in text
    assert text.count("<mail") == 7
    assert prompt["chat_template_kwargs"]["depth"] == 3
    assert prompt["chat_template_kwargs"]["on"] is True


def test_patterns_apply_in_order_and_roles_stay() -> None:
    prompt = redact([{"role": "user", "content": "user 12"}], Pattern("user", "12"), Pattern("12", "x"))
    assert prompt["messages"] == [{"role": "user", "content": "x x"}]


def test_pattern_that_is_no_re2_is_an_error() -> None:
    with pytest.raises(PatternError, match=re.escape("'(?=a)' is no RE2 expression")):
        Redaction([Pattern("(?=a)", "x")])


def test_text_that_is_no_unicode_is_an_error() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        redact([{"role": "user", "content": "\ud800"}], MAIL)


def test_pattern_that_backtracks_elsewhere_takes_milliseconds() -> None:
    began = time.process_time()
    redact([{"role": "user", "content": "a" * 1_000_000 + "!"}], Pattern("(a*)*b", "x"))
    assert time.process_time() - began < 2.0


@given(st.lists(st.text()), st.lists(st.text("0123456789 ", min_size=1), min_size=1))
def test_no_match_remains(texts: list[str], further: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in (*texts, *further)]
    prompt = redact(messages, Pattern("[0-9]", "#"))
    assert len(prompt["messages"]) == len(messages)
    for before, after in zip(messages, prompt["messages"], strict=True):
        assert after["content"] == re.sub("[0-9]", "#", before["content"])
