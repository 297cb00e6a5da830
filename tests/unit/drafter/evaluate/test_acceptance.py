"""The walk over a text counts the same as serving that text."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aerie_drafter.errors import TargetError
from aerie_drafter.evaluate.acceptance import (
    AcceptanceCounts,
    AnsweredText,
    compute_accepted_lengths,
    count_acceptance,
    iterate_draft_columns,
)
from aerie_drafter.evaluate.answers import answer_batch
from aerie_drafter.evaluate.speculation import TokenSampler, decode_speculatively
from aerie_drafter.evaluate.target import TargetRunner

PROMPTS = [[0, 3, 2, 5], [1, 1, 4, 6, 2, 3, 0], [5, 2]]


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_walk_counts_what_a_token_by_token_loop_counts(make_pair: Callable[..., Any], norm_output: bool, k: int) -> None:
    total = AcceptanceCounts.zero(k)
    for seed in range(3):
        target, drafter = make_pair(seed, norm_output=norm_output, draft_vocabulary=6)
        ends = frozenset({6})
        texts = answer_batch(target, PROMPTS, max_tokens=24, extra_tokens=k, end_tokens=ends)
        for prompt, text in zip(PROMPTS, texts, strict=True):
            tokens = text.tokens.unsqueeze(0)
            [lengths] = compute_accepted_lengths(drafter, tokens, target(tokens).aux_hidden_states, k).tolist()
            emitted, counted = decode_speculatively(target, drafter, prompt, k, 24, ends, TokenSampler())
            assert emitted == text.tokens[text.prompt_length : text.answer_end].tolist()
            assert count_acceptance(lengths, text, k) == counted
            total += counted
    assert total.drafts > 50
    assert total.accepted_per_position[0] > 10, "the two never agree: the test would prove nothing"


def test_speculation_at_temperature_0_equals_greedy_decoding(make_pair: Callable[..., Any]) -> None:
    for seed in range(4):
        target, drafter = make_pair(seed, draft_vocabulary=5)
        greedy = list(PROMPTS[0])
        for _ in range(30):
            greedy.append(int(target(torch.tensor([greedy])).logits[0, -1].argmax()))
        for sampled_drafts in (False, True):
            sampling = TokenSampler(sampled_drafts=sampled_drafts)
            emitted, _ = decode_speculatively(target, drafter, PROMPTS[0], 4, 30, frozenset(), sampling)
            assert emitted == greedy[4:]


def test_sampled_texts_have_the_acceptance_of_serving(make_pair: Callable[..., Any]) -> None:
    """A greedy draft is accepted exactly where it is the token that the target drew: both methods have the same mean."""
    target, drafter = make_pair(3)
    draw = torch.Generator().manual_seed(11)
    k, looped, walked = 3, AcceptanceCounts.zero(3), AcceptanceCounts.zero(3)
    for text in answer_batch(
        target, [PROMPTS[1]] * 150, max_tokens=20, extra_tokens=k, end_tokens=frozenset(), temperature=0.7, generator=draw
    ):
        tokens = text.tokens.unsqueeze(0)
        walked += count_acceptance(
            compute_accepted_lengths(drafter, tokens, target(tokens).aux_hidden_states, k)[0].tolist(), text, k
        )
    sampling = TokenSampler(0.7, generator=draw)
    for _ in range(40):
        looped += decode_speculatively(target, drafter, PROMPTS[1], k, 20, frozenset(), sampling)[1]
    for looped_rate, walked_rate in zip(looped.acceptance_rates, walked.acceptance_rates, strict=True):
        assert looped_rate == pytest.approx(walked_rate, abs=4 * (0.25 / looped.drafts) ** 0.5)


def test_a_batch_equals_its_single_texts(make_pair: Callable[..., Any]) -> None:
    target, _ = make_pair(1)
    together = answer_batch(target, PROMPTS, max_tokens=12, extra_tokens=2, end_tokens=frozenset({4}))
    for prompt, text in zip(PROMPTS, together, strict=True):
        [alone] = answer_batch(target, [prompt], max_tokens=12, extra_tokens=2, end_tokens=frozenset({4}))
        assert text.tokens.tolist() == alone.tokens.tolist()
        assert (text.prompt_length, text.answer_end) == (len(prompt), alone.answer_end)
        assert len(text.tokens) == text.answer_end + 2


def test_a_walk_calculated_by_hand() -> None:
    # A prompt of 3, an answer of 7 that ends before 10. From column 2 two drafted tokens are accepted, so three are emitted
    # (5, 6, 7 after the prefill's 3: places 4, 5, 6); the next draft starts at column 5, and the last at 6.
    lengths = [9, 9, 2, 9, 9, 0, 3, 9, 9]
    text = AnsweredText(torch.zeros(12), prompt_length=3, answer_end=10)
    assert list(iterate_draft_columns(lengths, 3, 10)) == [2, 5, 6]
    assert count_acceptance(lengths, text, 3) == AcceptanceCounts(3, (2, 2, 1))
    assert count_acceptance(lengths, text, 3).acceptance_length == pytest.approx(1 + 5 / 3)
    assert count_acceptance(lengths, text, 3).acceptance_rates == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert count_acceptance(lengths, text, 3).conditional_rates == pytest.approx([2 / 3, 1.0, 0.5])


@given(st.lists(st.integers(0, 4), min_size=4, max_size=60), st.integers(1, 3))
def test_the_walk_emits_every_token_of_the_answer_once(lengths: list[int], prompt: int) -> None:
    end = len(lengths)
    emitted = [
        place
        for column in iterate_draft_columns(lengths, prompt, end)
        for place in range(column + 2, column + 3 + lengths[column])
    ]
    assert emitted == list(range(prompt + 1, prompt + 1 + len(emitted)))
    assert len(emitted) >= end - prompt - 1


def test_a_missing_layer_of_the_target_is_reported(make_pair: Callable[..., Any]) -> None:
    target, _ = make_pair()
    with pytest.raises(TargetError, match="reads layer 4, and the target has 3"):
        TargetRunner(target.model, (1, 4))


def test_a_target_with_another_architecture_is_rejected() -> None:
    model = SimpleNamespace(eval=lambda: SimpleNamespace(device="cpu"), device="cpu")
    with pytest.raises(TargetError):
        TargetRunner(model, (1,))
