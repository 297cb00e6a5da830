"""Batched generation of the target's answers, each with some tokens beyond its end (see acceptance.py)."""

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
    """Generate the target's answer to each prompt (token ids): greedy, or sampled at `temperature` with `generator`.

    An answer ends with the first of `end_tokens` or after `max_tokens`; `extra_tokens` more are included.
    """
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=target.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=target.device)
    cache, input_tokens = DynamicCache(), tokens
    ends = [0] * len(prompts)  # 0: not ended
    for number in range(max_tokens + extra_tokens):
        logits = target(input_tokens, cache, mask).logits[:, -1]
        input_tokens = choose_tokens(logits, temperature, generator).unsqueeze(-1)
        tokens = torch.cat([tokens, input_tokens], dim=-1)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        for row, token in enumerate(input_tokens[:, 0].tolist()):
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
    """Return a token per row of [rows, vocabulary]: the most likely one, or one sampled at `temperature`."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
