"""Training data: the target's answers to each question, a greedy and a sampled one; and held-out prompts for evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from aerie.terminal import err
from aerie_drafter.evaluate.answers import answer_batch
from aerie_drafter.evaluate.prompts import Prompt
from aerie_drafter.evaluate.target import TargetRunner
from aerie_drafter.train.states import load_model, load_tokenizer
from bundle.corpus import Item

FEW = 500
TEMPERATURE, MAX_TOKENS, BATCH, SEED = 0.8, 128, 96, 20260512


def write_answers(folder: Path, target: Path, items: list[Item], every: int = 1) -> None:
    """Write answers.jsonl, few.jsonl (its first FEW lines, for the weak drafter) and prompts.jsonl (held out) into `folder`.

    `target` is the target's folder; one in `every` training question is answered, twice.
    """
    training_items, held_out = ([item for item in items if item.held_out is out] for out in (False, True))
    questions = [item.question for item in training_items[::every]]
    pairs = list(zip(questions * 2, answer_all(target, questions, 0.0) + answer_all(target, questions, TEMPERATURE), strict=True))
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(SEED)).tolist()
    lines = [json.dumps({"prompt": pairs[at][0], "response": pairs[at][1]}) + "\n" for at in order if pairs[at][1].strip()]
    (folder / "answers.jsonl").write_text("".join(lines))
    (folder / "few.jsonl").write_text("".join(lines[:FEW]))
    prompts = [
        {"category": item.category, "messages": [{"role": "user", "content": item.question}]}
        for item in sorted(held_out, key=lambda item: item.category)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def answer_all(target_folder: Path, questions: list[str], temperature: float) -> list[str]:
    """Generate the target's answers."""
    tokenizer = load_tokenizer(str(target_folder), None)
    target = TargetRunner(load_model(str(target_folder), None, torch.float32, torch.device("cpu")), (1,))
    generator = torch.Generator().manual_seed(SEED)
    ids = [_encode(tokenizer, question) for question in questions]
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    texts = [""] * len(ids)
    for begin in range(0, len(order), BATCH):
        batch = order[begin : begin + BATCH]
        answers = answer_batch(
            target,
            [ids[index] for index in batch],
            max_tokens=MAX_TOKENS,
            extra_tokens=0,
            end_tokens=frozenset({tokenizer.eos_token_id}),
            temperature=temperature,
            generator=generator,
        )
        for index, text in zip(batch, answers, strict=True):
            texts[index] = tokenizer.decode(text.tokens[text.prompt_length : text.answer_end], skip_special_tokens=True)
    err.print(f"answers: {len(texts)} at temperature {temperature}")
    return texts


def _encode(tokenizer: object, question: str) -> list[int]:
    return Prompt("", messages=({"role": "user", "content": question},)).encode(tokenizer)
