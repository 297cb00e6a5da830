"""Packed rows equal their conversations in rows of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aerie_drafter.config import DrafterConfig, DrafterFamily, MlaDims
from aerie_drafter.model import Drafter
from aerie_drafter.model.memory import find_segments
from aerie_drafter.train.losses import LossMixture
from aerie_drafter.train.packing import compute_text_starts, fetch_packed_hidden_states
from aerie_drafter.train.states import InProcessTarget
from aerie_drafter.train.ttt import LossOutput, TrainingBatch, TrainingTimeTest
from tests.nightly import at_night
from tests.unit.drafter.sizes import UNEQUAL_SIZES

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": DrafterFamily.LLAMA, "norm_output": True, "fc_norm": True},
    "qwen3": {"family": DrafterFamily.QWEN3},
    "mla": {"family": DrafterFamily.MLA, "mla": MlaDims(8, 4, 4, 4, 8)},
}


def build(family: str) -> tuple[Drafter, Tensor]:
    torch.manual_seed(0)
    drafter = Drafter(DrafterConfig(**UNEQUAL_SIZES | FAMILIES[family])).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    drafter.set_draft_vocabulary(torch.arange(3, 20))
    return drafter, torch.randn(23, 12, dtype=torch.float64)


def conversation(length: int, generator: torch.Generator) -> TrainingBatch:
    return TrainingBatch(
        torch.randint(23, (1, length), generator=generator),
        torch.rand(1, length, generator=generator) < 0.8,
        torch.randn(1, length, 36, generator=generator, dtype=torch.float64),
        torch.randn(1, length, 12, generator=generator, dtype=torch.float64),
    )


def pack(rows: Sequence[Sequence[TrainingBatch]]) -> TrainingBatch:
    """Return the conversations behind each other, padded."""
    longest = max(sum(part.tokens.shape[1] for part in row) for row in rows)

    def joined(name: str) -> Tensor:
        parts = [torch.cat([getattr(part, name)[0] for part in row]) for row in rows]
        return torch.stack([torch.cat([part, part.new_zeros(longest - len(part), *part.shape[1:])]) for part in parts])

    starts = compute_text_starts([[part.tokens.shape[1] for part in row] for row in rows], longest)
    names = ("tokens", "loss_mask", "aux_hidden_states", "final_hidden_states")
    return TrainingBatch(**{name: joined(name) for name in names}, text_starts=starts)


@pytest.mark.parametrize("mixture", [at_night(LossMixture()), LossMixture(kl=0.5, lk_lambda=1.0)])
@pytest.mark.parametrize("family", FAMILIES)
@given(lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=2), seed=st.integers(0, 99))
def test_loss_gradients_and_metrics_equal_those_of_separate_rows(
    family: str, mixture: LossMixture, lengths: list[list[int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [[conversation(length, generator) for length in row] for row in lengths]
    rows[0].append(conversation(7, generator))
    drafter, teacher = build(family)
    loss = TrainingTimeTest(drafter, teacher, step_weights=(1.0, 0.8, 0.5), mixture=mixture)
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]

    def run(batch: TrainingBatch) -> tuple[LossOutput, list[Tensor]]:
        output: LossOutput = loss(batch)
        return output, list(torch.autograd.grad(output.weighted_sum, parameters))

    together, gradients = run(pack(rows))
    separate = [run(part) for row in rows for part in row if part.tokens.shape[1] > 1]
    torch.testing.assert_close(together.weighted_sum, sum(output.weighted_sum for output, _ in separate))
    torch.testing.assert_close(together.metrics.sums, sum(output.metrics.sums for output, _ in separate))
    for index, gradient in enumerate(gradients):
        torch.testing.assert_close(gradient, sum(parts[index] for _, parts in separate), rtol=1e-9, atol=1e-9)


def test_without_the_starts_a_later_conversation_reads_the_earlier() -> None:
    """The property above would fail if rows were read as one text."""
    generator = torch.Generator().manual_seed(0)
    drafter, teacher = build("llama")
    batch = pack([[conversation(6, generator), conversation(8, generator)]])
    as_one_text = TrainingBatch(batch.tokens, batch.loss_mask, batch.aux_hidden_states, batch.final_hidden_states)
    loss = TrainingTimeTest(drafter, teacher, step_weights=(1.0, 0.8))
    assert abs(loss(batch).weighted_sum.item() - loss(as_one_text).weighted_sum.item()) > 0.1


def test_starts_and_segments_equal_a_calculation_by_hand() -> None:
    starts = compute_text_starts([[2, 3], [4]], 6)
    assert starts.tolist() == [[0, 0, 2, 2, 2, 5], [0, 0, 0, 0, 4, 4]]
    segments = [(0, 0, 2), (0, 2, 5), (1, 0, 4), (1, 4, 5)]
    assert [tuple(segment) for segment in find_segments(starts[:, :5])] == segments


@given(lengths=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_target_reads_each_conversation_alone(target_of: Callable[..., Any], lengths: list[list[int]]) -> None:
    source = InProcessTarget(target_of(), (2, 6))
    generator = torch.Generator().manual_seed(1)
    rows = [[torch.randint(264, (length,), generator=generator, dtype=torch.int32) for length in row] for row in lengths]
    size = max(sum(row) for row in lengths) + 2
    packed = fetch_packed_hidden_states(source, torch.zeros(len(rows), size, dtype=torch.long), rows)
    for row, conversations in enumerate(rows):
        begin = 0
        for tokens in conversations:
            alone = source.fetch_hidden_states(tokens.long().unsqueeze(0))
            for together, single in zip(packed, alone, strict=True):
                torch.testing.assert_close(together[row, begin : begin + len(tokens)], single[0], rtol=1e-4, atol=1e-5)
            begin += len(tokens)
        assert not packed.final_hidden_states[row, begin:].any()
