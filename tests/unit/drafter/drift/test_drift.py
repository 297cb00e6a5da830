"""Drift measurements, compared with a naive attention matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.drift import DriftProfile, compute_attention_masses, compute_drift_steps, measure_drift, plot_drift
from aerie_drafter.evaluate.acceptance import AnsweredText
from aerie_drafter.evaluate.offline import ModelPair
from aerie_drafter.evaluate.target import TargetRunner
from aerie_drafter.model import Drafter, UnrolledCache


def pair(*, norm_output: bool) -> ModelPair:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=19,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    drafter = Drafter(
        DrafterConfig(
            family=DrafterFamily.LLAMA,
            hidden_size=32,
            intermediate_size=40,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=19,
            draft_vocab_size=19,
            target_hidden_size=32,
            aux_layer_ids=(1, 2),
            norm_output=norm_output,
        )
    )
    return ModelPair(TargetRunner(LlamaForCausalLM(config), (1, 2)), None, drafter.requires_grad_(False))


@pytest.mark.parametrize("norm_output", [False, True])
def test_masses_equal_those_of_the_whole_attention_matrix(norm_output: bool) -> None:
    drafter = pair(norm_output=norm_output).drafter
    tokens, aux = torch.randint(19, (2, 9)), torch.randn(2, 9, 64)
    memory = UnrolledCache()
    read, hidden = tokens[:, 1:], drafter.fuse_aux_hidden_states(aux[:, :-1])
    for step in range(4):
        normed, hidden = drafter(read, hidden, memory)
        read = drafter.argmax_tokens(normed)
        sink, own = compute_attention_masses(memory)
        chance = compute_naive_attention(memory)  # [batch, heads, columns, (1 + step) * columns]
        columns = tokens.shape[1] - 1
        torch.testing.assert_close(sink, chance[..., 0].mean(1))
        torch.testing.assert_close(own, chance[..., columns:].sum(-1).mean(1))
        if not step:
            assert own.abs().max() == 0


def compute_naive_attention(memory: UnrolledCache) -> Tensor:
    assert memory.last_query is not None
    assert memory.first_keys is not None
    columns = memory.last_query.shape[2]
    keys = torch.cat([memory.first_keys, *memory.later_keys], dim=2)
    visible = torch.cat([torch.ones(columns, columns).tril(), *[torch.eye(columns)] * len(memory.later_keys)], dim=1).bool()
    scores = memory.last_query @ keys.transpose(-1, -2) * memory.attention_scale
    return scores.masked_fill(~visible, float("-inf")).softmax(-1)


def test_states_keep_their_norm_with_norm_output() -> None:
    """All norm weights are 1, so a state after the norm has the length sqrt(hidden)."""
    drafter = pair(norm_output=True).drafter
    for step in compute_drift_steps(drafter, torch.randint(19, (1, 12)), torch.randn(1, 12, 64), 5):
        torch.testing.assert_close(step.state_norm, torch.full_like(step.state_norm, 32**0.5), rtol=1e-3, atol=0)


def test_drift_is_measured_over_the_columns_of_the_answer() -> None:
    models = pair(norm_output=False)
    texts = [
        AnsweredText(torch.randint(19, (14,)), prompt_length=3, answer_end=11),
        AnsweredText(torch.randint(19, (9,)), prompt_length=2, answer_end=7),
    ]
    drift = measure_drift(models, texts, k=3)
    # Columns prompt - 1 .. length - 2 - k: 2..9 and 1..4.
    assert drift.columns == 8 + 4
    alone = [measure_drift(models, [text], k=3) for text in texts]
    for name in ("state_norm", "first_token_attention", "draft_token_attention", "cumulative_acceptance"):
        for step in range(3):
            mean = (8 * getattr(alone[0], name)[step] + 4 * getattr(alone[1], name)[step]) / 12
            assert getattr(drift, name)[step] == pytest.approx(mean, rel=1e-5)


def test_a_text_that_is_too_short_is_rejected() -> None:
    with pytest.raises(ValueError, match="no answer is longer than 8 tokens"):
        measure_drift(pair(norm_output=False), [AnsweredText(torch.randint(19, (8,)), 3, 8)])


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_plot_is_the_same_for_the_same_values(tmp_path: Path, ending: str) -> None:
    drift = DriftProfile(10, [1.0, 2.0], [0.5, 0.4], [0.0, 0.2], [0.7, 0.5])
    assert drift.state_norm_ratio == 2.0
    pictures: list[Any] = []
    for number in range(2):
        file = tmp_path / f"{number}.{ending}"
        plot_drift({"EAGLE 3": drift, "EAGLE 3.1": drift}, file)
        pictures.append(file.read_bytes())
    assert pictures[0] == pictures[1]
    if ending == "svg":
        assert b"EAGLE 3.1" in pictures[0] or b"<svg" in pictures[0]
