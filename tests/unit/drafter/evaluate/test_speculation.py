"""Speculation does not change the target's distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie_drafter.evaluate.speculation import TokenSampler, decode_speculatively, verify_draft
from tests.nightly import at_night


def chi_square(observed: dict[Any, int], expected: dict[Any, float], total: int) -> float:
    """Return chi-square in standard deviations above its mean, over cells that are expected at least five times."""
    cells = [key for key, chance in expected.items() if chance * total >= 5]
    assert len(cells) > 3
    statistic = sum((observed.get(key, 0) - expected[key] * total) ** 2 / (expected[key] * total) for key in cells)
    return float((statistic - len(cells)) / (2 * len(cells)) ** 0.5)


@pytest.mark.parametrize("sampled", [False, True])
def test_verification_emits_the_targets_distribution(sampled: bool) -> None:
    """First two emitted tokens against p0 x p1, drafts drawn from q or q's likeliest token."""
    draw = torch.Generator().manual_seed(5)
    sampling = TokenSampler(1.0, sampled, draw)
    q = torch.rand(2, 5, generator=draw, dtype=torch.float64)
    p = torch.rand(3, 5, generator=draw, dtype=torch.float64) ** 3
    q, p = q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True)
    proposed = q if sampled else torch.nn.functional.one_hot(q.argmax(-1), 5).double()
    emitted_counts: Counter[tuple[int, ...]] = Counter()
    total = 8000
    for _ in range(total):
        drafted = [sampling.sample_token(each) for each in proposed]
        emitted = verify_draft(drafted, proposed, p, sampling)
        while len(emitted) < 2:  # the next verification's first token, were it to draft nothing
            emitted.append(sampling.sample_token(p[len(emitted)]))
        emitted_counts[tuple(emitted[:2])] += 1
    expected = {(a, b): float(p[0, a] * p[1, b]) for a, b in itertools.product(range(5), repeat=2)}
    assert abs(chi_square(emitted_counts, expected, total)) < 4


def test_accepted_tokens_are_the_overlap_of_the_distributions() -> None:
    draw = torch.Generator().manual_seed(2)
    sampling = TokenSampler(1.0, True, draw)
    q, p = (torch.rand(1, 6, generator=draw, dtype=torch.float64) for _ in range(2))
    q, p = q / q.sum(), p / p.sum()
    total = 6000
    accepted = sum(len(verify_draft([sampling.sample_token(q[0])], q, torch.cat([p, p]), sampling)) - 1 for _ in range(total))
    overlap = float(torch.minimum(p, q).sum())
    assert accepted / total == pytest.approx(overlap, abs=4 * (overlap * (1 - overlap) / total) ** 0.5)


def test_a_draft_with_target_probability_0_is_rejected() -> None:
    proposed, target_probabilities = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
    assert verify_draft([0], proposed, target_probabilities, TokenSampler()) == [1]
    assert verify_draft([1], target_probabilities[:1], target_probabilities, TokenSampler()) == [1, 0]


@pytest.mark.parametrize("sampled", [at_night(False), True])
def test_speculative_texts_are_distributed_as_the_targets(make_pair: Callable[..., Any], sampled: bool) -> None:
    """All texts of three tokens, their chances computed by the target alone, against what the loop emits."""
    target, drafter = make_pair(4, draft_vocabulary=6)
    prompt, temperature = [2, 5, 1], 1.4
    size = drafter.config.vocab_size
    texts = list(itertools.product(range(size), repeat=3))
    logits = target(torch.tensor([[*prompt, *text] for text in texts])).logits
    chance: Tensor = (logits.double() / temperature).softmax(-1)
    expected = {
        text: float(chance[row, 2, text[0]] * chance[row, 3, text[1]] * chance[row, 4, text[2]]) for row, text in enumerate(texts)
    }
    assert sum(expected.values()) == pytest.approx(1.0)
    sampling = TokenSampler(temperature, sampled, torch.Generator().manual_seed(9))
    total = 400
    text_counts = Counter(
        tuple(decode_speculatively(target, drafter, prompt, 2, 3, frozenset(), sampling)[0]) for _ in range(total)
    )
    assert abs(chi_square(text_counts, expected, total)) < 4
