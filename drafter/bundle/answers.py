"""Training data: the target's answers to each question, with their exact tokens; and held-out prompts for evaluation.

Each question gets an answer for each of TEMPERATURES. A text does not determine its tokens: more than a third of the answers at
temperature 1 have others when they are encoded again. So the tokens are kept beside the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from aerie.terminal import err
from aerie_drafter.evaluate.acceptance import AnsweredText
from aerie_drafter.evaluate.answers import answer_batch
from aerie_drafter.evaluate.prompts import Prompt
from aerie_drafter.evaluate.target import TargetRunner
from aerie_drafter.train.conversations import TokenSequence
from aerie_drafter.train.states import load_model, load_tokenizer
from bundle.corpus import Item

FEW = 500
"""Answers for the weak drafter."""
TEMPERATURES = (0.0, 1.0, 1.0)
MAX_TOKENS, BATCH, SEED = 128, 96, 20260512


def write_answers(folder: Path, target: Path, items: Sequence[Item], every: int = 1) -> None:
    """Write answers.jsonl, few.jsonl (its first FEW lines, for the weak drafter) and prompts.jsonl (held out) into `folder`.

    `target` is the target's folder; one in `every` training question is answered.
    """
    training_items, held_out = ([item for item in items if item.held_out is out] for out in (False, True))
    lines = answer_all(target, [item.question for item in training_items[::every]])
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(SEED)).tolist()
    lines = [lines[at] for at in order]
    (folder / "answers.jsonl").write_text("".join(lines))
    (folder / "few.jsonl").write_text("".join(lines[:FEW]))
    prompts = [
        {"category": item.category, "messages": [{"role": "user", "content": item.question}]}
        for item in sorted(held_out, key=lambda item: item.category)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def answer_all(target_folder: Path, questions: Sequence[str]) -> list[str]:
    """Return a line of training data for each of TEMPERATURES and each question; answers that are empty are omitted."""
    tokenizer = load_tokenizer(str(target_folder), None)
    target = TargetRunner(load_model(str(target_folder), None, torch.float32, torch.device("cpu")), (1,))
    generator = torch.Generator().manual_seed(SEED)
    prompts = [Prompt("", messages=({"role": "user", "content": question},)).encode(tokenizer) for question in questions]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    lines = []
    for temperature in TEMPERATURES:
        for begin in range(0, len(order), BATCH):
            batch = order[begin : begin + BATCH]
            answers = answer_batch(
                target,
                [prompts[index] for index in batch],
                max_tokens=MAX_TOKENS,
                extra_tokens=0,
                end_tokens=frozenset({tokenizer.eos_token_id}),
                temperature=temperature,
                generator=generator,
            )
            lines += [_format_line(tokenizer, questions[index], text) for index, text in zip(batch, answers, strict=True)]
        err.print(f"answers: {len(order)} at temperature {temperature:g}")
    return [line for line in lines if line]


def _format_line(tokenizer: object, question: str, answered: AnsweredText) -> str:
    """Return a line in the form of `aerie-drafter generate`; empty for an empty answer."""
    tokens = answered.tokens.tolist()[: answered.answer_end]
    answer = tokenizer.decode(tokens[answered.prompt_length :], skip_special_tokens=True)  # type: ignore[attr-defined]
    if not answer.strip():
        return ""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    sequence = TokenSequence(tuple(tokens), ((answered.prompt_length, answered.answer_end),))
    return json.dumps({"messages": messages, "sequences": [sequence.to_json()]}) + "\n"
