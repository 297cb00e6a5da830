"""Files of prompts, and invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aerie_drafter.chat_template import TemplateArguments
from aerie_drafter.errors import DataError
from aerie_drafter.evaluate import read_prompts
from aerie_drafter.evaluate.prompts import Prompt, length_bucket

USER = {"role": "user", "content": "Hello"}


def write_prompts(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_all_formats_of_prompts_are_read(tmp_path: Path) -> None:
    prompts = read_prompts(
        write_prompts(
            tmp_path,
            {"category": "coding", "messages": [USER]},
            "",
            {"category": "qa", "turns": ["Hello", "And then?"]},
            {"prompt": "Hello"},
            {"text": "Once"},
        )
    )
    assert prompts == [Prompt("coding", (USER,)), Prompt("qa", (USER,)), Prompt("all", (USER,)), Prompt("all", (), "Once")]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "prompts.jsonl:1: invalid JSON"),
        ([1], "prompts.jsonl:1: a list; expected: an object"),
        ({"question": "?"}, "prompts.jsonl:1: it has the keys question; expected: messages"),
        ({"messages": []}, "expected: messages"),
        ({"messages": [{"role": "user"}]}, "expected: messages"),
        ({"messages": [USER, {"role": "assistant", "content": "Hi"}]}, "ends with an assistant"),
        ("", "no prompts"),
    ],
)
def test_invalid_lines_are_reported(tmp_path: Path, line: object, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_prompts(write_prompts(tmp_path, line))


def test_characters_that_unicode_takes_for_line_ends_are_part_of_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    text = "a\u2028b\u2029c\u0085d"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" + json.dumps({"prompt": "e"}) + "\n")
    assert [prompt.messages[0]["content"] for prompt in read_prompts(path)] == [text, "e"]


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


def test_a_length_belongs_to_the_bucket_of_the_next_bound() -> None:
    assert [length_bucket(length) for length in (1, 1024, 1025, 32768, 40000)] == [
        "<= 1024",
        "<= 1024",
        "<= 2048",
        "<= 32768",
        "> 32768",
    ]


def test_prompts_are_rendered_with_tools_and_template_arguments(tmp_path: Path) -> None:
    class Tokenizer:
        def apply_chat_template(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
            return json.dumps([messages, arguments])

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": list(text.encode())}

    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "r"}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": messages, "tools": tools}) + "\n" + json.dumps({"prompt": "q"}))
    first, second = read_prompts(tmp_path / "p.jsonl", TemplateArguments((), {"enable_thinking": False}))
    rendered, arguments = json.loads(bytes(first.encode(Tokenizer())))
    assert rendered[0]["tool_calls"][0]["function"]["arguments"] == {}
    assert arguments == {"tools": tools, "tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    assert json.loads(bytes(second.encode(Tokenizer())))[1] == {**arguments, "tools": None}
