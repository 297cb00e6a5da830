"""What is recorded of a request, in the form that `aerie-drafter generate` reads:

    {"messages": [{"role": ..., "content": ...}, ...], "tools": [...], "chat_template_kwargs": {...},
     "sampling": {"temperature": 0.7, ...}, "time": "2026-03-01T14:00:00Z"}

Fields are named one by one: what is not listed here is not recorded. Of earlier answers in a conversation, the client's own copy
is part of the prompt. vLLM passes `reasoning_effort` and `documents` to the template too, so they are template arguments here.
Arguments of a tool call that are no JSON object become `{}`, as vLLM renders them (vllm/renderers/chat_utils.py of 0.32).

Guarantees: pure. `name` is kept in messages of tools alone, where it names a function and no person. The time is the full hour.
A line holds one record, has at most MAX_LINE_BYTES, and is valid UTF-8. Tools and tool calls are objects, and the engine sets
none of the template arguments itself. Not guaranteed: that a template accepts the messages, or the engine their length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aerie.recorder.skip_reasons import SkipReason

CHAT_PATH = "/v1/chat/completions"
MAX_LINE_BYTES = 2 * 2**20
"""Size limit of a line, which may be longer than its request: by replacements, a hook's texts, or escapes."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_TEXTS = ("tool_call_id", "reasoning", "reasoning_content")
_TEMPLATE_ARGUMENTS = ("reasoning_effort", "documents")
_RESERVED_ARGUMENTS = frozenset(
    {"chat_template", "tokenize", "messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"}
)
"""Template arguments that the engine sets itself: it rejects them in a request, or ignores them."""
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "n"),
)
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Characters that JSON leaves as they are and some readers take for the end of a line, with their escapes."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The part of a request that may hold what a user wrote, and that is redacted."""

    messages: Sequence[Mapping[str, Any]] = field(repr=False)
    tools: Sequence[Any] = field(default=(), repr=False)
    template_arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are not empty."""
        fields = {"messages": list(self.messages), "tools": list(self.tools), "chat_template_kwargs": self.template_arguments}
        return {name: value for name, value in fields.items() if value}


def parse_request(document: Any) -> tuple[Prompt, Mapping[str, float]] | SkipReason:
    """Return the prompt and the sampling parameters of a request, or why it is not recorded."""
    if not isinstance(document, dict):
        return SkipReason.INVALID
    if document.get("chat_template") or document.get("continue_final_message"):
        return SkipReason.OWN_TEMPLATE
    own = {name: document[name] for name in _TEMPLATE_ARGUMENTS if document.get(name)}
    kwargs = document.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        return SkipReason.INVALID
    prompt = parse_prompt(document | {"chat_template_kwargs": own | kwargs})
    if isinstance(prompt, SkipReason):
        return prompt
    return prompt, {name: document[name] for name in _SAMPLING if type(document.get(name)) in (int, float)}


def parse_prompt(document: Any) -> Prompt | SkipReason:
    """Return the prompt of a request, or of the hook's answer."""
    if not isinstance(document, dict):
        return SkipReason.INVALID
    messages, tools, kwargs = document.get("messages"), document.get("tools") or [], document.get("chat_template_kwargs") or {}
    if not isinstance(messages, list) or not messages or not _is_list_of_objects(tools) or not isinstance(kwargs, dict):
        return SkipReason.INVALID
    if _RESERVED_ARGUMENTS & kwargs.keys():
        return SkipReason.OWN_TEMPLATE
    parsed = []
    for message in messages:
        result = _parse_message(message)
        if isinstance(result, SkipReason):
            return result
        parsed.append(result)
    if parsed[-1]["role"] == "assistant":
        return SkipReason.OWN_TEMPLATE
    return Prompt(tuple(parsed), tuple(tools), kwargs)


def _parse_message(message: Any) -> dict[str, Any] | SkipReason:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        return SkipReason.INVALID
    calls = message.get("tool_calls") or []
    content = _parse_content(message.get("content"))
    if isinstance(content, SkipReason):
        return content
    if not _is_list_of_objects(calls) or (content is None and not calls):
        return SkipReason.INVALID
    if not all(isinstance(call.get("function"), dict) for call in calls):
        return SkipReason.INVALID
    calls = [call | {"function": _parse_function(call["function"])} for call in calls]
    texts = {name: message[name] for name in _MESSAGE_TEXTS if isinstance(message.get(name), str)}
    if message["role"] == "tool" and isinstance(message.get("name"), str):
        texts["name"] = message["name"]
    return {"role": message["role"], "content": content, **texts, **({"tool_calls": calls} if calls else {})}


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _parse_function(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool call. A text as arguments has to be JSON, so that redaction can resolve its escapes."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    return function if is_object else {**function, "arguments": "{}"}


def _parse_content(content: Any) -> str | SkipReason | None:
    """Return the text of a message; vLLM joins the parts of a text by line feeds."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return SkipReason.INVALID
    if any(part.get("type") not in ("text", None) for part in content):
        return SkipReason.NOT_TEXT
    texts = [part.get("text") for part in content]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else SkipReason.INVALID


def encode_line(prompt: Prompt, sampling: Mapping[str, float], recorded_at: datetime) -> bytes | SkipReason:
    """Return the line of a prompt."""
    hour = recorded_at.astimezone(UTC).replace(minute=0, second=0, microsecond=0, tzinfo=None)
    record = prompt.to_json() | {"sampling": sampling, "time": f"{hour.isoformat()}Z"}
    try:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS).encode() + b"\n"
    except (ValueError, RecursionError):  # numbers that JSON lacks, and halves of surrogate pairs
        return SkipReason.INVALID
    return line if len(line) <= MAX_LINE_BYTES else SkipReason.TOO_LARGE
