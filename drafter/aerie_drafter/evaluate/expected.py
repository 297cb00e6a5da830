"""Expected counters of a server for a text: no draft token is drawn, and all columns of the text count.

    text      x0 .. x[p-1] | x[p] x[p+1] ..         a prompt of p tokens, then the answer, drawn from the target at temperature T
    column t  reads x[t+1] and the target's state of t, proposes x[t+2], x[t+3], ... with the distributions q1, q2, ...

Verification (arXiv 2211.17192) emits a token y that was accepted with chance min(p(y), q(y)), and with p(y) in all. So the text's
token was an accepted one with chance min(1, q(y) / p(y)), independent of the other tokens, once the text is given. This makes the
columns that a server visits a Markov chain, whose visits are summed here instead of drawn:

    visits of a column      exact, given the text: from p - 1, a + 1 columns further after a accepted tokens
    drafts                  sum of the visits
    accepted at position k  visits x chances that the text's tokens 1..k-1 were accepted x sum over y of min(pk(y), qk(y))

The last factor is the mean over the text's own token k, which has less variance than that token. qi is the drafter's distribution
after the text's tokens, not after its own: it is needed only where those are the same. A greedy draft is a q with all mass on its
most likely token.

Guarantee: the counters' mean over texts that the target draws at T is the mean of a server's counters at T, for target and
drafter at the same temperature (tests: by enumeration, and by sampling). For a greedy text of temperature 0 they are a server's.
The acceptance length, a ratio of two means, is consistent. Not guaranteed: anything about texts of another temperature or origin.
A server also counts accepted tokens beyond an answer's end, so a text needs K tokens after it; missing ones count as rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aerie.analysis.statistics.confidence_sequence import pod_effect_quantile as student_quantile


def expected_counts(
    position_acceptance: Sequence[Sequence[float]],
    text_acceptance: Sequence[Sequence[float]],
    prompt_length: int,
    answer_end: int,
) -> Tensor:
    """Return (drafts, accepted at position 1, ..., K), [1 + K] in float64, for one text.

    Both arguments are [K, columns]: the chance that the draft token is accepted, and the chance that the text's token was.
    """
    k, first, last = len(position_acceptance), prompt_length - 1, answer_end - 3  # column t: token t + 2 is emitted first
    counts = [0.0] * (1 + k)
    visits = [0.0] * (max(last, first) + k + 2 - first)
    visits[0] = 1.0
    for column in range(first, last + 1):
        visit = visits[column - first]
        counts[0] += visit
        for position in range(k):
            counts[1 + position] += visit * position_acceptance[position][column]
            accepted = text_acceptance[position][column]
            visits[column - first + position + 1] += visit * (1 - accepted)
            visit *= accepted
        visits[column - first + k + 1] += visit
    return torch.tensor(counts, dtype=torch.float64)


def expected_counts_of_spans(
    position_acceptance: Sequence[Sequence[float]], text_acceptance: Sequence[Sequence[float]], loss_mask: Sequence[bool]
) -> Tensor:
    """Return the sum of `expected_counts` over the answers of a text, which are the spans of `loss_mask` [length]."""
    total = torch.zeros(1 + len(position_acceptance), dtype=torch.float64)
    begin = None
    for position, is_counted in enumerate([*loss_mask, False]):
        if is_counted and begin is None:
            begin = max(position, 1)  # no column predicts the first token
        elif not is_counted and begin is not None:
            total += expected_counts(position_acceptance, text_acceptance, begin, position)
            begin = None
    return total


def acceptance_length(counts: Tensor) -> Tensor:
    """Return 1 + accepted / drafts, [...], for counters [..., 1 + K]; NaN without drafts."""
    return 1 + counts[..., 1:].sum(-1) / counts[..., 0]


class Interval(NamedTuple):
    """An estimate with a 95 % confidence interval."""

    estimate: float
    low: float
    high: float


def paired_gain(before: Tensor, after: Tensor) -> Interval:
    """Return the relative gain of acceptance length from `before` to `after`: counters by prompt, [prompts, 1 + K], same texts.

    The interval is Student's, of the jackknife over prompts of the log of the ratio; NaN for fewer than two prompts.
    """

    def log_ratio(first: Tensor, second: Tensor) -> Tensor:
        return (acceptance_length(second) / acceptance_length(first)).log()

    total = log_ratio(before.sum(0), after.sum(0))
    count = len(before)
    if count < 2:
        return Interval(float(total.expm1()), float("nan"), float("nan"))
    without = log_ratio(before.sum(0) - before, after.sum(0) - after)
    error = ((without - without.mean()).square().sum() * (count - 1) / count).sqrt()
    half = student_quantile(count - 1) * error
    return Interval(*(float(bound.expm1()) for bound in (total, total - half, total + half)))
