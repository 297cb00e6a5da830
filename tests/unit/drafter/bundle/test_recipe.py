"""The recipe's text and training stream."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aerie_drafter.evaluate.prompts import Prompt
from bundle import corpus, target
from bundle.corpus import Item

ITEMS = corpus.items()
TOKENIZER = target.make_tokenizer([item.answer for item in ITEMS[:300]])


def test_the_corpus_is_the_same_each_time() -> None:
    reread = corpus.items()
    assert reread == ITEMS
    assert corpus.digest(reread, corpus.plain()) == corpus.digest(ITEMS, corpus.plain())
    assert corpus.digest(reread[1:], corpus.plain()) != corpus.digest(ITEMS, corpus.plain())


def test_every_category_is_in_training_and_held_out_items() -> None:
    for held_out in (True, False):
        assert {item.category for item in ITEMS if item.held_out is held_out} == set(corpus.ASK)
    assert 0.04 < sum(item.held_out for item in ITEMS) / len(ITEMS) < 0.15
    assert len({item.question for item in ITEMS}) == len(ITEMS)


def test_a_known_docstring_is_question_and_answer() -> None:
    [item] = [item for item in ITEMS if item.name == "`textwrap.dedent(text)`"]
    assert item.category == "function"
    assert "`textwrap.dedent(text)`" in item.question
    assert item.answer.startswith("Remove any common leading whitespace")


def test_no_answer_is_longer_than_the_limit() -> None:
    assert max(len(item.answer) for item in ITEMS) <= corpus.LONGEST
    assert min(len(item.answer) for item in ITEMS) >= 20


@given(st.text(max_size=60))
def test_every_text_is_decoded_unchanged(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text


def test_the_tokenizer_is_the_same_each_time() -> None:
    tokenizer = target.make_tokenizer([item.answer for item in ITEMS[:300]])
    assert tokenizer.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert len(TOKENIZER) == target.VOCABULARY


def test_the_chat_template_frames_turns_with_single_tokens() -> None:
    prompt = Prompt("", messages=({"role": "user", "content": "What?"},)).encode(TOKENIZER)
    assert TOKENIZER.decode(prompt) == "<|begin|><|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt[0] == TOKENIZER.bos_token_id
    assert TOKENIZER.eos_token_id in prompt
    assert TOKENIZER("plain")["input_ids"][0] == TOKENIZER.bos_token_id


def test_batches_are_cut_from_one_stream_and_repeat() -> None:
    learned = ITEMS[:40]
    phases = ((3, 2, 16), (1, 1, 64))
    first, second = (list(target.batches(TOKENIZER, learned, ["plain text"], phases)) for _ in range(2))
    assert [tuple(batch.shape) for batch in first] == [(2, 16)] * 3 + [(1, 64)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    joined = torch.cat([batch.flatten() for batch in first]).tolist()
    [whole] = target.batches(TOKENIZER, learned, ["plain text"], ((1, 1, len(joined)),))
    assert whole[0].tolist() == joined


def test_a_pass_contains_every_item_once() -> None:
    learned = [Item("function", f"`f{number}`", f"What does f{number} do?", f"Returns {number}.") for number in range(30)]
    stream = target._stream(TOKENIZER, learned, ["plain text"])
    documents: list[str] = []
    while sum(document.count("Returns ") for document in documents) < 30:
        documents.append(str(TOKENIZER.decode(next(stream))))
    text = "".join(itertools.chain(documents))
    assert all(text.count(f"Returns {number}.") == 1 for number in range(30))


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [target.learning_rate(step, 1000, peak=1.0, warmup=10) for step in range(1000)]
    assert rates[9] == rates[10] == max(rates) == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=1e-3)
