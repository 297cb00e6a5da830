"""Attention with a sliding window in unrolled steps, compared with one softmax under a mask; and with drafting token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.model import DecodingCache, Drafter
from aerie_drafter.model.attention import Segment, joint_attention
from aerie_drafter.train.ttt import unroll_drafter
from tests.unit.drafter.sizes import SIZES

ROWS, HEADS, LENGTH, SIZE = 2, 3, 300, 4


def compute_naively(query: Tensor, keys: list[Tensor], values: list[Tensor], starts: Tensor, window: int) -> Tensor:
    """Compute the attention of the last step; `starts` [rows, length] has the first column of each column's text."""
    column, step = torch.arange(query.shape[2]), len(keys) - 1
    masks = []
    for key_step in range(len(keys)):
        distance = column.unsqueeze(1) - column + step - key_step
        visible = column <= column.unsqueeze(1) if key_step == 0 else column == column.unsqueeze(1)
        masks.append(visible & (distance < window) & (starts.unsqueeze(1) == starts.unsqueeze(2)))
    scores = (query @ torch.cat(keys, 2).transpose(-1, -2)).masked_fill(~torch.cat(masks, 2).unsqueeze(1), float("-inf"))
    return scores.softmax(-1) @ torch.cat(values, 2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("window", "step"), [(5, 0), (5, 4), (130, 2), (299, 0), (301, 1), (302, 1)])
def test_output_and_gradients_equal_one_softmax_under_a_mask(window: int, step: int, packed: bool) -> None:
    generator = torch.Generator().manual_seed(window + step)
    shape = (ROWS, HEADS, LENGTH, SIZE)
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2 * step + 3)]
    query, keys, values = parts[0], parts[1 : step + 2], parts[step + 2 :]
    segments = None
    starts = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    if packed:
        segments = [Segment(0, 0, 7), Segment(0, 7, 160), Segment(0, 160, LENGTH), Segment(1, 0, LENGTH)]
        starts[0, 7:160], starts[0, 160:] = 7, 160
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)

    output, _ = joint_attention(query, keys[0], values[0], keys[1:], values[1:], 1.0, segments, window)
    expected = compute_naively(query, keys, values, starts, window)
    torch.testing.assert_close(output, expected)
    for actual, expected_gradient in zip(
        torch.autograd.grad((output * weights).sum(), parts), torch.autograd.grad((expected * weights).sum(), parts), strict=True
    ):
        torch.testing.assert_close(actual, expected_gradient)


def test_a_step_past_the_window_is_rejected() -> None:
    part = torch.zeros(1, 1, 4, 2)
    with pytest.raises(ValueError, match="the step 3 is past the sliding window"):
        joint_attention(part, part, part, [part] * 3, [part] * 3, 1.0, window=3)


FORMS: dict[str, dict[str, Any]] = {
    "two layers": {"num_hidden_layers": 2},
    "window": {"sliding_window": 33},
    "three layers with a window": {"num_hidden_layers": 3, "sliding_window": 36, "norm_output": True, "fc_norm": True},
    "two layers of qwen3 with a window": {"num_hidden_layers": 2, "sliding_window": 33, "family": DrafterFamily.QWEN3},
}


@pytest.mark.parametrize("form", FORMS)
def test_unrolled_steps_equal_drafting_token_by_token(form: str) -> None:
    """A draft from each column, in the cache of serving, feeds the text's tokens, as the unrolled training does."""
    torch.manual_seed(0)
    config = DrafterConfig(**{"family": DrafterFamily.LLAMA, **SIZES, **FORMS[form]})
    drafter = Drafter(config).double().requires_grad_(False)
    horizon, length = 4, 48
    tokens = torch.randint(config.vocab_size, (1, length))
    aux = torch.randn(1, length, len(config.aux_layer_ids) * config.target_hidden_size, dtype=torch.float64)
    unrolled = unroll_drafter(drafter, tokens, aux, horizon)

    cache = DecodingCache(num_layers=config.num_hidden_layers)
    for column in range(length - horizon):
        cache.discard_uncommitted()
        hidden = drafter.fuse_aux_hidden_states(aux[:, column : column + 1])
        for step in range(horizon):
            normed, hidden = drafter(tokens[:, column + 1 + step : column + 2 + step], hidden, cache)
            if step == 0:
                cache.commit()
            torch.testing.assert_close(normed[:, 0], unrolled[step][:, column])


def test_a_window_changes_only_columns_past_it() -> None:
    torch.manual_seed(0)
    changes: dict[str, Any] = {"family": DrafterFamily.LLAMA, **SIZES}
    whole, windowed = Drafter(DrafterConfig(**changes)), Drafter(DrafterConfig(**changes, sliding_window=33))
    windowed.load_state_dict(whole.state_dict())
    tokens, aux = torch.randint(SIZES["vocab_size"], (1, 60)), torch.randn(1, 60, 48)
    pairs = zip(unroll_drafter(whole, tokens, aux, 3), unroll_drafter(windowed, tokens, aux, 3), strict=True)
    for step, (expected, actual) in enumerate(pairs):
        differs = (expected - actual).abs().amax(-1)[0] > 1e-5
        assert torch.equal(differs, torch.arange(59) + step >= 33)


def test_a_cache_of_too_few_layers_is_an_error() -> None:
    drafter = Drafter(DrafterConfig(family=DrafterFamily.LLAMA, **SIZES, num_hidden_layers=2))
    with pytest.raises(ValueError, match="zip"):
        drafter(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, 16), DecodingCache())
