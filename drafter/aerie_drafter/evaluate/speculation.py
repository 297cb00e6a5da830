"""Speculative decoding token by token with exact rejection sampling: the reference implementation.

    draft K tokens with the drafter ─► one pass of the target over them ─► accept a prefix, plus one token

Verification is that of Leviathan, Kalman and Matias (arXiv 2211.17192, algorithm 1): a draft token x with the drafter's
probability q(x) is accepted with probability min(1, p(x) / q(x)). The first rejected token is replaced by a sample from
max(0, p - q), normalized. After K accepted tokens one more is sampled from p. A greedy draft has q(x) = 1.

Guarantee: the emitted text is distributed as the target's own; at temperature 0 it is the target's greedy text, up to
rounding when several tokens are evaluated in one pass. One text at a time: correctness comes before speed.
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
    """Sampling of the target and the drafter."""

    temperature: float = 0.0
    """Temperature of the target; 0 is greedy."""
    sampled_drafts: bool = False
    """Draft tokens are sampled at the same temperature instead of being the most likely ones (vLLM's default)."""
    generator: torch.Generator | None = None

    def distribution(self, logits: Tensor) -> Tensor:
        """Return the probabilities [..., vocabulary] in float64."""
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        return (logits.double() / self.temperature).softmax(-1)

    def sample_token(self, probabilities: Tensor) -> int:
        """Sample a token from [vocabulary]."""
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def sample_uniform(self) -> float:
        """Sample a number in [0, 1)."""
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))


def verify_draft(
    draft_tokens: list[int], draft_distributions: Tensor, target_distributions: Tensor, sampler: TokenSampler
) -> list[int]:
    """Return the tokens that a verification emits: the accepted ones and one more.

    The draft tokens were sampled from `draft_distributions` [K, vocabulary]; `target_distributions` is [K + 1, vocabulary].
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
    """Return (answer, counters) for one prompt; the answer ends with the first of `end_tokens` or after `max_tokens`."""
    cache, kv_cache = DynamicCache(), DecodingCache(num_layers=drafter.config.num_hidden_layers)
    output = target(torch.tensor([prompt_tokens], device=target.device), cache)
    tokens = [*prompt_tokens, sampler.sample_token(sampler.distribution(output.logits[0, -1]))]
    aux, committed = output.aux_hidden_states, 0
    drafts, accepted = 0, [0] * k
    while not _find_answer_end(tokens, len(prompt_tokens), max_tokens, end_tokens):
        # Columns committed .. len(tokens) - 2 are new: each reads the next token and its own state of the target.
        new = torch.tensor([tokens[committed + 1 :]], device=target.device)
        drafted, proposed = _propose_draft(drafter, kv_cache, new, aux, k, sampler)
        committed = len(tokens) - 1
        output = target(torch.tensor([[tokens[-1], *drafted]], device=target.device), cache)
        emitted = verify_draft(drafted, proposed, sampler.distribution(output.logits[0]), sampler)
        drafts += 1
        for position in range(len(emitted) - 1):
            accepted[position] += 1
        tokens += emitted
        aux = output.aux_hidden_states[:, : len(emitted)]
        if len(emitted) <= k:
            cache.crop(len(emitted) - k - 1)  # rejected tokens
    length = _find_answer_end(tokens, len(prompt_tokens), max_tokens, end_tokens)
    return tokens[len(prompt_tokens) : length], AcceptanceCounts(drafts, tuple(accepted))


def _propose_draft(
    drafter: Drafter, kv_cache: DecodingCache, new: Tensor, aux: Tensor, k: int, sampler: TokenSampler
) -> tuple[list[int], Tensor]:
    """Commit the columns of `new`, and return k tokens with their distributions, [k, vocabulary]."""
    kv_cache.discard_uncommitted()
    normed, hidden = drafter(new, drafter.fuse_aux_hidden_states(aux), kv_cache)
    kv_cache.commit()
    normed, hidden = normed[:, -1:], hidden[:, -1:]
    drafted: list[int] = []
    proposed = torch.zeros(k, drafter.config.vocab_size, dtype=torch.float64, device=new.device)
    for position in range(k):
        if position:
            normed, hidden = drafter(torch.tensor([drafted[-1:]], device=new.device), hidden, kv_cache)
        draft_sampler = TokenSampler() if not sampler.sampled_drafts else sampler
        proposed[position, drafter.draft_token_ids] = draft_sampler.distribution(drafter.logits(normed)[0, 0])
        drafted.append(sampler.sample_token(proposed[position]))
    return drafted, proposed


def _find_answer_end(tokens: list[int], prompt_length: int, max_tokens: int, end_tokens: frozenset[int]) -> int:
    """Return the index after the last token of the answer; 0 if it has not ended."""
    for index in range(prompt_length, min(len(tokens), prompt_length + max_tokens)):
        if tokens[index] in end_tokens or index + 1 == prompt_length + max_tokens:
            return index + 1
    return 0
