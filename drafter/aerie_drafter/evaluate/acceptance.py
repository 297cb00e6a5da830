"""Counters of a server for a text: drafts, and accepted tokens per position.

    text      x0 .. x[p-1] | x[p] x[p+1] ..         a prompt of p tokens, then the answer; x[p] comes with the prefill
    column t  reads x[t+1] and the target's state of t, drafts x[t+2], x[t+3], ...

The first draft starts from column p - 1. If `a` tokens are accepted, a + 1 are emitted, so the next draft starts from column
start + a + 1. All columns draft at once, and those that a server visits are selected afterwards. That equals serving, because a
server recomputes the keys of accepted tokens from the target's states: a draft depends on the text so far, and not on earlier
drafts.

Guarantees: for a text of the target, greedy or sampled, and greedy drafts, the counts are those of serving that text (a draft is
accepted exactly where it equals the target's token, which is how vLLM verifies such drafts). A server also counts accepted
tokens beyond the end of an answer, so a text needs K tokens after `answer_end`; missing ones count as rejected. Not here:
sampled drafts (`aerie_drafter.evaluate.speculation`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aerie_drafter.model import Drafter, UnrolledCache


@dataclass(frozen=True)
class AcceptanceCounts:
    """Counters of vLLM; those of several texts can be added."""

    drafts: int
    """Verification steps with draft tokens."""
    accepted_per_position: tuple[int, ...]
    """Accepted tokens per position; K values."""

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        return AcceptanceCounts(
            self.drafts + other.drafts,
            tuple(a + b for a, b in zip(self.accepted_per_position, other.accepted_per_position, strict=True)),
        )

    @classmethod
    def zero(cls, k: int) -> AcceptanceCounts:
        """Return counters without drafts."""
        return cls(0, (0,) * k)

    @property
    def acceptance_length(self) -> float:
        """Return the acceptance length; NaN without drafts."""
        return 1 + sum(self.accepted_per_position) / self.drafts if self.drafts else float("nan")

    @property
    def acceptance_rates(self) -> list[float]:
        """Return accepted tokens divided by drafts, per position."""
        return [count / self.drafts if self.drafts else float("nan") for count in self.accepted_per_position]

    @property
    def conditional_rates(self) -> list[float]:
        """Return the share of accepted tokens per position, of the drafts with all earlier positions accepted."""
        reached = (self.drafts, *self.accepted_per_position)
        return [
            after / before if before else float("nan") for before, after in zip(reached, self.accepted_per_position, strict=False)
        ]


@dataclass(frozen=True)
class AnsweredText:
    """A prompt with the target's answer."""

    tokens: Tensor
    """[length], ids; with K tokens beyond `answer_end`, if the counts should equal a server's."""
    prompt_length: int
    """Number of tokens of the prompt."""
    answer_end: int
    """Index after the last token of the answer."""


def compute_accepted_lengths(drafter: Drafter, tokens: Tensor, aux_hidden_states: Tensor, k: int) -> Tensor:
    """Return how many of k draft tokens the text confirms, for a draft from every column: [batch, length - 1].

    `tokens` [batch, length]; `aux_hidden_states` [batch, length, parts x target_hidden] are the target's for the same text.
    """
    kv_cache, columns = UnrolledCache(num_layers=drafter.config.num_hidden_layers), tokens.shape[1] - 1
    input_tokens = tokens[:, 1:]
    hidden = drafter.fuse_aux_hidden_states(aux_hidden_states[:, :-1])
    # No token has the id -1, so nothing is confirmed past the end of the text.
    expected_tokens = torch.nn.functional.pad(tokens[:, 2:], (0, k + 1), value=-1)
    is_accepted = torch.ones_like(input_tokens, dtype=torch.bool)
    lengths = torch.zeros_like(input_tokens)
    for step in range(k):
        normed, hidden = drafter(input_tokens, hidden, kv_cache)
        input_tokens = drafter.argmax_tokens(normed)
        is_accepted = is_accepted & (input_tokens == expected_tokens[:, step : step + columns])
        lengths += is_accepted
    return lengths


def iterate_draft_columns(accepted_lengths: Sequence[int], prompt_length: int, answer_end: int) -> Iterator[int]:
    """Yield the columns from which a server drafts, for one text; `accepted_lengths` by column."""
    column = prompt_length - 1
    while column + 2 < answer_end:  # column + 2 is the token that the next verification emits first
        yield column
        column += accepted_lengths[column] + 1


def count_acceptance(accepted_lengths: Sequence[int], text: AnsweredText, k: int) -> AcceptanceCounts:
    """Return the counters of one text; `accepted_lengths` by column."""
    drafts, accepted = 0, [0] * k
    for column in iterate_draft_columns(accepted_lengths, text.prompt_length, text.answer_end):
        drafts += 1
        for position in range(accepted_lengths[column]):
            accepted[position] += 1
    return AcceptanceCounts(drafts, tuple(accepted))
