"""Evaluation prompts: a JSON Lines file in the format of SPEED-Bench.

    {"category": "coding", "messages": [{"role": "user", "content": "..."}]}
    {"category": "qa", "turns": ["...", "..."]}          the user's turns; only the first is used, as by `vllm bench`
    {"category": "stem", "prompt": "..."}                the user's one message, as in training data
    {"category": "writing", "text": "..."}               a text to continue, without the chat template

Any of them may have `tools` and `chat_template_kwargs`, as the deployment has them: see `aerie_drafter.chat_template`.

SPEED-Bench (arXiv 2604.09557) has eleven categories and, for throughput, buckets of input length; its prompts have other
licenses and are not included. The default category is `all`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie_drafter.chat_template import NO_TEMPLATE_ARGUMENTS, TemplateArguments, parse_template_arguments
from aerie_drafter.errors import DataError

LENGTH_BUCKET_BOUNDS = (1024, 2048, 8192, 16384, 32768)
"""Input lengths of SPEED-Bench, in tokens."""


@dataclass(frozen=True)
class Prompt:
    """A conversation in `messages`, or a `text` to continue."""

    category: str
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    template: TemplateArguments = NO_TEMPLATE_ARGUMENTS
    """Arguments of the chat template."""

    def encode(self, tokenizer: Any) -> list[int]:
        """Return the token ids; a conversation gets the chat template with its generation prompt. Raises DataError."""
        if not self.messages:
            return list(tokenizer(self.text)["input_ids"])
        text = self.template.render(tokenizer, self.messages, f"a prompt of category {self.category}", generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read_prompts(file: Path, template: TemplateArguments = NO_TEMPLATE_ARGUMENTS) -> list[Prompt]:
    """Read the prompts of a file in order. `template` has what a prompt does not set itself. Raises DataError."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # splitlines() also splits at U+2028, which JSON allows in a text
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}).") from error
    prompts = [_parse_prompt(line, f"{file}:{number}", template) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise DataError(f"{file}: no prompts; expected: one JSON object per line.")
    return prompts


def _parse_prompt(line: str, location: str, defaults: TemplateArguments) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: invalid JSON ({error}); expected: one object per line.") from None
    if not isinstance(record, dict):
        raise DataError(f"{location}: a {type(record).__name__}; expected: an object with messages, turns, prompt or text.")
    category = str(record.get("category") or "all")
    template = parse_template_arguments(record, location).with_defaults(defaults)
    messages, turns, text = record.get("messages"), record.get("turns"), record.get("text")
    if isinstance(record.get("prompt"), str):
        turns = [record["prompt"]]
    if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{location}: messages ends with an assistant's message; it must end with the one to answer.")
        return Prompt(category, messages=tuple(messages), template=template)
    if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0]:
        return Prompt(category, messages=({"role": "user", "content": turns[0]},), template=template)
    if isinstance(text, str) and text:
        return Prompt(category, text=text)
    raise DataError(
        f"{location}: it has the keys {', '.join(map(str, record)) or 'none'}; expected: messages (objects with role and "
        "content), turns (strings), prompt or text (a string), not empty."
    )


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str) or bool(value.get("content") is None and value.get("tool_calls"))


def length_bucket(length: int, bounds: Sequence[int] = LENGTH_BUCKET_BOUNDS) -> str:
    """Return the bucket of an input length, such as `<= 2048`."""
    return next((f"<= {bound}" for bound in bounds if length <= bound), f"> {bounds[-1]}")
