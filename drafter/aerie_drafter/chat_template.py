"""The target's prompt: its chat template with the tools and arguments of the deployment.

A template may take more than messages: tool definitions, and arguments such as `enable_thinking`. The drafter has to be trained
and evaluated on the prompt that is served, so answers, training and evaluation render with the same `TemplateArguments`.

Guarantees: tool calls and reasoning of messages have the form in which vLLM passes them to a template (vllm/renderers/
chat_utils.py of 0.32), and missing arguments have the template's own defaults. Not rendered: images and audio.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aerie_drafter.errors import ConfigError, DataError

ChatMessage = Mapping[str, Any]

RESERVED_ARGUMENTS = frozenset(
    {"messages", "conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message"}
)
"""Arguments that are set for each prompt, so they cannot be set for all of them."""


@dataclass(frozen=True)
class TemplateArguments:
    """Arguments of a chat template besides the messages."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool definitions in OpenAI's format."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments: vLLM's `chat_template_kwargs`."""

    def with_defaults(self, defaults: TemplateArguments) -> TemplateArguments:
        """Return these arguments, and those of `defaults` that are missing here."""
        return TemplateArguments(self.tools or defaults.tools, {**defaults.kwargs, **self.kwargs})

    def render(self, tokenizer: Any, messages: Sequence[ChatMessage], location: str, *, generation_prompt: bool) -> str:
        """Render a conversation. Raises DataError with `location`."""
        try:
            text = tokenizer.apply_chat_template(
                [_prepare_message(message) for message in messages],
                tools=[dict(tool) for tool in self.tools] or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.kwargs,
            )
        except Exception as error:  # a template can raise anything
            raise DataError(f"{location}: the chat template rejects the conversation: {error}") from error
        check_unicode(str(text), location)  # arguments of tool calls are JSON in a string, where an escape hides it
        return str(text)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a JSON object that are not empty."""
        tools, kwargs = [dict(tool) for tool in self.tools], dict(self.kwargs)
        return ({"tools": tools} if tools else {}) | ({"chat_template_kwargs": kwargs} if kwargs else {})


NO_TEMPLATE_ARGUMENTS = TemplateArguments()


def parse_template_arguments(record: Mapping[str, Any], location: str) -> TemplateArguments:
    """Parse `tools` and `chat_template_kwargs` of a JSON object. Raises DataError."""
    tools, kwargs = record.get("tools") or [], record.get("chat_template_kwargs") or {}
    if isinstance(tools, str):  # data sets keep them as text, because a column of a table has a single type
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{location}: tools is no JSON ({error}).") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{location}: tools is not a list of objects in OpenAI's format.")
    if not isinstance(kwargs, dict):
        raise DataError(f"{location}: chat_template_kwargs is not an object.")
    if reserved := sorted(RESERVED_ARGUMENTS & kwargs.keys()):
        raise DataError(f"{location}: chat_template_kwargs has {reserved[0]}, which is set for each prompt; remove it.")
    return TemplateArguments(tuple(tools), kwargs)


def read_template_arguments(tools: Path | None, kwargs: Mapping[str, Any]) -> TemplateArguments:
    """Read the tools of a JSON file, and add arguments. Raises ConfigError."""
    record: dict[str, Any] = {"chat_template_kwargs": dict(kwargs)}
    if tools is not None:
        try:
            record["tools"] = json.loads(tools.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"template.tools {tools}: cannot be read as JSON ({error}).") from error
    try:
        return parse_template_arguments(record, f"template.tools {tools}" if tools is not None else "template.kwargs")
    except DataError as error:
        raise ConfigError(str(error)) from None


def check_unicode(text: str, location: str) -> None:
    """Check that a text can be encoded. Raises DataError for half of a pair of surrogates, such as an emoji cut in two."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{location}: not valid Unicode: a lone surrogate \\u{ord(text[error.start]):04x}; remove it, or the line."
        ) from None


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Parse `--template-kwargs`. Raises ConfigError."""
    try:
        kwargs = json.loads(text)
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict):
        raise ConfigError(f"--template-kwargs is {text!r}; expected: a JSON object, such as '{{\"enable_thinking\": false}}'.")
    return kwargs


def _prepare_message(message: ChatMessage) -> dict[str, Any]:
    """Return the message as vLLM passes it: arguments of tool calls as objects, and reasoning under both of its names."""
    prepared = {**message, "content": "" if message.get("content") is None else message["content"]}
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        prepared |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if not message.get("tool_calls"):
        prepared.pop("tool_calls", None)
    else:
        prepared["tool_calls"] = [_prepare_tool_call(call) for call in message["tool_calls"]]
    return prepared


def _prepare_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}
