"""Evaluation prompts: a JSON Lines file in the format of SPEED-Bench.

    {"category": "coding", "messages": [{"role": "user", "content": "..."}]}
    {"category": "qa", "turns": ["...", "..."]}          the user's turns; only the first is used, as by `vllm bench`
    {"category": "stem", "prompt": "..."}                the user's one message, as in training data
    {"category": "writing", "text": "..."}               a text to continue, without the chat template

SPEED-Bench (arXiv 2604.09557) has eleven categories and, for throughput, buckets of input length; its prompts have other
licenses and are not included. The default category is `all`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie_drafter.errors import DataError

LENGTH_BUCKET_BOUNDS = (1024, 2048, 8192, 16384, 32768)
"""Input lengths of SPEED-Bench, in tokens."""


@dataclass(frozen=True)
class Prompt:
    """A conversation in `messages`, or a `text` to continue."""

    category: str
    messages: tuple[Mapping[str, str], ...] = ()
    text: str = ""

    def encode(self, tokenizer: Any) -> list[int]:
        """Return the token ids; a conversation gets the chat template with its generation prompt. Raises DataError."""
        if not self.messages:
            return list(tokenizer(self.text)["input_ids"])
        try:
            text = tokenizer.apply_chat_template(list(self.messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise DataError(f"the chat template rejects a prompt of category {self.category}: {error}") from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read_prompts(file: Path) -> list[Prompt]:
    """Read the prompts of a file in order. Raises DataError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}).") from error
    prompts = [_parse_prompt(line, f"{file}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise DataError(f"{file}: no prompts; expected: one JSON object per line.")
    return prompts


def _parse_prompt(line: str, location: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: invalid JSON ({error}); expected: one object per line.") from None
    if not isinstance(record, dict):
        raise DataError(f"{location}: a {type(record).__name__}; expected: an object with messages, turns, prompt or text.")
    category = str(record.get("category") or "all")
    messages, turns, text = record.get("messages"), record.get("turns"), record.get("text")
    if isinstance(record.get("prompt"), str):
        turns = [record["prompt"]]
    if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{location}: messages ends with an assistant's message; it must end with the one to answer.")
        return Prompt(category, messages=tuple(messages))
    if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0]:
        return Prompt(category, messages=({"role": "user", "content": turns[0]},))
    if isinstance(text, str) and text:
        return Prompt(category, text=text)
    raise DataError(
        f"{location}: it has the keys {', '.join(map(str, record)) or 'none'}; expected: messages (objects with role and "
        "content), turns (strings), prompt or text (a string), not empty."
    )


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def length_bucket(length: int, bounds: Sequence[int] = LENGTH_BUCKET_BOUNDS) -> str:
    """Return the bucket of an input length, such as `<= 2048`."""
    return next((f"<= {bound}" for bound in bounds if length <= bound), f"> {bounds[-1]}")
