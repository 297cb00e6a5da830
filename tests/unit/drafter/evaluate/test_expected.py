"""Expected counters against an enumeration of speculative decoding, the walk of drawn drafts, and calculations by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aerie_drafter.evaluate.acceptance import AnsweredText, count_acceptance
from aerie_drafter.evaluate.expected import acceptance_length, expected_counts, paired_gain

VOCABULARY, K, ANSWER = 3, 2, 4
FIRST = 0
"""The prompt's only token."""


def tables(seed: int, *, greedy: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the target's p[previous token] and the drafter's q[step][previous token]; the drafter never proposes token 2."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64).softmax(-1)
    q = []
    for _ in range(K):
        logits = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
        logits[:, 2] = float("-inf")
        q.append(torch.nn.functional.one_hot(logits.argmax(-1), VOCABULARY).double() if greedy else logits.softmax(-1))
    return p, q


def enumerate_serving(p: Tensor, q: list[Tensor]) -> Tensor:
    """Return the exact mean of a server's counters: all draws of drafts, verifications and corrections, by their chances."""
    counts = torch.zeros(1 + K, dtype=torch.float64)

    def outcomes(last: int) -> Iterator[tuple[float, list[int]]]:
        """Yield (chance, emitted tokens) of one verification after the token `last`."""

        def go(chance: float, previous: int, position: int, emitted: list[int]) -> Iterator[tuple[float, list[int]]]:
            if position == K:
                for token in range(VOCABULARY):
                    yield chance * float(p[previous, token]), [*emitted, token]
                return
            draft, target = q[position][previous], p[previous]
            rest = (target - draft).clamp(min=0)
            for drafted in range(VOCABULARY):
                if not draft[drafted]:
                    continue
                accept = min(1.0, float(target[drafted] / draft[drafted]))
                yield from go(chance * float(draft[drafted]) * accept, drafted, position + 1, [*emitted, drafted])
                if accept < 1:
                    for token in range(VOCABULARY):
                        correction = float(rest[token] / rest.sum())
                        yield chance * float(draft[drafted]) * (1 - accept) * correction, [*emitted, token]

        yield from go(1.0, last, 0, [])

    def serve(chance: float, last: int, length: int) -> None:
        if length >= ANSWER or chance == 0:
            return
        counts[0] += chance
        for share, emitted in outcomes(last):
            for position in range(len(emitted) - 1):
                counts[1 + position] += chance * share
            serve(chance * share, emitted[-1], length + len(emitted))

    for token in range(VOCABULARY):  # the prefill emits the first token
        serve(float(p[FIRST, token]), token, 1)
    return counts


def expected_over_texts(p: Tensor, q: list[Tensor]) -> Tensor:
    """Return the mean of the expected counters over all texts of the target, by their chances."""
    total = torch.zeros(1 + K, dtype=torch.float64)
    for answer in itertools.product(range(VOCABULARY), repeat=ANSWER + K):
        text = [FIRST, *answer]
        chance = math.prod(float(p[a, b]) for a, b in itertools.pairwise(text))
        columns = len(text) - 1
        position_acceptance = [[0.0] * columns for _ in range(K)]
        text_acceptance = [[0.0] * columns for _ in range(K)]
        for column in range(columns):
            for step in range(K):
                if column + 2 + step >= len(text):
                    continue
                previous, token = text[column + 1 + step], text[column + 2 + step]
                draft, target = q[step][previous], p[previous]
                position_acceptance[step][column] = float(torch.minimum(draft, target).sum())
                text_acceptance[step][column] = min(1.0, float(draft[token] / target[token]))
        total += chance * expected_counts(position_acceptance, text_acceptance, 1, 1 + ANSWER)
    return total


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_over_texts_is_the_mean_of_serving(seed: int, *, greedy: bool) -> None:
    p, q = tables(seed, greedy=greedy)
    torch.testing.assert_close(expected_over_texts(p, q), enumerate_serving(p, q), rtol=1e-10, atol=1e-12)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=4, max_size=40), st.integers(1, 3))
def test_certain_columns_are_the_walk_of_greedy_drafts(matches: list[list[bool]], prompt: int) -> None:
    lengths = [[*row, False].index(False) for row in matches]
    text = AnsweredText(torch.zeros(len(matches) + 1), prompt, len(matches))
    by_step = [[float(row[step]) for row in matches] for step in range(3)]
    walked = count_acceptance(lengths, text, 3)
    counted = expected_counts(by_step, by_step, prompt, len(matches)).tolist()
    assert counted == [walked.drafts, *walked.accepted_per_position]


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(3, 20))
def test_counters_are_bounded_and_visit_every_token_once(seed: int, k: int, end: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(k, end + 1, generator=generator, dtype=torch.float64).tolist()
    drafts, *accepted = expected_counts(chances, chances, 1, end).tolist()
    assert 1 <= drafts <= end - 2
    assert drafts + 1e-9 >= accepted[0]
    assert accepted == sorted(accepted, reverse=True)
    assert drafts + sum(accepted) >= end - 2 - 1e-9  # all tokens but the prefill's are emitted, and perhaps some beyond the end


def test_an_answer_that_the_prefill_ends_has_no_drafts() -> None:
    assert expected_counts([[0.5] * 4], [[0.5] * 4], 2, 3).tolist() == [0, 0]


def test_counters_equal_a_calculation_by_hand() -> None:
    """K = 1, a prompt of one token and an answer of four: columns 0, 1 and 2 can draft.

    The text's token was accepted with chance 1/2 in column 0, so column 1 is visited with 1/2. From it column 2 is reached with
    chance 3/4 (1/4 of its tokens are accepted); from column 0 directly with 1/2. Visits 1, 1/2, 1/2 + 3/8 = 7/8.
    """
    position, text = [[0.4, 0.2, 0.8, 0.0, 0.0]], [[0.5, 0.25, 1.0, 0.0, 0.0]]
    drafts, accepted = expected_counts(position, text, 1, 5).tolist()
    assert drafts == pytest.approx(1 + 1 / 2 + 7 / 8)
    assert accepted == pytest.approx(0.4 + 0.1 + 0.7)


def test_the_gain_of_equal_drafters_is_zero() -> None:
    counts = torch.tensor([[3.0, 2.0, 1.0], [5.0, 1.0, 0.0], [2.0, 2.0, 2.0]], dtype=torch.float64)
    assert paired_gain(counts, counts) == (0, 0, 0)
    assert math.isnan(paired_gain(counts[:1], counts[:1]).low)
    assert acceptance_length(counts).tolist() == [2.0, 1.2, 3.0]


def test_intervals_contain_the_true_gain() -> None:
    """Prompts differ by far more than the drafters differ; the pairs remove that."""
    generator = torch.Generator().manual_seed(1)
    contained, runs, gain = 0, 400, 0.05
    for _ in range(runs):
        level = 1 + torch.rand(24, generator=generator, dtype=torch.float64)  # acceptance length - 1 by prompt
        drafts = 20 + 10 * torch.rand(24, generator=generator, dtype=torch.float64)
        noise = 0.05 * torch.randn(24, generator=generator, dtype=torch.float64)
        before = torch.stack([drafts, drafts * level], -1)
        after = torch.stack([drafts, drafts * ((1 + level) * (1 + gain) - 1 + noise)], -1)
        interval = paired_gain(before, after)
        contained += interval.low <= gain <= interval.high
        assert interval.high - interval.low < 0.05
    assert 0.92 <= contained / runs <= 0.98
