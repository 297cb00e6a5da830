"""What a server would count for a text: drafts, and accepted tokens per position.

    text      x0 .. x[p-1] | x[p] x[p+1] ..         a prompt of p tokens, then the answer; x[p] comes with the prefill
    column t  reads x[t+1] and the target's state of t, drafts x[t+2], x[t+3], ...

The first draft starts from column p - 1. Where `a` tokens are accepted, a + 1 are emitted, so the next one starts from column
start + a + 1. All columns draft at once and the walk then picks the ones that a server visits. That equals serving, because a
server makes the keys of accepted tokens anew from the target's states: a draft depends on the text so far and on nothing that
was drafted before.

Guarantees: for a text that the target chooses token by token, greedily or by drawing, and drafts that are the drafter's
likeliest tokens, the counts are those of serving that very text (a draft is accepted exactly where it equals the target's own
choice, which is how vLLM verifies such drafts). A server counts accepted tokens beyond the end of an answer too, so a text
has to go on for K tokens after `end`; what is missing there counts as not accepted. Not here: drafts that are drawn
(`aerie_drafter.evaluate.speculation`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aerie_drafter.model import Drafter, UnrolledCache


@dataclass(frozen=True)
class AcceptanceCounts:
    """Counters as vLLM has them; those of several texts add up."""

    drafts: int
    """Verification steps that had drafted tokens."""
    accepted_per_position: tuple[int, ...]
    """Accepted tokens per position; its length is K."""

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        return AcceptanceCounts(
            self.drafts + other.drafts,
            tuple(a + b for a, b in zip(self.accepted_per_position, other.accepted_per_position, strict=True)),
        )

    @classmethod
    def zero(cls, k: int) -> AcceptanceCounts:
        """Of no drafts."""
        return cls(0, (0,) * k)

    @property
    def acceptance_length(self) -> float:
        """AL; NaN without a draft."""
        return 1 + sum(self.accepted_per_position) / self.drafts if self.drafts else float("nan")

    @property
    def acceptance_rates(self) -> list[float]:
        """Per position: accepted tokens over drafts, which also is the share of drafts that got that far."""
        return [count / self.drafts if self.drafts else float("nan") for count in self.accepted_per_position]

    @property
    def conditional_rates(self) -> list[float]:
        """Per position: accepted, of the drafts whose earlier positions all were."""
        reached = (self.drafts, *self.accepted_per_position)
        return [
            after / before if before else float("nan") for before, after in zip(reached, self.accepted_per_position, strict=False)
        ]


@dataclass(frozen=True)
class AnsweredText:
    """A prompt and the answer that the target gave."""

    tokens: Tensor
    """[length], ids; the answer goes on for K tokens beyond `end` where the counts are to be a server's."""
    prompt_length: int
    """Tokens of the prompt."""
    answer_end: int
    """Where the answer ends: the place after its last token."""


def compute_accepted_lengths(drafter: Drafter, tokens: Tensor, aux_hidden_states: Tensor, k: int) -> Tensor:
    """How many of k drafted tokens the text confirms, for a draft from every column: [batch, length - 1].

    `tokens` [batch, length]; `aux` [batch, length, parts x target_hidden] are the target's states of the same text.
    """
    memory, columns = UnrolledCache(), tokens.shape[1] - 1
    read = tokens[:, 1:]
    hidden = drafter.fuse_aux_hidden_states(aux_hidden_states[:, :-1])
    # No token has the id -1: past its end a text confirms nothing.
    ahead = torch.nn.functional.pad(tokens[:, 2:], (0, k + 1), value=-1)
    going = torch.ones_like(read, dtype=torch.bool)
    lengths = torch.zeros_like(read)
    for step in range(k):
        normed, hidden = drafter(read, hidden, memory)
        read = drafter.argmax_tokens(normed)
        going = going & (read == ahead[:, step : step + columns])
        lengths += going
    return lengths


def iterate_draft_columns(accepted_lengths: Sequence[int], prompt_length: int, answer_end: int) -> Iterator[int]:
    """The columns from which a server drafts, for one text; `lengths` by column as `accepted_lengths` gives them."""
    column = prompt_length - 1
    while column + 2 < answer_end:  # column + 2 is the token that the next verification emits first
        yield column
        column += accepted_lengths[column] + 1


def count_acceptance(accepted_lengths: Sequence[int], text: AnsweredText, k: int) -> AcceptanceCounts:
    """The counters of one text; `lengths` as above."""
    drafts, accepted = 0, [0] * k
    for column in iterate_draft_columns(accepted_lengths, text.prompt_length, text.answer_end):
        drafts += 1
        for position in range(accepted_lengths[column]):
            accepted[position] += 1
    return AcceptanceCounts(drafts, tuple(accepted))
