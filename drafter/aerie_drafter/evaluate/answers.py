"""The target's own answers, many prompts at a time, each going on for some tokens beyond its end (acceptance.py says why)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from aerie_drafter.evaluate.acceptance import AnsweredText
from aerie_drafter.evaluate.target import TargetRunner


@torch.no_grad()
def answer_batch(
    target: TargetRunner,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    extra_tokens: int,
    end_tokens: frozenset[int],
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[AnsweredText]:
    """Let the target answer each prompt (token ids), greedily or, with `temperature`, drawing from `generator`.

    An answer ends with the first of `end_tokens` or after `max_tokens`; `beyond` tokens more are kept.
    """
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=target.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=target.device)
    cache, read = DynamicCache(), tokens
    ends = [0] * len(prompts)  # 0: still going
    for number in range(max_tokens + extra_tokens):
        logits = target(read, cache, mask).logits[:, -1]
        read = choose_tokens(logits, temperature, generator).unsqueeze(-1)
        tokens = torch.cat([tokens, read], dim=-1)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        for row, token in enumerate(read[:, 0].tolist()):
            if not ends[row] and (token in end_tokens or number + 1 == max_tokens):
                ends[row] = number + 1
        if all(ends) and number + 1 >= max(ends) + extra_tokens:
            break
    texts = []
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt)
        last = longest + ends[row]
        texts.append(AnsweredText(tokens[row, start : last + extra_tokens].cpu(), len(prompt), last - start))
    return texts


def choose_tokens(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One token per row of [rows, vocabulary]: the likeliest, or drawn at `temperature`."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
