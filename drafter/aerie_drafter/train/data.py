"""Training data: tokens of conversations, and batches of them.

Conversations come from `aerie_drafter.train.conversations`, their tokens from `aerie_drafter.train.encode`.

Guarantees: the same sources, tokenizer and settings give the same tokens. The order depends only on seed and epoch, so that a
training can resume anywhere. Not guaranteed: that the target wrote a text; `aerie-drafter generate` creates such texts.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from aerie_drafter import files
from aerie_drafter.chat_template import NO_TEMPLATE_ARGUMENTS, TemplateArguments
from aerie_drafter.errors import DataError
from aerie_drafter.train.conversations import compute_source_digest, iterate_conversations, read_conversations
from aerie_drafter.train.encode import encode_conversations
from aerie_drafter.weights import write_tensors

_CACHE_FORMAT_VERSION = "5"
"""Part of the cache's key; increased when the file's tensors change or the same input gives other tokens."""


REPORTED_ERRORS = 10


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


def load_corpus(
    sources: Sequence[Path],
    tokenizer: Any,
    *,
    max_length: int,
    template: TemplateArguments = NO_TEMPLATE_ARGUMENTS,
    cache_folder: Path | None = None,
    process_count: int | None = None,
    skip_invalid: bool = False,
    log_progress: Callable[[str], None] | None = None,
) -> Corpus:
    """Load all conversations of some sources, each truncated to its first `max_length` tokens. Raises DataError.

    With `skip_invalid` invalid conversations are omitted and reported; otherwise the first ends the run.

    The result is cached in `cache_folder` by a digest of all inputs. If several processes of a machine call this with the same
    folder, the first of them tokenizes, and the others wait as long as that takes.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the target's tokenizer has no chat template: set data.chat_template to a file with one.")
    tokenize = partial(_tokenize, sources, tokenizer, max_length, template, process_count, skip_invalid, log_progress)
    if cache_folder is None:
        corpus = tokenize()
    else:
        name = f"tokens-{_compute_cache_digest(sources, tokenizer, max_length, template, skip_invalid)}"
        corpus = _load_cached(cache_folder, name, tokenize)
    if corpus.dropped_conversations and log_progress is not None:
        log_progress(
            f"{corpus.dropped_conversations} of {corpus.dropped_conversations + len(corpus)} conversations have no answer "
            f"token in their first {max_length} tokens, and are omitted"
        )
    return corpus


def _load_cached(cache_folder: Path, name: str, tokenize: Callable[[], Corpus]) -> Corpus:
    with files.lock_file(cache_folder / "lock"):
        if (cached := _read_cached_corpus(cache_folder / name)) is not None:
            return cached
        corpus = tokenize()
        tensors = {
            "tokens": corpus.tokens,
            "loss_mask": corpus.loss_mask,
            "end_offsets": corpus.end_offsets,
            "dropped_conversations": torch.tensor([corpus.dropped_conversations]),
        }
        with files.replace_folder(cache_folder / name, lambda _: True) as folder:
            write_tensors(folder / "corpus.safetensors", tensors, {})
    return corpus


def count_conversations(
    source: Path, tokenizer: Any, *, max_length: int, template: TemplateArguments = NO_TEMPLATE_ARGUMENTS
) -> tuple[int, int]:
    """Return (conversations with an answer token in their first `max_length` tokens, all) of a source. Raises DataError."""
    used = count = 0
    for conversation in read_conversations(source):
        masks = []
        for encoded in encode_conversations(tokenizer, [conversation], max_length, template, process_count=1):
            if isinstance(encoded, DataError):
                raise encoded
            masks.append(encoded[1])
        used += any(map(_has_answer_token, masks))
        count += 1
    return used, count


def _has_answer_token(mask: Sequence[bool]) -> bool:
    return any(mask[2:])  # no column predicts the first two tokens


def _tokenize(
    sources: Sequence[Path],
    tokenizer: Any,
    max_length: int,
    template: TemplateArguments,
    process_count: int | None,
    skip_invalid: bool,
    log_progress: Callable[[str], None] | None,
) -> Corpus:
    conversations = (conversation for source in sources for conversation in iterate_conversations(source))
    parts: list[tuple[Tensor, Tensor]] = []
    errors: list[DataError] = []
    dropped_conversations = 0
    for encoded in encode_conversations(tokenizer, conversations, max_length, template, process_count):
        if isinstance(encoded, DataError):
            errors.append(encoded)
            if not skip_invalid:
                raise encoded
            continue
        token_ids, mask = encoded
        if _has_answer_token(mask):
            parts.append((torch.tensor(token_ids), torch.tensor(mask)))
        else:
            dropped_conversations += 1
        if log_progress is not None and len(parts) % 1000 == 0 and parts:
            log_progress(f"{len(parts)} conversations tokenized")
    if errors and log_progress is not None:
        log_progress(f"{len(errors)} invalid conversations are omitted; the first are:")
        for error in errors[:REPORTED_ERRORS]:
            log_progress(f"  {error}")
    if not parts:
        names = ", ".join(map(str, sources))
        raise DataError(f"{names}: no conversation with an assistant's token in its first {max_length} tokens.")
    return Corpus.from_conversations(parts, dropped_conversations)


def compute_corpus_digest(corpus: Corpus) -> str:
    """Return a digest of the tokens, the loss mask and the ends of all conversations."""
    total = hashlib.sha256()
    for tensor in (corpus.tokens, corpus.loss_mask, corpus.end_offsets):
        total.update(tensor.numpy().tobytes())
    return f"sha256:{total.hexdigest()}"


def _read_cached_corpus(folder: Path) -> Corpus | None:
    try:
        cached = load_file(folder / "corpus.safetensors")
        return Corpus(cached["tokens"], cached["loss_mask"], cached["end_offsets"], int(cached["dropped_conversations"][0]))
    except (OSError, SafetensorError, KeyError):
        return None  # missing or damaged: recreate it


def _compute_cache_digest(
    sources: Sequence[Path], tokenizer: Any, max_length: int, template: TemplateArguments, skip_invalid: bool
) -> str:
    arguments = json.dumps([template.to_json(), skip_invalid], sort_keys=True)
    total = hashlib.sha256(f"{_CACHE_FORMAT_VERSION} {max_length} {tokenizer.chat_template} {arguments}".encode())
    total.update(tokenizer.backend_tokenizer.to_str().encode())
    for source in sources:
        total.update(compute_source_digest(source).encode())
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
