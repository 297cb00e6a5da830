"""Conversations as tokens, spans and batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aerie_drafter.errors import DataError
from aerie_drafter.train.data import Corpus, assemble_batch, count_conversations, load_corpus, most_frequent_tokens, plan_batches
from aerie_drafter.train.encode import encode_conversation

Tokenizers = Callable[..., Any]

CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": " héllo "},
]


def decode_learned(tokenizer: Any, messages: list[dict[str, str]]) -> list[str]:
    """Return the runs of counted tokens, as text."""
    tokens, counted = encode_conversation(tokenizer, messages, "f:1")
    runs: list[list[int]] = []
    for place, token in enumerate(tokens):
        if counted[place]:
            if place == 0 or not counted[place - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def _call(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def test_only_assistant_turns_and_their_end_tokens_are_learned(tokenizer_of: Tokenizers) -> None:
    assert decode_learned(tokenizer_of(), CHAT) == ["hello<end>", " héllo <end>"]


def test_text_that_a_template_adds_to_an_answer_is_learned(tokenizer_of: Tokenizers) -> None:
    template = (
        "{% for m in messages %}<{{ m['role'] }}>"
        "{% if m['role'] == 'assistant' and loop.last %}(thought){% endif %}{{ m['content'] | trim }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert decode_learned(tokenizer_of(template), CHAT) == ["hello<end>", "(thought)héllo<end>"]


def test_an_answer_that_a_template_changes_is_learned_as_rendered(tokenizer_of: Tokenizers) -> None:
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | upper }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert decode_learned(tokenizer_of(template), CHAT) == ["HELLO<end>\n", " HÉLLO <end>\n"]


def test_an_answer_is_learned_without_thinking_that_a_template_drops(tokenizer_of: Tokenizers) -> None:
    template = (
        "{% for m in messages %}<{{ m['role'] }}>"
        "{{ m['content'] if loop.last else m['content'].split('(end)')[-1] }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "(think)(end)b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "(think)(end)d"},
    ]
    assert decode_learned(tokenizer_of(template), chat) == ["b<end>", "(think)(end)d<end>"]


def test_a_template_without_a_recognisable_beginning_is_rejected(tokenizer_of: Tokenizers) -> None:
    template = "{{ messages | length }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    with pytest.raises(DataError, match=r"^f:1: messages\[2\]: the rendering of the earlier messages"):
        encode_conversation(tokenizer_of(template), CHAT, "f:1")


def test_the_error_of_a_template_is_reported(tokenizer_of: Tokenizers) -> None:
    with pytest.raises(DataError, match=r"^f:1: the chat template rejects the conversation: no system here$"):
        encode_conversation(tokenizer_of("{{ raise_exception('no system here') }}"), CHAT, "f:1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl:2: invalid JSON"),
        ("[1]", "a.jsonl:2: expected: an object, not a list."),
        (
            '{"text": "x"}',
            "a.jsonl:2: expected: `messages`, ShareGPT's `conversations`, or `prompt` with an optional `response`; found: text.",
        ),
        ('{"prompt": "x", "response": null}', "a.jsonl:2: response is missing or null; expected: a string."),
        ('{"prompt": "x", "response": "y\\ud83d"}', "a.jsonl:2: not valid Unicode: a lone surrogate \\ud83d"),
        ('{"prompt": "x", "response": "y", "tools": [{"a\\udc00": 1}]}', "a.jsonl:2: not valid Unicode: a lone surrogate"),
        (
            json.dumps({"messages": [{"role": "user", "content": "x"}, _call(json.dumps({"city": "\ud83d"}))]}),
            "a.jsonl:2: not valid Unicode: a lone surrogate \\ud83d",
        ),
        ('{"messages": []}', "a.jsonl:2: messages is an empty list; expected: a list of at least one message."),
        ('{"messages": ["x"]}', "a.jsonl:2: messages[0] is a string; expected: an object with role and content."),
        ('{"messages": [{"role": "bot", "content": ""}]}', "a.jsonl:2: messages[0].role is 'bot'; expected: one of system,"),
        ('{"messages": [{"role": "user", "content": 3}]}', "a.jsonl:2: messages[0].content is a number; expected: a string."),
        ('{"messages": [{"role": "user", "content": "x"}]}', "a.jsonl:2: no assistant's message"),
    ],
)
def test_invalid_lines_are_reported(tokenizer_of: Tokenizers, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ m.tool_calls | tojson if m.tool_calls }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    path.write_text('{"prompt": "a", "response": "b"}\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        load_corpus([path], tokenizer_of(template), max_length=50)
    assert message in str(caught.value)


def test_invalid_conversations_are_omitted_if_the_settings_say_so(tokenizer_of: Tokenizers, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    messages: list[str] = []
    lines = ['{"prompt": "a", "response": "b"}', "{", '{"text": 1}', '{"prompt": "a"}', '{"prompt": "c", "response": "d"}']
    lines.append('{"prompt": "e", "response": "\\ud83d"}')
    path.write_text("\n".join(lines))
    corpus = load_corpus([path], tokenizer_of(), max_length=50, skip_invalid=True, log_progress=messages.append)
    assert len(corpus) == 2
    assert messages[0] == "4 invalid conversations are omitted; the first are:"
    assert [message.partition(": ")[0].strip() for message in messages[1:]] == [f"{path}:{number}" for number in (2, 3, 4, 6)]
    load_corpus([path], tokenizer_of(), max_length=50, skip_invalid=True, cache_folder=tmp_path / "cache")
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(DataError, match=r"a.jsonl:2: invalid JSON"):
            load_corpus([path], tokenizer_of(), max_length=50, cache_folder=cache)


def test_missing_and_binary_files_are_reported(tokenizer_of: Tokenizers, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.jsonl: cannot be read \(No such file"):
        load_corpus([tmp_path / "none.jsonl"], tokenizer_of(), max_length=50)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"binary: byte 0 is not UTF-8"):
        load_corpus([tmp_path / "binary"], tokenizer_of(), max_length=50)


def test_a_tokenizer_without_template_is_rejected(tokenizer_of: Tokenizers, write_conversations: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="no chat template"):
        load_corpus([write_conversations()], tokenizer_of(None), max_length=50)


def test_long_conversations_are_truncated_and_empty_ones_dropped(tokenizer_of: Tokenizers, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [{"prompt": "p" * 30, "response": "r"}, {"prompt": "p", "response": "r" * 30}]
    path.write_text("\n".join(map(json.dumps, lines)))
    corpus = load_corpus([path], tokenizer_of(), max_length=20)
    assert (len(corpus), corpus.dropped_conversations, corpus.lengths) == (1, 1, [20])
    with pytest.raises(DataError, match="no conversation with an assistant's token in its first 4 tokens"):
        load_corpus([path], tokenizer_of(), max_length=4)


def test_conversations_without_an_answer_token_are_logged_also_from_the_cache(tokenizer_of: Tokenizers, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [{"prompt": "p" * 30, "response": "r"}, {"prompt": "p", "response": "r" * 30}]
    path.write_text("\n".join(map(json.dumps, lines)))
    logged: list[str] = []
    for _ in range(2):
        logged.clear()
        load_corpus([path], tokenizer_of(), max_length=20, cache_folder=tmp_path / "cache", log_progress=logged.append)
        assert logged == ["1 of 2 conversations have no answer token in their first 20 tokens, and are omitted"]
    logged.clear()
    load_corpus([path], tokenizer_of(), max_length=50, log_progress=logged.append)
    assert logged == []


def test_conversations_with_an_answer_token_are_counted(tokenizer_of: Tokenizers, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    turns = [{"token_ids": [1, 2, 3, 4, 5, 6], "answer_spans": [[begin, 6]]} for begin in (3, 5)]
    lines = [
        {"prompt": "p" * 30, "response": "r"},
        {"prompt": "p", "response": "r"},
        {"prompt": "p", "response": "r", "sequences": turns},  # two sequences, and one conversation
        {"prompt": "p", "response": "r", "sequences": turns[1:]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert count_conversations(path, tokenizer_of(), max_length=5) == (2, 4)
    assert count_conversations(path, tokenizer_of(), max_length=6) == (3, 4)


def test_the_cache_equals_the_corpus_and_detects_changes(
    tokenizer_of: Tokenizers, tmp_path: Path, write_conversations: Callable[..., Path]
) -> None:
    path, cache, tokenizer = write_conversations(5), tmp_path / "cache", tokenizer_of()
    first = load_corpus([path], tokenizer, max_length=50, cache_folder=cache)
    cached = load_corpus([path], tokenizer, max_length=50, cache_folder=cache)
    assert torch.equal(first.tokens, cached.tokens)
    assert torch.equal(first.loss_mask, cached.loss_mask)
    assert len(list(cache.glob("tokens-*"))) == 1
    cached_file = next(cache.glob("tokens-*")) / "corpus.safetensors"
    cached_file.write_bytes(cached_file.read_bytes()[:40])  # truncated: it is recreated
    assert torch.equal(load_corpus([path], tokenizer, max_length=50, cache_folder=cache).end_offsets, first.end_offsets)
    load_corpus([path], tokenizer, max_length=40, cache_folder=cache)
    tokenizer.chat_template = "x" + tokenizer.chat_template
    load_corpus([path], tokenizer, max_length=50, cache_folder=cache)
    assert len(list(cache.glob("tokens-*"))) == 3


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 5), st.integers(0, 3), st.sampled_from([None, 40, 64])
)
def test_an_epoch_omits_less_than_a_batch_and_repeats_nothing(
    lengths: list[int], rows: int, epoch: int, pack: int | None
) -> None:
    batches = plan_batches(lengths, rows_per_batch=rows, seed=1, epoch=epoch, packed_row_tokens=pack)
    used = [index for batch in batches for row in batch for index in row]
    assert len(used) == len(set(used))
    assert all(len(batch) == rows for batch in batches)
    assert batches == plan_batches(lengths, rows_per_batch=rows, seed=1, epoch=epoch, packed_row_tokens=pack)
    if pack is None:
        assert len(used) == len(lengths) // rows * rows
    else:
        assert all(sum(lengths[index] for index in row) <= pack for batch in batches for row in batch)
        left_out = set(range(len(lengths))) - set(used)
        assert sum(lengths[index] for index in left_out) <= (rows - 1) * pack  # less than a batch of rows


def test_epochs_differ_and_batches_have_similar_lengths() -> None:
    lengths = [1 + index % 50 for index in range(400)]
    first, second = (plan_batches(lengths, rows_per_batch=4, seed=0, epoch=epoch) for epoch in (0, 1))
    assert first != second
    spread = [max(lengths[i] for (i,) in batch) - min(lengths[i] for (i,) in batch) for batch in first]
    assert sum(spread) / len(spread) < 3


def test_rows_are_concatenated_and_padded() -> None:
    pairs = [(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 1])), (torch.tensor([4]), torch.tensor([1]))]
    corpus = Corpus.from_conversations(pairs)
    tokens, counted = assemble_batch(corpus, [(0, 1), (1,)])
    assert tokens.tolist() == [[1, 2, 3, 4], [4, 0, 0, 0]]
    assert counted.tolist() == [[False, True, True, True], [True, False, False, False]]
    assert corpus.select([1]).tokens.tolist() == [4]


def test_the_draft_vocabulary_has_the_most_frequent_tokens() -> None:
    tokens = torch.tensor([5, 5, 5, 7, 7, 2, 9, 9])
    counted = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    corpus = Corpus.from_conversations([(tokens, counted)])
    assert most_frequent_tokens(corpus, 2, 12).tolist() == [7, 9]
    assert most_frequent_tokens(corpus, 5, 12).tolist() == [0, 1, 2, 7, 9]
