"""Speculative decoding token by token, with exact rejection sampling: the reference that the rest is held to.

    draft K tokens from the drafter ─► one pass of the target over them ─► accept a prefix, and one token more

Verification is that of Leviathan, Kalman and Matias (arXiv 2211.17192, algorithm 1): a drafted token x with the drafter's
probability q(x) is accepted with min(1, p(x) / q(x)); the first that is not is replaced by a draw from max(0, p - q),
normalised; after K accepted tokens one more is drawn from p. A greedy draft has q(x) = 1, so that the same rule accepts x
exactly where the target's own draw is x.

Guarantee: the emitted text is distributed as the target's own; at temperature 0 it is the target's greedy text, to the
rounding of the target's passes over several tokens. One text at a time: this is for being right, not for being quick.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from aerie_drafter.evaluate.acceptance import AcceptanceCounts
from aerie_drafter.evaluate.target import TargetRunner
from aerie_drafter.model import DecodingCache, Drafter


@dataclass(frozen=True)
class TokenSampler:
    """How tokens are chosen."""

    temperature: float = 0.0
    """Of the target; 0 is greedy."""
    sampled_drafts: bool = False
    """Drafts are drawn at the same temperature instead of being the drafter's likeliest tokens (vLLM's default)."""
    generator: torch.Generator | None = None

    def distribution(self, logits: Tensor) -> Tensor:
        """Probabilities [..., vocabulary] in float64."""
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        return (logits.double() / self.temperature).softmax(-1)

    def sample_token(self, probabilities: Tensor) -> int:
        """A token from [vocabulary]."""
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def sample_uniform(self) -> float:
        """In [0, 1)."""
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))


def verify_draft(
    draft_tokens: list[int], draft_distributions: Tensor, target_distributions: Tensor, sampler: TokenSampler
) -> list[int]:
    """The tokens that a verification emits: the accepted ones and one more.

    `proposed` [K, vocabulary] are the distributions that `drafted` was drawn from, `wanted` [K + 1, vocabulary] the target's.
    """
    for position, token in enumerate(draft_tokens):
        p, q = target_distributions[position], draft_distributions[position]
        if sampler.sample_uniform() * float(q[token]) >= float(p[token]):
            return [*draft_tokens[:position], sampler.sample_token((p - q).clamp(min=0))]
    return [*draft_tokens, sampler.sample_token(target_distributions[-1])]


@torch.no_grad()
def decode_speculatively(
    target: TargetRunner,
    drafter: Drafter,
    prompt_tokens: list[int],
    k: int,
    max_tokens: int,
    end_tokens: frozenset[int],
    sampler: TokenSampler,
) -> tuple[list[int], AcceptanceCounts]:
    """(the answer, the counters) for one prompt; the answer ends with the first of `end_tokens` or after `max_tokens`."""
    cache, memory = DynamicCache(), DecodingCache()
    seen = target(torch.tensor([prompt_tokens], device=target.device), cache)
    tokens = [*prompt_tokens, sampler.sample_token(sampler.distribution(seen.logits[0, -1]))]
    aux, committed = seen.aux_hidden_states, 0
    drafts, accepted = 0, [0] * k
    while not _find_answer_end(tokens, len(prompt_tokens), max_tokens, end_tokens):
        # Columns committed .. len(tokens) - 2 are new: each reads the next token and the target's state of its own.
        new = torch.tensor([tokens[committed + 1 :]], device=target.device)
        drafted, proposed = _propose_draft(drafter, memory, new, aux, k, sampler)
        committed = len(tokens) - 1
        seen = target(torch.tensor([[tokens[-1], *drafted]], device=target.device), cache)
        emitted = verify_draft(drafted, proposed, sampler.distribution(seen.logits[0]), sampler)
        drafts += 1
        for position in range(len(emitted) - 1):
            accepted[position] += 1
        tokens += emitted
        aux = seen.aux_hidden_states[:, : len(emitted)]
        if len(emitted) <= k:
            cache.crop(len(emitted) - k - 1)  # what was refused
    length = _find_answer_end(tokens, len(prompt_tokens), max_tokens, end_tokens)
    return tokens[len(prompt_tokens) : length], AcceptanceCounts(drafts, tuple(accepted))


def _propose_draft(
    drafter: Drafter, memory: DecodingCache, new: Tensor, aux: Tensor, k: int, sampling: TokenSampler
) -> tuple[list[int], Tensor]:
    """k tokens and the distributions they are from, [k, vocabulary], after committing the columns of `new`."""
    memory.discard_uncommitted()
    normed, hidden = drafter(new, drafter.fuse_aux_hidden_states(aux), memory)
    memory.commit()
    normed, hidden = normed[:, -1:], hidden[:, -1:]
    drafted: list[int] = []
    proposed = torch.zeros(k, drafter.config.vocab_size, dtype=torch.float64, device=new.device)
    for position in range(k):
        if position:
            normed, hidden = drafter(torch.tensor([drafted[-1:]], device=new.device), hidden, memory)
        greedy = TokenSampler() if not sampling.sampled_drafts else sampling
        proposed[position, drafter.draft_token_ids] = greedy.distribution(drafter.logits(normed)[0, 0])
        drafted.append(sampling.sample_token(proposed[position]))
    return drafted, proposed


def _find_answer_end(tokens: list[int], prompt: int, max_tokens: int, end_tokens: frozenset[int]) -> int:
    """The place after the answer's last token; 0 while it goes on."""
    for place in range(prompt, min(len(tokens), prompt + max_tokens)):
        if tokens[place] in end_tokens or place + 1 == prompt + max_tokens:
            return place + 1
    return 0
