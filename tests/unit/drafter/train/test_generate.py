"""Answers of the target: equal to its own decoding, also in batches, and a run that is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie_drafter.errors import DataError
from aerie_drafter.train.generate import GenerationParameters, generate_answers

FORM = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "old"}]},
    {
        "messages": [
            {"role": "system", "content": "long system text"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "old"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "old"},
        ]
    },
    {"prompt": "d", "response": "old"},
    {"prompt": "e", "response": "old"},
    {"prompt": "f", "response": "old"},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in FORM))
    return path


@pytest.fixture(scope="module")
def letter_target(target_of: Callable[..., Any], tokenizer_of: Callable[..., Any]) -> tuple[Any, Any]:
    """A target that writes plain letters only, so that its text can be tokenized again, and its tokenizer."""
    model, tokenizer = target_of(initializer_range=0.3), tokenizer_of()
    letters = torch.tensor([tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefgh"] + [256])
    others = torch.ones(264, dtype=torch.bool)
    others[letters] = False
    model.lm_head.weight.data[others] = 0.0
    return model, tokenizer


def read(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def greedy_answer(model: Any, tokenizer: Any, messages: list[dict[str, str]], length: int) -> str:
    """Decode one conversation, one token at a time, without cache or padding."""
    tokens = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"]
    begun = len(tokens)
    while len(tokens) < begun + length:
        with torch.no_grad():
            best = int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
        if best == tokenizer.eos_token_id:
            break
        tokens.append(best)
    return str(tokenizer.decode(tokens[begun:], skip_special_tokens=True))


def test_every_turn_is_generated_after_the_generated_turns(source: Path, letter_target: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = letter_target
    output = tmp_path / "answers.jsonl"
    assert generate_answers(model, tokenizer, source, output, parameters=GenerationParameters(max_tokens=6), batch_size=3) == 5
    answered = read(output)
    assert [[m["role"] for m in messages] for messages in answered][1] == ["system", "user", "assistant", "user", "assistant"]
    answers = set()
    for messages in answered:
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                assert message["content"] == greedy_answer(model, tokenizer, messages[:index], 6)
                answers.add(message["content"])
    assert len(answers) > 1
    assert "old" not in answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_run_gives_the_same_file(
    source: Path, letter_target: tuple[Any, Any], tmp_path: Path, temperature: float
) -> None:
    model, tokenizer = letter_target
    output, parameters = tmp_path / "answers.jsonl", GenerationParameters(max_tokens=6, temperature=temperature, seed=3)
    generate_answers(model, tokenizer, source, output, parameters=parameters, batch_size=2)
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:3]) + lines[3][:5])  # killed in the middle of the second batch
    progress: list[int] = []
    assert (
        generate_answers(model, tokenizer, source, output, parameters=parameters, batch_size=2, on_progress=progress.append) == 3
    )
    assert output.read_bytes() == whole
    assert progress == [4, 5]
    assert generate_answers(model, tokenizer, source, output, parameters=parameters, batch_size=2) == 0


def test_sampling_depends_on_the_seed(source: Path, letter_target: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = letter_target
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        sampling = GenerationParameters(max_tokens=12, temperature=2.0, seed=seed)
        generate_answers(model, tokenizer, source, tmp_path / name, parameters=sampling, batch_size=2)
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1] != texts[2]


def test_a_question_without_answer_gets_one(source: Path, letter_target: tuple[Any, Any], tmp_path: Path) -> None:
    """A conversation that ends with a question is answered like one whose answer is replaced."""
    questions = tmp_path / "questions.jsonl"
    alone = [{"prompt": "d"}, {"messages": FORM[1]["messages"][:-1]}]  # type: ignore[index]
    questions.write_text("".join(json.dumps(line) + "\n" for line in alone))
    for name, file in (("one", questions), ("other", source)):
        generate_answers(*letter_target, file, tmp_path / name, parameters=GenerationParameters(max_tokens=6), batch_size=1)
    d, long = read(tmp_path / "one")
    assert [d, long] == [read(tmp_path / "other")[2], read(tmp_path / "other")[1]]


def test_a_file_of_another_run_is_rejected(source: Path, letter_target: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = letter_target
    output = tmp_path / "answers.jsonl"
    generate_answers(model, tokenizer, source, output, parameters=GenerationParameters(max_tokens=2))
    source.write_text(json.dumps(FORM[0]) + "\n")
    with pytest.raises(DataError, match=r"answers.jsonl: has 5 lines, but the input has 1"):
        generate_answers(model, tokenizer, source, output, parameters=GenerationParameters(max_tokens=2))
    source.write_text("".join(json.dumps(FORM[index]) + "\n" for index in (1, 0, 2, 3, 4)))
    with pytest.raises(DataError, match=r"answers.jsonl:1: answers another conversation than .*prompts.jsonl:1"):
        generate_answers(model, tokenizer, source, output, parameters=GenerationParameters(max_tokens=2))
