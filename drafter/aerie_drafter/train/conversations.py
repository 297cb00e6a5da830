"""Conversations in the forms that data sets use, read as one type.

    {"messages": [{"role": ..., "content": ...}, ...]}               OpenAI; content may be a list of text parts
    {"conversations": [{"from": "human", "value": ...}, ...]}        ShareGPT
    {"prompt": ..., "response": ...}                                 one turn

Any of them may have `tools` and `chat_template_kwargs`, and `sequences`: the exact tokens of the answers, which
`aerie-drafter generate` writes:

    "sequences": [{"token_ids": [...], "answer_spans": [[begin, end], ...]}]

A text does not determine its tokens. A sampled answer often has other tokens when it is encoded again, and special tokens
inside an answer are lost. So a conversation with sequences is trained on them, and its text is for people.

A source is a file of JSON Lines, a JSON file with a list, a Parquet file, or a data set of the Hub (`hub:NAME:SPLIT@COMMIT`).
The last two need the optional package `datasets`.

Guarantees: records keep the order of their source, and an invalid one is an error with its number. Not guaranteed: that the
target wrote a text; that a data set without a commit stays the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aerie_drafter.chat_template import (
    NO_TEMPLATE_ARGUMENTS,
    ChatMessage,
    TemplateArguments,
    check_unicode,
    parse_template_arguments,
)
from aerie_drafter.errors import DataError

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")

HUB_PREFIX = "hub:"

_ROLE_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
}
"""Names of roles in ShareGPT's form, and OpenAI's earlier name of `tool`."""


@dataclass(frozen=True)
class TokenSequence:
    """A prompt with the target's answers as the engine processed them."""

    token_ids: tuple[int, ...]
    answer_spans: tuple[tuple[int, int], ...]
    """(begin, end) of the tokens that the target generated, ascending."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of a record."""
        return {"token_ids": list(self.token_ids), "answer_spans": [list(span) for span in self.answer_spans]}

    @property
    def answer_mask(self) -> list[bool]:
        """Return whether the target generated the token, for each."""
        mask = [False] * len(self.token_ids)
        for begin, end in self.answer_spans:
            mask[begin:end] = [True] * (end - begin)
        return mask


@dataclass(frozen=True)
class Conversation:
    """One conversation of a source."""

    location: str
    """Source and number, for messages."""
    messages: tuple[ChatMessage, ...]
    template: TemplateArguments = NO_TEMPLATE_ARGUMENTS
    """Its own arguments of the chat template."""
    sequences: tuple[TokenSequence, ...] = ()
    """The exact tokens of its answers; empty if there is only text."""


def read_conversations(source: Path) -> Iterator[Conversation]:
    """Yield the conversations of a source. Raises DataError."""
    for conversation in iterate_conversations(source):
        if isinstance(conversation, DataError):
            raise conversation
        yield conversation


def read_texts(source: Path) -> Iterator[Conversation]:
    """Yield the conversations of a source without their exact tokens, which need most of the memory. Raises DataError."""
    return (replace(conversation, sequences=()) for conversation in read_conversations(source))


def iterate_conversations(source: Path) -> Iterator[Conversation | DataError]:
    """Yield the conversations of a source, and an error in place of each invalid one. Raises DataError for the whole source."""
    for location, record in _read_records(source):
        try:
            yield parse_conversation(parse_json_line(record, location) if isinstance(record, _Line) else record, location)
        except DataError as error:
            yield error


class _Line(str):
    """A line that is not parsed yet."""


def compute_source_digest(source: Path) -> str:
    """Return a digest of a source's content; of a data set of the Hub, its name and commit. Raises DataError."""
    if str(source).startswith(HUB_PREFIX):
        dataset = _HubDataset.parse(source)
        return hashlib.sha256(f"{dataset.name}\n{dataset.split}\n{dataset.revision}".encode()).hexdigest()
    try:
        with source.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{source}: cannot be read ({error.strerror}).") from error


def compute_sources_digest(sources: Sequence[Path]) -> str:
    """Return a digest of several sources in their order, as the provenance of a checkpoint has it. Raises DataError."""
    total = hashlib.sha256()
    for source in sources:
        total.update(compute_source_digest(source).encode())
    return total.hexdigest()


def parse_conversation(record: Any, location: str) -> Conversation:
    """Parse a record; errors contain `location`. Raises DataError."""
    if not isinstance(record, dict):
        raise DataError(f"{location}: expected: an object, not {_describe_json_type(record)}.")
    record = {name: value for name, value in record.items() if value is not None or name == "response"}
    messages = _parse_messages(record, location)
    sequences = record.get("sequences") or []
    if not isinstance(sequences, list):
        raise DataError(f"{location}: sequences is {_describe_json_type(sequences)}; expected: a list of objects.")
    parsed = [_parse_sequence(value, f"{location}: sequences[{index}]") for index, value in enumerate(sequences)]
    conversation = Conversation(location, tuple(messages), parse_template_arguments(record, location), tuple(parsed))
    check_unicode(json.dumps([messages, conversation.template.to_json()], ensure_ascii=False, default=str), location)
    return conversation


def _parse_messages(record: Mapping[str, Any], location: str) -> list[ChatMessage]:
    if "messages" in record:
        return _check_messages(record["messages"], location, "messages")
    if "conversations" in record:
        return _check_messages(record["conversations"], location, "conversations")
    if "prompt" in record:
        turns = [("user", "prompt"), ("assistant", "response")][: 2 if "response" in record else 1]
        for _, name in turns:
            if not isinstance(record[name], str):
                raise DataError(f"{location}: {name} is {_describe_json_type(record[name])}; expected: a string.")
        return [{"role": role, "content": record[name]} for role, name in turns]
    keys = ", ".join(map(str, record)) or "nothing"
    raise DataError(
        f"{location}: expected: `messages`, ShareGPT's `conversations`, or `prompt` with an optional `response`; found: {keys}."
    )


def _check_messages(messages: Any, location: str, name: str) -> list[ChatMessage]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{location}: {name} is {_describe_json_type(messages)}; expected: a list of at least one message.")
    return [_parse_message(message, f"{location}: {name}[{index}]") for index, message in enumerate(messages)]


def _parse_message(message: Any, where: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise DataError(f"{where} is {_describe_json_type(message)}; expected: an object with role and content.")
    message = {name: value for name, value in message.items() if value is not None}  # tables have every column in every row
    if "from" in message and "role" not in message:
        message = {**message, "role": message.pop("from"), "content": message.pop("value", None)}
    role = _ROLE_ALIASES.get(str(message.get("role")), message.get("role"))
    if role not in CHAT_ROLES:
        raise DataError(f"{where}.role is {message.get('role')!r}; expected: one of {', '.join(CHAT_ROLES)}.")
    content = message.get("content")
    if isinstance(content, list):
        content = _join_text_parts(content, where)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise DataError(f"{where}.content is {_describe_json_type(content)}; expected: a string.")
    return {**message, "role": role, "content": content}


def _join_text_parts(parts: Sequence[Any], where: str) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _describe_json_type(part)
            raise DataError(f"{where}.content has a part of type {kind!r}; only text can be trained on: remove the line.")
        texts.append(part["text"])
    return "\n".join(texts)  # as vLLM joins them


def _parse_sequence(value: Any, where: str) -> TokenSequence:
    ids, spans = (value.get("token_ids"), value.get("answer_spans")) if isinstance(value, dict) else (None, None)
    if not isinstance(ids, list) or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise DataError(f"{where}.token_ids is not a list of token ids; write it with `aerie-drafter generate`.")
    end = 0
    spans = spans if isinstance(spans, list) else [None]
    for span in spans:
        if not (
            isinstance(span, list) and len(span) == 2 and all(isinstance(at, int) for at in span) and end <= span[0] <= span[1]
        ):
            raise DataError(f"{where}.answer_spans is not a list of ascending [begin, end].")
        end = span[1]
    if end > len(ids):
        raise DataError(f"{where}.answer_spans ends at {end}, and there are {len(ids)} tokens: the line is damaged.")
    return TokenSequence(tuple(ids), tuple((begin, end) for begin, end in spans))


def _describe_json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "missing or null"}
    if value == []:
        return "an empty list"
    return names.get(type(value), "a number")


def _read_records(source: Path) -> Iterator[tuple[str, Any]]:
    """Yield (location, record) of a source."""
    if str(source).startswith(HUB_PREFIX):
        yield from _HubDataset.parse(source).read_records()
    elif source.suffix == ".parquet":
        yield from _read_with_datasets(str(source), "parquet", data_files=str(source), split="train")
    elif source.suffix == ".json" and (records := _read_json_list(source)) is not None:
        yield from ((f"{source}[{index}]", record) for index, record in enumerate(records))
    else:
        yield from _read_json_lines(source)


def _read_json_lines(source: Path) -> Iterator[tuple[str, Any]]:
    try:
        with source.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{source}:{number}", _Line(line)
    except OSError as error:
        raise DataError(f"{source}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: byte {error.start} is not UTF-8.") from None


def parse_json_line(line: str | bytes, location: str) -> Any:
    """Parse one line. Raises DataError."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: invalid JSON ({error}); expected: one object per line.") from None


def _read_json_list(source: Path) -> list[Any] | None:
    """Return the records of a file with one JSON list; None for JSON Lines, which some data sets name .json too."""
    try:
        with source.open(encoding="utf-8") as stream:
            if not stream.readline(2**16).lstrip().startswith("["):
                return None
            stream.seek(0)
            records = json.load(stream)
    except OSError as error:
        raise DataError(f"{source}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source}: invalid JSON ({error}); expected: a list of objects, or one object per line.") from None
    return records if isinstance(records, list) else None


@dataclass(frozen=True)
class _HubDataset:
    """A data set of the Hub: `hub:NAME`, `hub:NAME:SPLIT`, `hub:NAME:SPLIT@COMMIT`."""

    name: str
    split: str
    revision: str | None

    @classmethod
    def parse(cls, source: Path) -> _HubDataset:
        name, _, split = str(source).removeprefix(HUB_PREFIX).partition(":")
        split, _, revision = split.partition("@")
        if not name:
            raise DataError(
                f"{source}: expected: hub:NAME:SPLIT@COMMIT, such as hub:HuggingFaceH4/ultrachat_200k:train_sft@COMMIT."
            )
        return cls(name, split or "train", revision or None)

    def read_records(self) -> Iterator[tuple[str, Any]]:
        """Yield (location, record)."""
        return _read_with_datasets(f"{HUB_PREFIX}{self.name}", self.name, split=self.split, revision=self.revision)


def _read_with_datasets(label: str, path: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(f"{label}: needs the package datasets: install aerie-drafter[datasets].") from None
    try:
        for index, record in enumerate(load_dataset(path, streaming=True, **arguments)):
            yield f"{label}[{index}]", record
    except DataError:
        raise
    except Exception as error:  # readers of several formats and the network
        raise DataError(f"{label}: cannot be read: {str(error).strip().splitlines()[0]}") from error
