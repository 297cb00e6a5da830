"""Conversations become tokens, tokens become batches.

A file has one JSON object per line: {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "response": ...}.
The target's chat template turns it into a text; what the drafter is to learn are the assistant's parts of it, each with the
token that ends the turn, because those are what the target will be asked to write.

Guarantees: the same files, tokenizer and settings give the same tokens; the order is a function of seed and epoch alone, so
that a training can go on anywhere; a line that cannot be used is an error that names it. Not guaranteed: that a text was
written by the target; `aerie-drafter generate` makes such texts.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from aerie_drafter import files
from aerie_drafter.errors import DataError
from aerie_drafter.weights import write_tensors

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
_CACHE_FORMAT_VERSION = "3"
"""Part of the cache's key; increased when the file's tensors change or the same input gives other tokens."""

ChatMessage = Mapping[str, Any]


@dataclass(frozen=True)
class Corpus:
    """Tokenised conversations, end to end."""

    tokens: Tensor
    """[all tokens] int32."""
    loss_mask: Tensor
    """[all tokens] bool: the assistant's."""
    end_offsets: Tensor
    """[conversations] int64: where each ends in the two above."""
    dropped_conversations: int = 0
    """Conversations left out because nothing of the assistant's is in their first `max_length` tokens."""

    def __len__(self) -> int:
        return len(self.end_offsets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(tokens, counted) of one conversation, [length] each."""
        begin = int(self.end_offsets[index - 1]) if index else 0
        end = int(self.end_offsets[index])
        return self.tokens[begin:end], self.loss_mask[begin:end]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each conversation."""
        return torch.diff(self.end_offsets, prepend=self.end_offsets.new_zeros(1)).tolist()

    def select(self, indices: Sequence[int]) -> Corpus:
        """Some of the conversations, in this order."""
        parts = [self[index] for index in indices]
        return Corpus.from_conversations([(tokens, counted) for tokens, counted in parts])

    @classmethod
    def from_conversations(cls, conversations: Sequence[tuple[Tensor, Tensor]], dropped_conversations: int = 0) -> Corpus:
        """From (tokens, counted) of each."""
        if not conversations:
            return cls(
                torch.zeros(0, dtype=torch.int32),
                torch.zeros(0, dtype=torch.bool),
                torch.zeros(0, dtype=torch.long),
                dropped_conversations,
            )
        ends = torch.tensor([len(tokens) for tokens, _ in conversations]).cumsum(0)
        tokens = torch.cat([tokens.to(torch.int32) for tokens, _ in conversations])
        return cls(tokens, torch.cat([counted.bool() for _, counted in conversations]), ends, dropped_conversations)


def read_conversations(path: Path) -> Iterator[tuple[int, list[ChatMessage]]]:
    """(line number, messages) of a file. Raises DataError."""
    try:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, parse_conversation(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is no UTF-8.") from None


def parse_conversation(line: str, location: str) -> list[ChatMessage]:
    """The messages of one line, which errors call `where`. Raises DataError."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: no JSON ({error}); one object per line is expected.") from None
    if not isinstance(record, dict):
        raise DataError(f"{location}: an object is expected, and this is {_describe_json_type(record)}.")
    if "messages" not in record and "prompt" in record:
        turns = [("user", "prompt"), ("assistant", "response")][: 2 if "response" in record else 1]
        for _, name in turns:
            if not isinstance(record[name], str):
                raise DataError(f"{location}: {name} is {_describe_json_type(record[name])}; a text is expected.")
        return [{"role": role, "content": record[name]} for role, name in turns]
    messages = record.get("messages")
    if "messages" not in record:
        keys = ", ".join(record) or "nothing"
        raise DataError(f"{location}: `messages`, or `prompt` with or without `response`, are expected; found is {keys}.")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{location}: messages is {_describe_json_type(messages)}; a list of at least one message is expected.")
    for index, message in enumerate(messages):
        _check_message(message, f"{location}: messages[{index}]")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{location}: no message is the assistant's, so there is nothing to learn; leave the line out.")
    return messages


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise DataError(f"{where} is {_describe_json_type(message)}; an object with role and content is expected.")
    if message.get("role") not in CHAT_ROLES:
        raise DataError(f"{where}.role is {message.get('role')!r}; expected is one of {', '.join(CHAT_ROLES)}.")
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise DataError(f"{where}.content is {_describe_json_type(content)}; a text is expected.")


def _describe_json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "missing or null"}
    if value == []:
        return "an empty list"
    return names.get(type(value), "a number")


def encode_conversation(tokenizer: Any, messages: Sequence[ChatMessage], location: str) -> tuple[list[int], list[bool]]:
    """(tokens, which of them are the assistant's) of a conversation, by the tokenizer's chat template. Raises DataError."""
    text, spans = render_conversation(tokenizer, messages, location)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    counted = []
    begin = 0  # of the spans that may still come
    for first, last in encoded["offset_mapping"]:
        while begin < len(spans) and spans[begin][1] <= first:
            begin += 1
        counted.append(begin < len(spans) and first >= spans[begin][0] and last > first)
    return list(encoded["input_ids"]), counted


def render_conversation(tokenizer: Any, messages: Sequence[ChatMessage], location: str) -> tuple[str, list[tuple[int, int]]]:
    """(text of a conversation, where in it the assistant writes). Raises DataError.

    A turn begins where the template, asked for the conversation before it with a generation prompt, ends: that is the text
    which the target gets in serving. It ends behind its content and the special token that follows it; where a template
    changes the content, at the end of the conversation rendered up to it, or, where that differs too (templates that take the
    thinking out of earlier turns), behind the next special token.
    """

    def rendered(count: int, *, prompt: bool) -> str:
        try:
            text = tokenizer.apply_chat_template(list(messages[:count]), tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template raises what it likes
            raise DataError(f"{location}: the chat template refuses the conversation: {error}") from error
        return str(text)

    full_text = rendered(len(messages), prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prefix = rendered(index, prompt=True)
        if not full_text.startswith(prefix):
            raise DataError(
                f"{location}: messages[{index}]: the chat template, asked for what comes before it with a generation prompt, does "
                "not give the beginning of the whole conversation, so where the assistant begins is not known; give the "
                "conversation's turns as lines of their own."
            )
        end = _find_turn_end(tokenizer, full_text, len(prefix), str(message.get("content") or "").strip())
        if end is None:
            turn_text = rendered(index + 1, prompt=False)
            end = (
                len(turn_text)
                if full_text.startswith(turn_text)
                else _find_next_special_token_end(tokenizer, full_text, len(prefix))
            )
        if end is None:
            raise DataError(f"{location}: messages[{index}]: the chat template changes its content; where it ends is not known.")
        spans.append((len(prefix), end))
    return full_text, spans


def _find_turn_end(tokenizer: Any, text: str, begin: int, content: str) -> int | None:
    """Behind `content`, found from `begin` on, and the special token that follows; None where it is not there as it is."""
    content_begin = text.find(content, begin) if content else -1
    if content_begin < 0:
        return None
    end = content_begin + len(content)
    rest = text[end:]
    after = rest.lstrip()
    for token in sorted(_special_tokens(tokenizer), key=len, reverse=True):
        if after.startswith(token):
            return end + len(rest) - len(after) + len(token)
    return end


def _find_next_special_token_end(tokenizer: Any, text: str, begin: int) -> int | None:
    """Behind the first special token from `begin` on."""
    candidates = [(text.find(token, begin), len(token)) for token in map(str, tokenizer.all_special_tokens)]
    matches = [(index, length) for index, length in candidates if index >= 0]
    return sum(min(matches)) if matches else None


def _special_tokens(tokenizer: Any) -> set[str]:
    added = {str(token) for token in tokenizer.get_added_vocab()}
    return added | {str(token) for token in tokenizer.all_special_tokens}


def load_corpus(
    paths: Sequence[Path],
    tokenizer: Any,
    *,
    max_length: int,
    cache_folder: Path | None = None,
    log_progress: Callable[[str], None] | None = None,
) -> Corpus:
    """All conversations of some files, each cut to its first `max_length` tokens. Raises DataError.

    With a `cache` folder the result is kept there under a digest of all that it depends on, and taken from there.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the target's tokenizer has no chat template: name a file of one as data.chat_template.")
    cache_entry = None if cache_folder is None else cache_folder / f"tokens-{_compute_cache_digest(paths, tokenizer, max_length)}"
    if cache_entry is not None and (cached := _read_cached_corpus(cache_entry)) is not None:
        return cached
    parts: list[tuple[Tensor, Tensor]] = []
    dropped_conversations = 0
    for path in paths:
        for number, messages in read_conversations(path):
            tokens, mask = encode_conversation(tokenizer, messages, f"{path}:{number}")
            if any(mask[2:max_length]):  # the first two tokens are predicted by no column
                parts.append((torch.tensor(tokens[:max_length]), torch.tensor(mask[:max_length])))
            else:
                dropped_conversations += 1
            if log_progress is not None and len(parts) % 1000 == 0 and parts:
                log_progress(f"{len(parts)} conversations tokenised")
    if not parts:
        files_named = ", ".join(map(str, paths))
        raise DataError(f"{files_named}: no conversation with an assistant's token in its first {max_length} tokens.")
    corpus = Corpus.from_conversations(parts, dropped_conversations)
    if cache_entry is not None:
        tensors = {
            "tokens": corpus.tokens,
            "loss_mask": corpus.loss_mask,
            "end_offsets": corpus.end_offsets,
            "dropped_conversations": torch.tensor([dropped_conversations]),
        }
        with files.replace_folder(cache_entry, lambda _: True) as folder:
            write_tensors(folder / "corpus.safetensors", tensors, {})
    return corpus


def _read_cached_corpus(folder: Path) -> Corpus | None:
    try:
        cached = load_file(folder / "corpus.safetensors")
        return Corpus(cached["tokens"], cached["loss_mask"], cached["end_offsets"], int(cached["dropped_conversations"][0]))
    except (OSError, SafetensorError, KeyError):
        return None  # missing or damaged: recreate it


def _compute_cache_digest(paths: Sequence[Path], tokenizer: Any, max_length: int) -> str:
    total = hashlib.sha256(f"{_CACHE_FORMAT_VERSION} {max_length} {tokenizer.chat_template}".encode())
    total.update(tokenizer.backend_tokenizer.to_str().encode())
    for path in paths:
        try:
            with path.open("rb") as stream:
                total.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    return total.hexdigest()[:32]


BatchRow = tuple[int, ...]
"""Conversations of one row of a batch, end to end."""


def plan_batches(
    lengths: Sequence[int], *, rows_per_batch: int, seed: int, epoch: int, packed_row_tokens: int | None = None
) -> list[tuple[BatchRow, ...]]:
    """The batches of an epoch, each `rows` rows, in order; a function of its arguments alone.

    Without `pack` a row is one conversation and a batch holds ones of like length, so that little is padded. With it a row is
    filled with whole conversations up to that many tokens; the target reads it as one text. What is left after the last whole
    batch waits for another epoch's order.
    """
    order = list(range(len(lengths)))
    generator = random.Random(f"{seed} {epoch}")  # noqa: S311 (an order, no secret)
    generator.shuffle(order)
    if packed_row_tokens is not None:
        packed_rows = _pack_rows(lengths, order, packed_row_tokens)
        return [
            tuple(packed_rows[begin : begin + rows_per_batch])
            for begin in range(0, len(packed_rows) - rows_per_batch + 1, rows_per_batch)
        ]
    window = 64 * rows_per_batch  # sorted only among near neighbours, so that what comes together differs between epochs
    order = [
        index
        for begin in range(0, len(order), window)
        for index in sorted(order[begin : begin + window], key=lambda i: lengths[i])
    ]
    batches: list[tuple[BatchRow, ...]] = [
        tuple((index,) for index in order[begin : begin + rows_per_batch])
        for begin in range(0, len(order) - rows_per_batch + 1, rows_per_batch)
    ]
    generator.shuffle(batches)
    return batches


def _pack_rows(lengths: Sequence[int], order: Sequence[int], size: int) -> list[BatchRow]:
    """Rows of at most `size` tokens, each conversation into the first of the open rows that has room."""
    done: list[BatchRow] = []
    opened: list[tuple[list[int], int]] = []
    for index in order:
        length = min(lengths[index], size)
        for at, (row, used) in enumerate(opened):
            if used + length <= size:
                row.append(index)
                opened[at] = (row, used + length)
                break
        else:
            opened.append(([index], length))
            if len(opened) > 32:
                done.append(tuple(opened.pop(0)[0]))
    return done + [tuple(row) for row, _ in opened]


def assemble_batch(corpus: Corpus, rows: Sequence[BatchRow]) -> tuple[Tensor, Tensor]:
    """(tokens, counted) of a batch, [rows, longest]; padded at the end with token 0, not counted."""
    parts = [[corpus[index] for index in row] for row in rows]
    longest = max(sum(len(tokens) for tokens, _ in row) for row in parts)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    loss_mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row_index, row in enumerate(parts):
        begin = 0
        for conversation, mask in row:
            tokens[row_index, begin : begin + len(conversation)] = conversation
            loss_mask[row_index, begin : begin + len(conversation)] = mask
            begin += len(conversation)
    return tokens, loss_mask


def most_frequent_tokens(corpus: Corpus, draft_vocab_size: int, vocab_size: int) -> Tensor:
    """The draft vocabulary: the `size` tokens that the assistant writes most often, ascending, [size].

    Ties and what is never written go to lower ids.
    """
    counts = torch.bincount(corpus.tokens[corpus.loss_mask].long(), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values
