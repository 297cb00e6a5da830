"""Prompts to measure on: a JSONL file in the form of SPEED-Bench, one object per line.

    {"category": "coding", "messages": [{"role": "user", "content": "..."}]}
    {"category": "qa", "turns": ["...", "..."]}          the user's turns; the first is asked, as `vllm bench` does
    {"category": "stem", "prompt": "..."}                the user's one message, as in training data
    {"category": "writing", "text": "..."}               a text to go on with as it is, without the chat template

SPEED-Bench (arXiv 2604.09557) has eleven categories and, for throughput, buckets of input length; its prompts have licences of
their own and are not here. Without a category a prompt is in the category `all`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie_drafter.errors import DataError

LENGTH_BUCKET_BOUNDS = (1024, 2048, 8192, 16384, 32768)
"""SPEED-Bench's input lengths, tokens."""


@dataclass(frozen=True)
class Prompt:
    """One prompt; `messages` is a conversation, or empty where `text` is to be continued as it is."""

    category: str
    messages: tuple[Mapping[str, str], ...] = ()
    text: str = ""

    def encode(self, tokenizer: Any) -> list[int]:
        """Token ids, the chat template and its generation prompt applied to a conversation. Raises DataError."""
        if not self.messages:
            return list(tokenizer(self.text)["input_ids"])
        try:
            text = tokenizer.apply_chat_template(list(self.messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise DataError(f"the chat template refuses a prompt of category {self.category}: {error}") from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file, in order. Raises DataError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}).") from error
    found = [_parse_prompt(line, f"{file}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise DataError(f"{file}: no prompt in it; one JSON object per line is expected.")
    return found


def _parse_prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no JSON ({error}); one object per line is expected.") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: a {type(record).__name__}; an object with messages, turns, prompt or text is expected.")
    category = str(record.get("category") or "all")
    messages, turns, text = record.get("messages"), record.get("turns"), record.get("text")
    if isinstance(record.get("prompt"), str):
        turns = [record["prompt"]]
    if isinstance(messages, list) and messages and all(_is_message(each) for each in messages):
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{where}: messages ends with the assistant; it has to end with what is to be answered.")
        return Prompt(category, messages=tuple(messages))
    if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0]:
        return Prompt(category, messages=({"role": "user", "content": turns[0]},))
    if isinstance(text, str) and text:
        return Prompt(category, text=text)
    raise DataError(
        f"{where}: it has the keys {', '.join(map(str, record)) or 'none'}; expected is messages (objects with role and "
        "content), turns (texts), prompt or text (a text), not empty."
    )


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def length_bucket(length: int, bounds: Sequence[int] = LENGTH_BUCKET_BOUNDS) -> str:
    """The bucket of an input length, as `<= 2048`."""
    return next((f"<= {bound}" for bound in bounds if length <= bound), f"> {bounds[-1]}")
