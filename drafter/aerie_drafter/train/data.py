"""Training data: conversations, their tokens, and batches.

A file has one JSON object per line: {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "response": ...}.
The target's chat template converts it to a text. The drafter learns the assistant's parts of it, each with the token that ends
the turn, because the target will generate those.

Guarantees: the same files, tokenizer and settings give the same tokens. The order depends only on seed and epoch, so that a
training can resume anywhere. An invalid line is an error with its number. Not guaranteed: that the target wrote a text;
`aerie-drafter generate` creates such texts.
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
    """Tokenized conversations, concatenated."""

    tokens: Tensor
    """[all tokens], int32."""
    loss_mask: Tensor
    """[all tokens], bool: tokens of the assistant."""
    end_offsets: Tensor
    """[conversations], int64: end of each conversation in `tokens` and `loss_mask`."""
    dropped_conversations: int = 0
    """Number of conversations without an assistant's token in their first `max_length` tokens, which are omitted."""

    def __len__(self) -> int:
        return len(self.end_offsets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, loss mask) of one conversation, [length] each."""
        begin = int(self.end_offsets[index - 1]) if index else 0
        end = int(self.end_offsets[index])
        return self.tokens[begin:end], self.loss_mask[begin:end]

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each conversation."""
        return torch.diff(self.end_offsets, prepend=self.end_offsets.new_zeros(1)).tolist()

    def select(self, indices: Sequence[int]) -> Corpus:
        """Return a corpus of some conversations, in this order."""
        parts = [self[index] for index in indices]
        return Corpus.from_conversations([(tokens, counted) for tokens, counted in parts])

    @classmethod
    def from_conversations(cls, conversations: Sequence[tuple[Tensor, Tensor]], dropped_conversations: int = 0) -> Corpus:
        """Build a corpus from (tokens, loss mask) of each conversation."""
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
    """Yield (line number, messages) of a file. Raises DataError."""
    try:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, parse_conversation(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8.") from None


def parse_conversation(line: str, location: str) -> list[ChatMessage]:
    """Parse the messages of one line; errors contain `location`. Raises DataError."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: invalid JSON ({error}); expected: one object per line.") from None
    if not isinstance(record, dict):
        raise DataError(f"{location}: expected: an object, not {_describe_json_type(record)}.")
    if "messages" not in record and "prompt" in record:
        turns = [("user", "prompt"), ("assistant", "response")][: 2 if "response" in record else 1]
        for _, name in turns:
            if not isinstance(record[name], str):
                raise DataError(f"{location}: {name} is {_describe_json_type(record[name])}; expected: a string.")
        return [{"role": role, "content": record[name]} for role, name in turns]
    messages = record.get("messages")
    if "messages" not in record:
        keys = ", ".join(record) or "nothing"
        raise DataError(f"{location}: expected: `messages`, or `prompt` with an optional `response`; found: {keys}.")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{location}: messages is {_describe_json_type(messages)}; expected: a list of at least one message.")
    for index, message in enumerate(messages):
        _check_message(message, f"{location}: messages[{index}]")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{location}: no assistant's message, so there is nothing to learn; remove the line.")
    return messages


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise DataError(f"{where} is {_describe_json_type(message)}; expected: an object with role and content.")
    if message.get("role") not in CHAT_ROLES:
        raise DataError(f"{where}.role is {message.get('role')!r}; expected: one of {', '.join(CHAT_ROLES)}.")
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise DataError(f"{where}.content is {_describe_json_type(content)}; expected: a string.")


def _describe_json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "missing or null"}
    if value == []:
        return "an empty list"
    return names.get(type(value), "a number")


def encode_conversation(tokenizer: Any, messages: Sequence[ChatMessage], location: str) -> tuple[list[int], list[bool]]:
    """Tokenize a conversation with its chat template: (tokens, loss mask of the assistant's). Raises DataError."""
    text, spans = render_conversation(tokenizer, messages, location)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    loss_mask = []
    span_index = 0
    for first, last in encoded["offset_mapping"]:
        while span_index < len(spans) and spans[span_index][1] <= first:
            span_index += 1
        loss_mask.append(span_index < len(spans) and first >= spans[span_index][0] and last > first)
    return list(encoded["input_ids"]), loss_mask


def render_conversation(tokenizer: Any, messages: Sequence[ChatMessage], location: str) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation: (text, spans of the assistant's turns). Raises DataError.

    A turn begins where the rendering of the earlier messages with a generation prompt ends, which is the target's input in
    serving. It ends after its content and the special token that follows. If the template changes the content, it ends with
    the conversation rendered up to it. If that differs too (templates that remove the thinking of earlier turns), it ends
    after the next special token.
    """

    def rendered(count: int, *, prompt: bool) -> str:
        try:
            text = tokenizer.apply_chat_template(list(messages[:count]), tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template can raise anything
            raise DataError(f"{location}: the chat template rejects the conversation: {error}") from error
        return str(text)

    full_text = rendered(len(messages), prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prefix = rendered(index, prompt=True)
        if not full_text.startswith(prefix):
            raise DataError(
                f"{location}: messages[{index}]: the rendering of the earlier messages with a generation prompt is not the "
                "beginning of the whole rendering, so the start of the turn is unknown; split the conversation into one line "
                "per turn."
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
            raise DataError(
                f"{location}: messages[{index}]: the chat template changes its content, so the end of the turn is unknown."
            )
        spans.append((len(prefix), end))
    return full_text, spans


def _find_turn_end(tokenizer: Any, text: str, begin: int, content: str) -> int | None:
    """Return the index after `content` and the special token that follows it; None if the text does not contain it."""
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
    """Return the index after the first special token from `begin`."""
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
    """Load all conversations of some files, each truncated to its first `max_length` tokens. Raises DataError.

    The result is cached in `cache_folder` by a digest of all inputs.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the target's tokenizer has no chat template: set data.chat_template to a file with one.")
    cache_entry = None if cache_folder is None else cache_folder / f"tokens-{_compute_cache_digest(paths, tokenizer, max_length)}"
    if cache_entry is not None and (cached := _read_cached_corpus(cache_entry)) is not None:
        return cached
    parts: list[tuple[Tensor, Tensor]] = []
    dropped_conversations = 0
    for path in paths:
        for number, messages in read_conversations(path):
            tokens, mask = encode_conversation(tokenizer, messages, f"{path}:{number}")
            if any(mask[2:max_length]):  # no column predicts the first two tokens
                parts.append((torch.tensor(tokens[:max_length]), torch.tensor(mask[:max_length])))
            else:
                dropped_conversations += 1
            if log_progress is not None and len(parts) % 1000 == 0 and parts:
                log_progress(f"{len(parts)} conversations tokenized")
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
"""Indices of the conversations of one row of a batch."""


def plan_batches(
    lengths: Sequence[int], *, rows_per_batch: int, seed: int, epoch: int, packed_row_tokens: int | None = None
) -> list[tuple[BatchRow, ...]]:
    """Return the batches of an epoch in order, each with `rows_per_batch` rows. It depends only on its arguments.

    Without `packed_row_tokens` a row is one conversation, and a batch has conversations of similar length, for little padding.
    With it a row contains whole conversations up to that many tokens (`aerie_drafter.train.packing`). An incomplete last
    batch is omitted; the order of another epoch includes its rows.
    """
    order = list(range(len(lengths)))
    generator = random.Random(f"{seed} {epoch}")  # noqa: S311 (not for secrets)
    generator.shuffle(order)
    if packed_row_tokens is not None:
        packed_rows = _pack_rows(lengths, order, packed_row_tokens)
        return [
            tuple(packed_rows[begin : begin + rows_per_batch])
            for begin in range(0, len(packed_rows) - rows_per_batch + 1, rows_per_batch)
        ]
    window = 64 * rows_per_batch  # sorted only within windows, so that batches differ between epochs
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
    """Pack conversations into rows of at most `size` tokens: each into the first open row with space."""
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
    """Return (tokens, loss mask) of a batch, [rows, longest], padded at the end."""
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
    """Return the draft vocabulary: the most frequent tokens of the assistant, ascending, [draft_vocab_size].

    Of equally frequent tokens the lower ids are used.
    """
    counts = torch.bincount(corpus.tokens[corpus.loss_mask].long(), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values
