"""Sources of conversations, and what is trained on of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie_drafter.chat_template import NO_TEMPLATE_ARGUMENTS, TemplateArguments
from aerie_drafter.errors import DataError
from aerie_drafter.train.conversations import Conversation, parse_conversation, read_conversations, read_texts
from aerie_drafter.train.data import load_corpus
from aerie_drafter.train.encode import encode_conversation, encode_conversations

Tokenizers = Callable[..., Any]

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
RECORDS: list[dict[str, Any]] = [
    {"messages": MESSAGES},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {**MESSAGES[1], "tool_calls": None}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "id": "1"},
    {"prompt": "hi", "response": "hello"},
]

TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if thinking is defined and not thinking %}(off){% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}:{{ call.function.arguments.city }}]{% endfor %}"
    "<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def parse(record: Any) -> Conversation:
    return parse_conversation(record, "f:1")


@pytest.mark.parametrize("record", RECORDS)
def test_all_forms_are_the_same_conversation(record: Any, tokenizer_of: Tokenizers) -> None:
    conversation, expected = parse(record), parse(RECORDS[0])
    assert encode_conversation(tokenizer_of(), conversation.messages, "f:1") == encode_conversation(
        tokenizer_of(), expected.messages, "f:1"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "lines.json", "list.json"])
def test_files_of_lines_and_lists_are_read(tmp_path: Path, name: str) -> None:
    lines = "\n".join(map(json.dumps, RECORDS))
    (tmp_path / name).write_text(json.dumps(RECORDS, indent=1) if name == "list.json" else lines)
    assert [conversation.messages[0]["content"] for conversation in read_conversations(tmp_path / name)] == ["hi"] * 4


def test_parquet_files_and_data_sets_are_read_by_datasets(tmp_path: Path, tokenizer_of: Tokenizers) -> None:
    datasets = pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    records = [{"messages": [*MESSAGES, {"role": "tool", "content": "x", "tool_call_id": "1"}]}, {"messages": MESSAGES}]
    folder = tmp_path / "set"
    folder.mkdir()
    datasets.Dataset.from_list(records).to_parquet(folder / "train.parquet")
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, records)))
    expected = load_corpus([tmp_path / "set.jsonl"], tokenizer_of(), max_length=50)
    for source in (folder / "train.parquet", Path(f"hub:{folder}:train")):
        assert torch.equal(load_corpus([source], tokenizer_of(), max_length=50).tokens, expected.tokens)
    with pytest.raises(DataError, match=r"none.parquet: cannot be read"):
        list(read_conversations(tmp_path / "none.parquet"))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "f:1: conversations[0].role is 'narrator'; expected: one of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "f:1: messages[0].content has a part of type 'image_url'; only text",
        ),
        ({"messages": MESSAGES, "tools": "{"}, "f:1: tools is no JSON"),
        ({"messages": MESSAGES, "tools": [1]}, "f:1: tools is not a list of objects"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "f:1: chat_template_kwargs has tokenize, which"),
        ({"messages": MESSAGES, "sequences": [{"token_ids": ["a"]}]}, "f:1: sequences[0].token_ids is not a list of token ids"),
        (
            {"messages": MESSAGES, "sequences": [{"token_ids": [1, 2], "answer_spans": [[1, 2], [0, 1]]}]},
            "f:1: sequences[0].answer_spans is not a list of ascending",
        ),
        (
            {"messages": MESSAGES, "sequences": [{"token_ids": [1, 2], "answer_spans": [[1, 3]]}]},
            "f:1: sequences[0].answer_spans ends at 3, and there are 2 tokens",
        ),
    ],
)
def test_invalid_records_are_reported(record: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse(record)
    assert str(caught.value).startswith(message)


def test_tools_and_template_arguments_are_part_of_the_prompt(tokenizer_of: Tokenizers) -> None:
    tokenizer = tokenizer_of(TOOL_TEMPLATE)
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    conversation = parse(
        {
            "messages": [
                {"role": "user", "content": "rain?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "function", "content": "no"},
                {"role": "assistant", "content": "No."},
            ],
            "tools": json.dumps(TOOLS),
        }
    )
    defaults = TemplateArguments((), {"thinking": False})
    (encoded,) = encode_conversations(tokenizer, [conversation], 400, defaults)
    assert not isinstance(encoded, DataError)
    token_ids, mask = encoded
    text = tokenizer.decode(token_ids)
    assert text.startswith(
        json.dumps(TOOLS) + "(off)<user>rain?<end><assistant>[weather:Oslo]<end><tool>no<end><assistant>No.<end>"
    )
    learned = tokenizer.decode([token for token, counted in zip(token_ids, mask, strict=True) if counted])
    assert learned == "[weather:Oslo]<end>No.<end>"


THINKING_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m.reasoning and (loop.last or keep) %}(think){{ m.reasoning }}(/think){{ '\n\n' }}{% endif %}{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ '\n(call)' }}{{ call.function.name }}(/call){% endfor %}<end>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The form of Qwen3's: thinking before the content, of the last turn only, and tool calls after it."""


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("added", [(), ("(think)", "(/think)", "(call)", "(/call)")])
@pytest.mark.parametrize("content", ["4", "", None])
def test_thinking_and_tool_calls_are_learned_to_the_end_of_the_turn(
    tokenizer_of: Tokenizers, added: tuple[str, ...], content: str | None, *, keep: bool
) -> None:
    """Also if the thinking contains the answer, and if the tokens around a call are added tokens, as those of Qwen3 are."""
    tokenizer = tokenizer_of(THINKING_TEMPLATE)
    tokenizer.add_tokens(list(added))
    calls = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("f", "g")]
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": content, "reasoning": "2+2 is 4, clearly", "tool_calls": calls},
        {"role": "assistant", "content": "4", "reasoning_content": "so 4"},
        {"role": "assistant", "content": content, "tool_calls": calls[:1]},
    ]
    messages: list[dict[str, Any]] = [message for turn in turns for message in ({"role": "user", "content": "4?"}, turn)]
    token_ids, mask = encode_conversation(tokenizer, messages, "f:1", TemplateArguments((), {"keep": keep}))
    text = tokenizer.decode(token_ids)
    learned = _split_learned(tokenizer, token_ids, mask)
    shown = content or ""
    expected = [f"{shown}\n(call)f(/call)\n(call)g(/call)<end>", "4<end>", f"{shown}\n(call)f(/call)<end>"]
    if keep:
        expected[0], expected[1] = "(think)2+2 is 4, clearly(/think)\n\n" + expected[0], "(think)so 4(/think)\n\n4<end>"
    assert learned == expected
    assert text.count("<end>") == 6


def _split_learned(tokenizer: Any, token_ids: list[int], mask: list[bool]) -> list[str]:
    runs = groupby(zip(token_ids, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for counted, run in runs if counted]


def test_texts_are_read_without_exact_tokens(tmp_path: Path) -> None:
    record = {"messages": MESSAGES, "sequences": [{"token_ids": [1, 2], "answer_spans": [[1, 2]]}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    (conversation,), (text,) = read_conversations(tmp_path / "a.jsonl"), read_texts(tmp_path / "a.jsonl")
    assert conversation.sequences
    assert text == Conversation(conversation.location, conversation.messages)


def test_arguments_of_a_conversation_precede_those_of_the_settings() -> None:
    defaults = TemplateArguments(({"name": "a"},), {"x": 1, "y": 1})
    assert TemplateArguments((), {"x": 2}).with_defaults(defaults) == TemplateArguments(({"name": "a"},), {"x": 2, "y": 1})


def test_exact_tokens_are_not_encoded_again(tokenizer_of: Tokenizers) -> None:
    sequences = [{"token_ids": [1, 2, 3, 257, 256], "answer_spans": [[2, 5]]}, {"token_ids": [9, 8, 7], "answer_spans": [[1, 2]]}]
    conversation = parse({"messages": MESSAGES, "sequences": sequences})
    encoded = list(encode_conversations(tokenizer_of(), [conversation], 4, NO_TEMPLATE_ARGUMENTS))
    assert encoded == [([1, 2, 3, 257], [False, False, True, True]), ([9, 8, 7], [False, True, False])]


@pytest.mark.slow
def test_several_processes_give_the_same_tokens(tokenizer_of: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aerie_drafter.train.encode.CHUNK_SIZE", 50)  # more chunks than wait at a time
    conversations = [parse({"prompt": f"say {index}", "response": f"it is {index}"}) for index in range(1000)]
    alone = list(encode_conversations(tokenizer_of(), conversations, 30, NO_TEMPLATE_ARGUMENTS, 1))
    assert list(encode_conversations(tokenizer_of(), conversations, 30, NO_TEMPLATE_ARGUMENTS, 2)) == alone
    invalid = Conversation("f:9", ({"role": "user", "content": "x"},))
    *_, error = encode_conversations(tokenizer_of(), [*conversations, invalid], 30, NO_TEMPLATE_ARGUMENTS, 2)
    assert isinstance(error, DataError)
    assert str(error).startswith("f:9: no assistant's message")
