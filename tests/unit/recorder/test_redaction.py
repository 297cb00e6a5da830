"""Redaction by patterns: every text at any depth, literally, and in linear time."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from aerie.recorder import redaction
from aerie.recorder.prompts import Prompt
from aerie.recorder.redaction import Pattern, PatternError, Redaction


@pytest.mark.parametrize("size", [100, 128])
def test_what_is_inserted_has_a_limit(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(redaction, "MAX_INSERTED_CHARACTERS", 10_000)
    patterns = (Pattern("[0-9]", "." * size), Pattern("a", ""))
    messages = [{"role": "user", "content": "1a" * 50}, {"role": "user", "content": "2" * 50}]
    if size == 100:
        assert len(redact(messages, *patterns)["messages"][0]["content"]) == 5000
    else:
        with pytest.raises(redaction.TooManyReplacementsError):
            redact(messages, *patterns)


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


CARD = Pattern(r"\b[0-9]{13,19}\b", "[card]")


@pytest.mark.parametrize("escape", ["\\n", "\\t", "\\u0020", "\\/"])
@pytest.mark.parametrize("role", ["assistant", "tool", "user"])
def test_text_behind_an_escape_is_redacted(escape: str, role: str) -> None:
    text = '{"to": "anna\\u0040example.com", "text": "Card:' + escape + '4111111111111111", "anna\\u0040example.com": 1}'
    message = {"role": role, "content": text, "tool_calls": [{"function": {"name": "pay", "arguments": text}}]}
    (redacted,) = redact([message], Pattern("(?i)ANNA@[a-z.]+", "[mail]"), CARD)["messages"]
    for stored in (redacted["content"], redacted["tool_calls"][0]["function"]["arguments"]):
        decoded = json.loads(f'"{escape}"')
        assert json.loads(stored) == {"to": "[mail]", "text": f"Card:{decoded}[card]", "[mail]": 1}


def test_json_in_which_nothing_matches_stays_as_it_was_sent() -> None:
    text = '{ "b":"M\\u00fcller\\n", "a":[1.50, 2e3 ] }'
    assert redact([{"role": "user", "content": text}], MAIL, CARD)["messages"][0]["content"] == text


def test_json_in_json_and_patterns_of_its_syntax() -> None:
    inner = json.dumps({"text": "\n4111111111111111", "secret": "abc"})
    text = json.dumps([inner, "x"])
    (redacted,) = redact([{"role": "user", "content": text}], CARD, Pattern('"secret": "[^"]*"', '"secret": ""'))["messages"]
    assert json.loads(json.loads(redacted["content"])[0]) == {"text": "\n[card]", "secret": ""}
    assert redact([{"role": "user", "content": '"a\n4111111111111111'}], CARD)["messages"][0]["content"] == '"a\n[card]'
    deep = "[" * 100_000 + "4111111111111111"
    assert redact([{"role": "user", "content": deep}], CARD)["messages"][0]["content"].endswith("[[card]")


@pytest.mark.parametrize("number", [4111111111111111, -4111111111111111, 4111111111111111.0, 4.0e18])
def test_number_that_matches_becomes_a_text(number: float) -> None:
    arguments = json.dumps({"card": number, "count": 2, "on": True})
    call = {"function": {"name": "pay", "arguments": arguments}}
    prompt = redact(
        [{"role": "assistant", "content": None, "tool_calls": [call]}],
        CARD,
        tools=[{"default": number}],
        template_arguments={"documents": [{"card": number, "share": 0.5, "on": True}], "limit": 3},
    )
    card = "-[card]" if number < 0 else "[card]"
    assert prompt["tools"] == [{"default": card}]
    assert prompt["chat_template_kwargs"] == {"documents": [{"card": card, "share": 0.5, "on": True}], "limit": 3}
    stored = json.loads(prompt["messages"][0]["tool_calls"][0]["function"]["arguments"])
    assert stored == {"card": card, "count": 2, "on": True}


EXAMPLE = Path(__file__).parents[3] / "examples/capture.yaml"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("Write to Anna.Lee+news@mail.example.com, please", "Write to [mail], please"),
        ("jürgen.müller@example.com anna@bücher.example анна@пример.рф", "[mail] [mail] [mail]"),
        ("<mailto:anna_lee@example.com>", "<mailto:[mail]>"),
        ("4111111111111111, 4222222222222 and 6304000000000000000", "[card], [card] and [card]"),
        ("4111 1111 1111 1111 / 4111-1111-1111-1111 / 3782 822463 10005", "[card] / [card] / [card]"),
        ('{"card": 4111111111111111}', '{"card": "[card]"}'),
        ("@name wrote at 10:15 on 2026-03-01: 123456789012 and 3.14159", None),
    ],
)
def test_patterns_of_the_example(text: str, redacted: str | None) -> None:
    patterns = yaml.safe_load(EXAMPLE.read_text())["spec"]["capture"]["redaction"]["patterns"]
    (message,) = redact([{"role": "user", "content": text}], *(Pattern(**pattern) for pattern in patterns))["messages"]
    assert message["content"] == (text if redacted is None else redacted)


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
